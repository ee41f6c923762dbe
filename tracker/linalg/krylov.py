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
decompositions. On an accelerator all of a step's operations are queued without waiting for their results; the host waits once
for each full basis, when it copies the small problem.
"""

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.cores import batch_on_cores
from tracker.linalg.orthonormal import Orthonormaliser, minus_product
from tracker.linalg.transfer import SEED, drawn, moved

Product = Callable[[Tensor], Tensor]  # (B, d, b) -> (B, d, b)
# (B, m, d), vectors as rows: products of a few long rows are a third faster than those of columns
Bases = tuple[Tensor, ...]

BLOCK = 16  # on CPUs the faster products of wider blocks do not make up for the additional columns


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
    start: Float[Tensor, "B d b"],
    K: int,
    tolerance: float,
) -> tuple[Float[Tensor, "B d K"], Float[Tensor, "B r"], Float[Tensor, "B d K"]]:
    """Return the top K triplets U, S, V of a batch of matrices J; S continues with lower, less accurate singular values.

    Stop when every residual, as estimated by the small problem, is below `tolerance` s_1, or after four times the expected
    columns: the caller checks what was reached.

    Args:
        apply: V -> J V.
        apply_transpose: U -> J^T U.
        start: an orthonormal block.
        K: number of triplets.
        tolerance: of the residuals, relative to s_1.
    """
    U, V = (_empty_basis(start, K) for _ in "UV")
    orthonormalise = Orthonormaliser(start)

    def step(Z: Tensor, H: Tensor, before: slice, new: slice, B: Tensor) -> tuple[Tensor, Tensor]:
        V[..., new, :] = Z
        W = orthonormalise.update_scale(apply(Z.mT).mT)
        U[..., new, :], R, rest = orthonormalise(
            minus_product(W, H.mT, U[..., before, :]), U[..., : new.start, :]
        )
        B[..., before, new] = H
        B[..., : new.start, new] += rest.mT
        B[..., new, new] = R.mT
        W = orthonormalise.update_scale(apply_transpose(U[..., new, :].mT).mT)
        Z, C, _ = orthonormalise(minus_product(W, R.mT, V[..., new, :]), V[..., : new.stop, :])
        return Z, C

    def ritz(B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
        P, S, Qh = torch.linalg.svd(B)
        return S, C.mT @ P[..., -C.shape[-1] :, :], P, Qh.mT

    def reached(S: Tensor, residual: Tensor) -> Tensor:
        return residual <= tolerance * S[..., :1]

    S, (U_K, V_K) = restarted(step, ritz, reached, orthonormalise, (U, V), start, K)
    return U_K, S, V_K


def block_lanczos(
    apply: Product, start: Float[Tensor, "B d b"], K: int, tolerance: float
) -> tuple[Float[Tensor, "B d K"], Float[Tensor, "B m"]]:
    """Return the top K left singular vectors U of a batch of J, and S, with lower, less accurate values after the K-th.

    Stop as `block_golub_kahan` does.

    Args:
        apply: U -> J J^T U.
        start: an orthonormal block.
    """
    U = _empty_basis(start, K)
    orthonormalise = Orthonormaliser(start)

    def step(Z: Tensor, H: Tensor, before: slice, new: slice, T: Tensor) -> tuple[Tensor, Tensor]:
        U[..., new, :] = Z
        W = minus_product(orthonormalise.update_scale(apply(Z.mT).mT), H.mT, U[..., before, :])
        D = W @ Z.mT
        T[..., new, before], T[..., new, new] = H.mT, D  # `eigh` reads the lower half
        Z, C, _ = orthonormalise(minus_product(W, D, Z), U[..., : new.stop, :])
        return Z, C

    def ritz(T: Tensor, C: Tensor) -> tuple[Tensor, ...]:
        squares, Q = (part.flip(-1) for part in torch.linalg.eigh(T))
        return squares, C.mT @ Q[..., -C.shape[-1] :, :], Q

    def reached(squares: Tensor, residual: Tensor) -> Tensor:
        S = squares[..., : residual.shape[-1]].clamp_min(0).sqrt()
        return residual <= tolerance * S[..., :1] * S

    squares, (U_K,) = restarted(step, ritz, reached, orthonormalise, (U,), start, K)
    return U_K, squares.clamp_min(0).sqrt()


def restarted(
    step: Callable[..., tuple[Tensor, Tensor]],
    ritz: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    reached: Callable[[Tensor, Tensor], Tensor],
    orthonormalise: Orthonormaliser,
    bases: Bases,
    start: Float[Tensor, "B d b"],
    K: int,
) -> tuple[Tensor, list[Float[Tensor, "B d K"]]]:
    """Grow the bases block by block, restart them when full; return the Ritz values and the top K Ritz vectors of each basis.

    Args:
        step: adds a block Z to the bases as the rows `new`, H being its coupling to the rows `before`; fills in the small
            matrix, and returns the next Z and H.
        ritz: from the small matrix and the last H, the Ritz values, the coupling of each Ritz vector to the next block, and
            the vectors for each basis. Computed in float64 on the CPU: GPUs are slow for small matrices.
        reached: whether values with these residuals have converged.
        orthonormalise: what `step` uses. Steps since the last restart are repeated if it reports afterwards that it failed.
        bases: empty bases.
        start: the first block.
        K: number of triplets.
    """
    *batch, m, _ = bases[0].shape
    b, device = start.shape[-1], start.device
    kept, budget = (m + K) // (2 * b) * b, 4 * expected_columns(start.shape[-2], K, start.dtype)
    solve = ritz if device.type == "cpu" else partial(batch_on_cores, ritz)
    values = start.new_zeros(*batch, m)
    Z, H, before = start.mT, start.new_zeros(*batch, 0, b), slice(0, 0)
    while True:
        restart, small = (Z, H, before, budget), torch.diag_embed(values)
        for size in range(before.stop, m, b):
            new = slice(size, size + b)
            Z, H = step(Z, H, before, new, small)
            before, budget = new, budget - b
        problem, coupling, *pivots = moved((small, H, *orthonormalise.pivots()), "cpu")
        if not orthonormalise.passed(pivots):
            orthonormalise.test_from_now(values[..., None, :1])
            Z, H, before, budget = restart
            continue
        values, tail, *vectors = (
            part.to(start.dtype) for part in solve(problem.double(), coupling.double())
        )
        converged = bool(reached(values, torch.linalg.vector_norm(tail[..., :K], dim=-2)).all())
        values, tail, *vectors = moved((values, tail, *(Q[..., :kept] for Q in vectors)), device)
        if converged or budget < 0:
            return values, [basis.mT @ Q[..., :K] for basis, Q in zip(bases, vectors, strict=True)]
        for basis, Q in zip(bases, vectors, strict=True):
            basis[..., :kept, :] = Q.mT @ basis
        before, H = slice(0, kept), tail[..., :kept].mT


def _empty_basis(start: Float[Tensor, "B d b"], K: int) -> Float[Tensor, "B m d"]:
    *batch, d, _ = start.shape
    return start.new_empty(*batch, basis_size(d, K), d)


def start_block(d: int, like: Tensor) -> Float[Tensor, "d b"]:
    """Return a random orthonormal block, always the same; the global random state is not used."""
    return torch.linalg.qr(drawn((d, BLOCK), SEED)).Q.to(like)
