"""Top singular triplets from products with blocks of vectors: block Golub-Kahan and block Lanczos, with thick restarts.

Golub-Kahan takes J and J^T. Two orthonormal bases U, V of m columns grow by a block of b at a time,

    J V   = U B                                     B (m, m), upper block bidiagonal (after a restart, arrow-headed)
    J^T U = V B^T + Z C^T E^T                       Z (d, b), the next block; E: the last b of m coordinates

With B = P S Q^T the Ritz triplets are u = U p, v = V q. Then J v = s u exactly, and |J^T u - s v| = |C^T E^T p|, which
the small problem tells without another product. When the bases are full and this is still too large, they are cut
down to the best triplets and grow again from Z (Baglama & Reichel, SIAM J. Sci. Comput. 27, 2005): it costs a tenth
more products than bases without bound, and keeps the small problems small.

Lanczos takes A = J J^T, where that matrix is at hand. With one basis, A U = U T + Z C^T E^T for symmetric T = Q diag(s^2)
Q^T, and |A u - s^2 u| / s = |J^T u - s v|. But squares lose half the digits where singular values fall far.

Cost of n columns: 2 n products (n of Lanczos), 8 d n m operations (4) to keep the bases orthogonal, and n / m small
decompositions, or one a step.
"""

from collections.abc import Callable
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # (*B, d, b) -> (*B, d, b)

BLOCK = 16  # on CPUs wider blocks cost more columns than their faster products win back
SEED = 0x5EED
SQUARABLE = 0.1  # of s_K / s_1: from there on rounding of J J^T stays far below the tolerance of a residual


def basis_size(d: int, K: int) -> int:
    """Columns m of a basis: about three times those wanted, and at most what leaves room in d for the next block."""
    return min(d // BLOCK - 1, ceil((100 + 3 * K) / BLOCK)) * BLOCK


def has_room(d: int, K: int) -> bool:
    """Whether the bases can hold K triplets and grow."""
    return basis_size(d, K) >= K + 2 * BLOCK


def expected_columns(d: int, K: int, dtype: torch.dtype) -> int:
    """Columns n until K triplets of a flat spectrum converge: a fit to blocks at initialisation, the slowest met."""
    n = (27 + 0.3 * K) * d ** (1 / 3)
    return ceil(n if dtype == torch.float32 else 1.6 * n)


def block_golub_kahan(
    apply: Product,
    apply_transpose: Product,
    start: Float[Tensor, "*B d b"],
    K: int,
    tolerance: float,
    dear: bool = False,
) -> tuple[Float[Tensor, "*B d K"], Float[Tensor, "*B r"], Float[Tensor, "*B d K"]]:
    """The top K triplets U, S, V of one operator or of a batch; S goes on with lower, rougher singular values.

    Stops when every residual is below `tolerance` s_1, or after four times the columns expected: what was reached is
    for the caller to test.

    Args:
        apply: V -> J V.
        apply_transpose: U -> J^T U.
        start: an orthonormal block.
        dear: whether a product costs more than a small decomposition: then every step looks whether it is the last,
            otherwise only a full basis does.

    Raises:
        ValueError: if a product has entries that are not finite.
    """
    *batch, d, b = start.shape
    m = basis_size(d, K)
    kept = (m + K) // (2 * b) * b
    budget = 4 * expected_columns(d, K, start.dtype)
    generator = torch.Generator().manual_seed(SEED + 1)
    # Rows, not columns: products of a few long rows are a third faster in BLAS than of a few long columns.
    V, U = start.new_empty(*batch, m, d), start.new_empty(*batch, m, d)
    B = start.new_zeros(*batch, m, m)
    Z, before, H, size = start.mT, slice(0, 0), B[..., :0, :b], 0  # H: what J Z has of U[before]
    scale = start.new_zeros(*batch, 1, 1)
    while True:
        while size < m:
            new = slice(size, size + b)
            V[..., new, :] = Z
            W = apply(Z.mT).mT
            scale = torch.maximum(scale, _longest(W))
            W, R, rest = _orthonormalise(W - H.mT @ U[..., before, :], scale, U[..., :size, :], generator)
            U[..., new, :] = W
            B[..., before, new] = H
            B[..., :size, new] += rest.mT
            B[..., new, new] = R.mT
            size += b
            Z = apply_transpose(W.mT).mT
            scale = torch.maximum(scale, _longest(Z))
            Z, C, _ = _orthonormalise(Z - R.mT @ V[..., new, :], scale, V[..., :size, :], generator)
            before, H = new, C
            budget -= b
            if size < m and not (dear and size > K + b):
                continue
            P, S, Q, tail = _ritz(B[..., :size, :size], C)
            residual = torch.linalg.vector_norm(tail[..., :K], dim=-2).amax(-1)
            if bool((residual <= tolerance * S[..., 0]).all()) or budget < 0:
                return U[..., :size, :].mT @ P[..., :K], S, V[..., :size, :].mT @ Q[..., :K]
        U[..., :kept, :] = P[..., :kept].mT @ U
        V[..., :kept, :] = Q[..., :kept].mT @ V
        B = torch.diag_embed(S)
        before, H, size = slice(0, kept), tail[..., :kept].mT, kept


def block_lanczos(
    apply: Product, start: Float[Tensor, "*B d b"], K: int, tolerance: float
) -> tuple[Float[Tensor, "*B m"], Float[Tensor, "*B d K"]]:
    """The top K left singular vectors U of one J or of a batch, and S, which goes on with lower, rougher singular values.

    Stops as `block_golub_kahan` does, and where s_K is at most SQUARABLE s_1.

    Args:
        apply: U -> J J^T U.
        start: an orthonormal block.

    Raises:
        ValueError: if a product has entries that are not finite.
    """
    *batch, d, b = start.shape
    m = basis_size(d, K)
    kept = (m + K) // (2 * b) * b
    budget = 4 * expected_columns(d, K, start.dtype)
    generator = torch.Generator().manual_seed(SEED + 1)
    U, T = start.new_empty(*batch, m, d), start.new_zeros(*batch, m, m)
    Z, before, H, size = start.mT, slice(0, 0), T[..., :0, :b], 0  # H: what A Z has of U[before]
    scale = start.new_zeros(*batch, 1, 1)
    while True:
        while size < m:
            new = slice(size, size + b)
            U[..., new, :] = Z
            W = apply(Z.mT).mT
            scale = torch.maximum(scale, _longest(W))
            W = W - H.mT @ U[..., before, :]
            D = W @ Z.mT
            T[..., before, new], T[..., new, before], T[..., new, new] = H, H.mT, D
            size += b
            Z, C, _ = _orthonormalise(W - D @ Z, scale, U[..., :size, :], generator)
            before, H = new, C
            budget -= b
        eigenvalues, Q, tail = _ritz_symmetric(T, C)
        S = eigenvalues.clamp_min(0).sqrt()
        residual = torch.linalg.vector_norm(tail[..., :K], dim=-2)
        reached = (residual <= tolerance * S[..., :1] * S[..., :K]).all(-1)
        if bool((reached | (S[..., K - 1] <= SQUARABLE * S[..., 0])).all()) or budget < 0:
            return S, U.mT @ Q[..., :K]
        U[..., :kept, :] = Q[..., :kept].mT @ U
        T = torch.diag_embed(eigenvalues)
        before, H, size = slice(0, kept), tail[..., :kept].mT, kept


def _ritz_symmetric(T: Float[Tensor, "*B m m"], C: Float[Tensor, "*B b b"]) -> tuple[Tensor, Tensor, Tensor]:
    """As `_ritz`, of T = Q diag(eigenvalues, falling) Q^T."""
    eigenvalues, Q = (part.flip(-1) for part in torch.linalg.eigh(T.double().cpu()))
    tail = C.double().cpu().mT @ Q[..., -C.shape[-1] :, :]
    return eigenvalues.to(T), Q.to(T), tail.to(T)


def _ritz(B: Float[Tensor, "*B m m"], C: Float[Tensor, "*B b b"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, S, Q with B = P S Q^T, and what J^T u - s v of every Ritz pair is in the next block.

    In float64, where it costs little and stays out of the residuals; on the CPU, as GPUs are slow at small ones.
    """
    P, S, Qh = torch.linalg.svd(B.double().cpu())
    tail = C.double().cpu().mT @ P[..., -C.shape[-1] :, :]
    return P.to(B), S.to(B), Qh.mT.to(B), tail.to(B)


def start_block(d: int, like: Tensor) -> Float[Tensor, "d b"]:
    """A random orthonormal block: the same every time, and the global random state is left alone."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.linalg.qr(torch.randn(d, BLOCK, generator=generator, dtype=torch.float64)).Q.to(like)


def _longest(W: Tensor) -> Tensor:
    """The length of the longest row, also where squares of the entries underflow."""
    largest = W.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    return largest * torch.linalg.vector_norm(W / unit, dim=-1, keepdim=True).amax(-2, keepdim=True)


def _orthonormalise(
    W: Tensor, scale: Tensor, basis: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, L and c with W = L Q + c basis, rows of Q orthonormal and orthogonal to those of the basis.

    In theory c is zero: what a product has of the basis is known, and taken away already. What rounding left of it is
    taken away here after the rows have been normalised, as often as that still shortens them much: once, as a rule.
    `scale` is the operator's, against which rounding is told from directions.
    """
    scale = torch.where(scale > 0, scale, 1)
    Q, L, _ = _orthonormal_rows(W / scale, generator)
    L, c, shortest = L * scale, torch.zeros_like(Q @ basis.mT), 0.0
    while shortest < 0.1:
        overlap = Q @ basis.mT
        Q, factor, shortest = _orthonormal_rows(Q - overlap @ basis, generator)
        L, c = L @ factor, c + L @ overlap
    return Q, L, c


def _orthonormal_rows(W: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Q and L with W = L Q, to the rounding of rows of length 1, and the length of the shortest row.

    By Cholesky, a few products on any device, where the rows are well apart. Where they are not (a deficient or zero
    operator, a space exhausted) by SVD, and directions that are only rounding are drawn at random: any will do, so
    long as it is new.
    """
    L, info = torch.linalg.cholesky_ex(W @ W.mT)
    shortest = float(torch.where(info == 0, L.diagonal(dim1=-2, dim2=-1).amin(-1), 0).min())
    if shortest > 1e-2:
        return torch.linalg.solve_triangular(L, W, upper=False), L, shortest
    if not torch.isfinite(W).all():
        raise ValueError("a product with the Jacobian is not finite (overflow or NaN); nothing can be decomposed")
    A, s, Q = torch.linalg.svd(W, full_matrices=False)
    absent = s <= 10 * torch.finfo(W.dtype).eps
    drawn = torch.randn(Q.shape, generator=generator, dtype=torch.float64).to(Q) / W.shape[-1] ** 0.5
    return torch.where(absent[..., None], drawn, Q), A * torch.where(absent, 0, s)[..., None, :], float(s.min())
