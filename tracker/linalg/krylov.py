"""Top singular triplets from products with blocks of vectors: block Golub-Kahan and block Lanczos, with thick restarts.

Golub-Kahan uses J and J^T. Two orthonormal bases U, V of m columns grow by blocks of b columns,

    J V   = U B                                     B (m, m), upper block bidiagonal (after a restart, arrow-headed)
    J^T U = V B^T + Z C^T E^T                       Z (d, b), the next block; E: the last b of m coordinates

With B = P S Q^T the Ritz triplets are u = U p, v = V q. Then J v = s u exactly, and |J^T u - s v| = |C^T E^T p|, which
the small problem gives without another product.

Lanczos uses A = J J^T, if that matrix has been formed, and one basis: A U = U T + Z C^T E^T, T symmetric = Q diag(s^2) Q^T,
u = U q. With v = J^T u / s here J^T u = s v exactly, and |J v - s u| = |A u - s^2 u| / s = |C^T E^T q| / s. Squares lose
digits of small singular values: s_k has a relative error of eps (s_1 / s_k)^2.

When the bases are full and the residuals are still too large, the bases are restricted to the best triplets and grow again
from Z (Baglama & Reichel, SIAM J. Sci. Comput. 27, 2005). This costs a tenth more products than unbounded bases and keeps
the small problems small.

Cost of n columns: 2 n products (with A: n), 8 d n m operations (4) to keep the bases orthogonal, and n / m small
decompositions, or one a step.
"""

from collections.abc import Callable
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # (*B, d, b) -> (*B, d, b)
Bases = tuple[
    Tensor, ...
]  # (*B, m, d), vectors as rows: products of a few long rows are a third faster than those of columns

BLOCK = 16  # on CPUs the faster products of wider blocks do not make up for the additional columns
SEED = 0x5EED


def basis_size(d: int, K: int) -> int:
    """Return the columns m of a basis: about 3 K, and few enough that another block fits into d dimensions."""
    return min(d // BLOCK - 1, ceil((100 + 3 * K) / BLOCK)) * BLOCK


def basis_fits(d: int, K: int) -> bool:
    """Whether the bases are large enough for K triplets and two more blocks."""
    return basis_size(d, K) >= K + 2 * BLOCK


def expected_columns(d: int, K: int, dtype: torch.dtype) -> int:
    """Estimate the columns n until K triplets of a flat spectrum, the slowest case, converge: a fit to untrained blocks."""
    n = (27 + 0.3 * K) * d ** (1 / 3)
    return ceil(n if dtype == torch.float32 else 1.6 * n)


def block_golub_kahan(
    apply: Product,
    apply_transpose: Product,
    start: Float[Tensor, "*B d b"],
    K: int,
    tolerance: float,
    check_every_block: bool = False,
) -> tuple[Float[Tensor, "*B d K"], Float[Tensor, "*B r"], Float[Tensor, "*B d K"]]:
    """Return the top K triplets U, S, V of one operator or of a batch; S continues with lower, less accurate singular values.

    Stop when every residual, as estimated by the small problem, is below `tolerance` s_1, or after four times the expected
    columns: the caller checks what was reached.

    Args:
        apply: V -> J V.
        apply_transpose: U -> J^T U.
        start: an orthonormal block.
        K: number of triplets.
        tolerance: of the residuals, relative to s_1.
        check_every_block: whether to check for convergence after every block, not only when the basis is full; for products
            that cost more than a small decomposition.

    Raises:
        ValueError: if a product has entries that are not finite.
    """
    U, V = (_empty_basis(start, K) for _ in "UV")
    orthonormalise = _Orthonormaliser(start)

    def step(Z: Tensor, H: Tensor, before: slice, new: slice, B: Tensor) -> tuple[Tensor, Tensor]:
        V[..., new, :] = Z
        W = orthonormalise.update_scale(apply(Z.mT).mT)
        U[..., new, :], R, rest = orthonormalise(W - H.mT @ U[..., before, :], U[..., : new.start, :])
        B[..., before, new] = H
        B[..., : new.start, new] += rest.mT
        B[..., new, new] = R.mT
        W = orthonormalise.update_scale(apply_transpose(U[..., new, :].mT).mT)
        Z, C, _ = orthonormalise(W - R.mT @ V[..., new, :], V[..., : new.stop, :])
        return Z, C

    def ritz(B: Tensor, C: Tensor) -> tuple[Tensor, Bases, Tensor]:
        P, S, Qh = torch.linalg.svd(B)
        return S, (P, Qh.mT), C.mT @ P[..., -C.shape[-1] :, :]

    def reached(S: Tensor, residual: Tensor) -> Tensor:
        return residual <= tolerance * S[..., :1]

    S, (U_K, V_K) = _restarted(step, ritz, reached, (U, V), start, K, check_every_block)
    return U_K, S, V_K


def block_lanczos(
    apply: Product, start: Float[Tensor, "*B d b"], K: int, tolerance: float
) -> tuple[Float[Tensor, "*B d K"], Float[Tensor, "*B m"]]:
    """Return the top K left singular vectors U of one J or of a batch, and S, with lower, less accurate values after the K-th.

    Stop as `block_golub_kahan` does.

    Args:
        apply: U -> J J^T U.
        start: an orthonormal block.
    """
    U = _empty_basis(start, K)
    orthonormalise = _Orthonormaliser(start)

    def step(Z: Tensor, H: Tensor, before: slice, new: slice, T: Tensor) -> tuple[Tensor, Tensor]:
        U[..., new, :] = Z
        W = orthonormalise.update_scale(apply(Z.mT).mT) - H.mT @ U[..., before, :]
        D = W @ Z.mT
        T[..., before, new], T[..., new, before], T[..., new, new] = H, H.mT, D
        Z, C, _ = orthonormalise(W - D @ Z, U[..., : new.stop, :])
        return Z, C

    def ritz(T: Tensor, C: Tensor) -> tuple[Tensor, Bases, Tensor]:
        squares, Q = (part.flip(-1) for part in torch.linalg.eigh(T))
        return squares, (Q,), C.mT @ Q[..., -C.shape[-1] :, :]

    def reached(squares: Tensor, residual: Tensor) -> Tensor:
        S = squares[..., : residual.shape[-1]].clamp_min(0).sqrt()
        return residual <= tolerance * S[..., :1] * S

    squares, (U_K,) = _restarted(step, ritz, reached, (U,), start, K, check_every_block=False)
    return U_K, squares.clamp_min(0).sqrt()


def _restarted(
    step: Callable[..., tuple[Tensor, Tensor]],
    ritz: Callable[[Tensor, Tensor], tuple[Tensor, Bases, Tensor]],
    reached: Callable[[Tensor, Tensor], Tensor],
    bases: Bases,
    start: Float[Tensor, "*B d b"],
    K: int,
    check_every_block: bool,
) -> tuple[Tensor, list[Float[Tensor, "*B d K"]]]:
    """Grow the bases block by block, restart them when full; return the Ritz values and the top K Ritz vectors of each basis.

    Args:
        step: adds a block Z to the bases as the rows `new`, H being its coupling to the rows `before`; fills in the small
            matrix, and returns the next Z and H.
        ritz: from the small matrix and the last H, the Ritz values, the vectors for each basis, and the coupling of each
            Ritz vector to the next block. Computed in float64 on the CPU: GPUs are slow for small matrices.
        reached: whether values with these residuals have converged.
        bases: empty bases.
        start: the first block.
        K: number of triplets.
        check_every_block: as in `block_golub_kahan`.
    """
    *batch, m, _ = bases[0].shape
    b = start.shape[-1]
    kept, budget = (m + K) // (2 * b) * b, 4 * expected_columns(start.shape[-2], K, start.dtype)
    small = start.new_zeros(*batch, m, m)
    Z, before, H, size = start.mT, slice(0, 0), small[..., :0, :b], 0
    while True:
        while size < m:
            new = slice(size, size + b)
            Z, H = step(Z, H, before, new, small)
            before, size, budget = new, size + b, budget - b
            if size < m and not (check_every_block and size > K + b):
                continue
            values, vectors, tail = ritz(small[..., :size, :size].double().cpu(), H.double().cpu())
            values, tail, *vectors = (part.to(start) for part in (values, tail, *vectors))
            if bool(reached(values, torch.linalg.vector_norm(tail[..., :K], dim=-2)).all()) or budget < 0:
                top = [basis[..., :size, :].mT @ Q[..., :K] for basis, Q in zip(bases, vectors, strict=True)]
                return values, top
        for basis, Q in zip(bases, vectors, strict=True):
            basis[..., :kept, :] = Q[..., :kept].mT @ basis
        small = torch.diag_embed(values)
        before, H, size = slice(0, kept), tail[..., :kept].mT, kept


def _empty_basis(start: Float[Tensor, "*B d b"], K: int) -> Float[Tensor, "*B m d"]:
    *batch, d, _ = start.shape
    return start.new_empty(*batch, basis_size(d, K), d)


def start_block(d: int, like: Tensor) -> Float[Tensor, "d b"]:
    """Return a random orthonormal block, always the same; the global random state is not used."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.linalg.qr(torch.randn(d, BLOCK, generator=generator, dtype=torch.float64)).Q.to(like)


def _longest(W: Tensor) -> Tensor:
    """Return the norm of the longest row, computed without underflow of squared entries."""
    largest = W.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    return largest * torch.linalg.vector_norm(W / unit, dim=-1, keepdim=True).amax(-2, keepdim=True)


class _Orthonormaliser:
    """Orthonormalise blocks of rows, against each other and against a basis."""

    def __init__(self, like: Tensor) -> None:
        self.generator = torch.Generator().manual_seed(SEED + 1)
        # The operator's scale: entries far below it are rounding, not directions.
        self.scale = like.new_zeros(*like.shape[:-2], 1, 1)

    def update_scale(self, W: Tensor) -> Tensor:
        """Return W, a product with the operator, after updating the operator's scale from it."""
        self.scale = torch.maximum(self.scale, _longest(W))
        return W

    def __call__(self, W: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, L and c with W = L Q + c basis, the rows of Q orthonormal and orthogonal to the basis.

        In exact arithmetic c = 0, as the caller has subtracted the components of W in the basis. What rounding left of them
        is subtracted from the normalised rows here, repeatedly as long as that shortens a row much: usually once.
        """
        scale = torch.where(self.scale > 0, self.scale, 1)
        Q, L, _ = _orthonormal_rows(W / scale, self.generator)
        L, c, shortest = L * scale, torch.zeros_like(Q @ basis.mT), 0.0
        while shortest < 0.1:
            overlap = Q @ basis.mT
            Q, factor, shortest = _orthonormal_rows(Q - overlap @ basis, self.generator)
            L, c = L @ factor, c + L @ overlap
        return Q, L, c


def _orthonormal_rows(W: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Return Q and L with W = L Q, to the rounding of rows of length 1, and the length of the shortest row.

    Use Cholesky, a few products on any device, if the rows are well separated. If they are not (a rank-deficient or zero
    operator, an exhausted space), use the SVD and replace directions that are only rounding by random ones.
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
