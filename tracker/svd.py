"""Top-K singular triplets with a certificate.

J = U S V^T, singular values falling. A triplet is *accurate* when its residuals are small,

    residual = max_k max(|J v_k - s_k u_k|, |J^T u_k - s_k v_k|) / s_1,

and a set of K triplets is *complete* when no larger singular value was missed. With R = J - U_K S_K V_K^T and
sigma = s_K (1 + 1e-4), the matrix sigma^2 I - R^T R is positive definite, and its Cholesky factorisation succeeds,
if and only if |R|_2 < sigma. Products alone (no dense J) can't prove that: there, completeness is only probable.

Two ways to the triplets: LAPACK's full decomposition, some 25 d^3 operations at half the speed of a product; and block
Golub-Kahan (`krylov`), 4 d^2 m + 4 d m^2 for m columns. What misses its tolerance or is not complete is decomposed in
full instead. The certificate costs one product of the size of J.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.krylov import Product, basis_size, block_golub_kahan, expected_columns, has_room, start_block
from tracker.precision import float32_products

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}  # of the residual: what the Krylov iteration must reach
COMPLETENESS_MARGIN = 1e-4
SMALL = 512  # widths up to which a matrix is decomposed on one CPU core
GROUP = 1 << 24  # scalars of the matrices taken together: 64 MB in float32
PANEL = 512  # columns of the symmetric product of which only the lower half is computed

Method = Literal["auto", "full", "krylov"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Triplets:
    """The top K singular triplets of B matrices, and how far they can be trusted."""

    U: Float[Tensor, "B d K"]
    S: Float[Tensor, "B K"]
    V: Float[Tensor, "B d K"]
    gap: Float[Tensor, "B K"]  # (s_k - s_{k+1}) / s_1, s_{d+1} = 0; NaN for a zero matrix
    residual: Float[Tensor, " B"]  # relative to s_1; NaN for a zero matrix
    complete: Bool[Tensor, " B"]  # no larger singular value was missed
    full: Bool[Tensor, " B"]  # found by full decomposition


def top_singular_triplets(J: Float[Tensor, "B d d"], K: int, method: Method = "auto") -> Triplets:
    """The K largest singular triplets of each matrix.

    Args:
        method: "full" decomposition, or "krylov", in full only where that lacks its certificate or the space for K
            triplets; "auto": whichever is expected to cost less.

    Raises:
        ValueError: if an entry of J is not finite (LAPACK would return garbage without a word).
    """
    if not torch.isfinite(torch.stack(J.aminmax())).all():  # NaN where one entry is
        raise ValueError("the Jacobian has entries that are not finite (overflow or NaN); nothing can be decomposed")
    d = J.shape[-1]
    krylov = method == "krylov" or (method == "auto" and krylov_is_cheaper(d, K, J.dtype))
    way = _krylov if krylov and has_room(d, K) else _full
    with float32_products("ieee"):
        groups = [way(some, K) for some in J.split(max(1, GROUP // d**2))]
    return Triplets(*(torch.cat([getattr(group, field.name) for group in groups]) for field in fields(Triplets)))


def triplets_of_each(Js: Sequence[Float[Tensor, "B d d"]], K: int, method: Method = "auto") -> list[Triplets]:
    """The same for several batches; on the CPU at once, each on cores of its own: their many small products share badly."""
    find = partial(top_singular_triplets, K=K, method=method)
    return [find(J) for J in Js] if Js[0].device.type != "cpu" else _at_once(find, Js)


def triplets_by_products(apply: Product, apply_transpose: Product, like: Float[Tensor, "B d"], K: int) -> Triplets:
    """The K largest singular triplets of B operators known by their products alone.

    Nothing proves that none was missed: `complete` says that the iteration has converged, which from a random start
    makes it probable. Where it is False there is no result, and the dense matrix has to be asked.

    Args:
        apply: V -> J V, for blocks (B, d, b).
        apply_transpose: U -> J^T U.
        like: any tensor of the vectors' dtype and device.

    Raises:
        ValueError: if K leaves the iteration no room, or a product is not finite.
    """
    if not has_room(like.shape[-1], K):
        raise ValueError(
            f"K={K} triplets are too many to find by products where d = {like.shape[-1]}; decompose in full"
        )
    with float32_products("ieee"):
        return _by_products(apply, apply_transpose, like, K, dear=True)


def krylov_is_cheaper(d: int, K: int, dtype: torch.dtype) -> bool:
    """Whether K triplets of a (d, d) matrix are expected sooner by products than by full decomposition.

    Operations, those of LAPACK and of single steps by the time they take beside a product on a CPU core: measured, the
    two ways take equally long at about d = 450 for K = 10 and d = 700 for K = 50, in float32 and little above in float64.
    """
    n, m = expected_columns(d, K, dtype), basis_size(d, K)
    return n * (4 * d**2 + 8 * d * m + 200 * m**2 + 2.5e6) < 25 * d**3


def residual(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, " B"]:
    """The larger of both residuals over all triplets, relative to s_1."""
    return _residual(J @ V, (U.mT @ J).mT, U, S, V)


def is_complete(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Bool[Tensor, " B"]:
    """Whether no singular value above s_K (1 + 1e-4) is missing from the triplets: exact, by Cholesky.

    For a matrix whose s_K is zero to rounding, nothing larger is missing when the remainder is zero to rounding.
    """
    d = J.shape[-1]
    rounding = torch.finfo(J.dtype).eps * d * S[..., 0]
    sigma = torch.maximum(S[..., -1] * (1 + COMPLETENESS_MARGIN), rounding)
    # Scaled by sigma so that the squares of tiny Jacobians do not underflow; a zero matrix misses nothing.
    scale = torch.where(sigma > 0, sigma, 1)[..., None, None]
    R = torch.baddbmm(J / scale, U * (S[..., None, :] / scale), V.mT, alpha=-1)
    G = torch.zeros_like(R)
    for start in range(0, d, PANEL):  # the lower half is all that Cholesky reads
        stop = min(start + PANEL, d)
        G[..., start:stop, :stop] = R[..., start:stop].mT @ R[..., :stop]
    G.neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.linalg.cholesky_ex(G).info == 0


def _krylov(J: Tensor, K: int) -> Triplets:
    """By products with J; what lacks a certificate in full."""
    found = _by_products(lambda V: (V.mT @ J.mT).mT, lambda U: (U.mT @ J).mT, J[..., 0], K)
    complete = is_complete(J, found.U, found.S, found.V)
    missed = ~(complete & found.complete)
    parts = {field.name: getattr(found, field.name) for field in fields(Triplets)} | {"complete": complete}
    if bool(missed.any()):
        full = _full(J[missed], K)
        for name, part in parts.items():
            part[missed] = getattr(full, name)
    return Triplets(**parts)


def _full(J: Tensor, K: int) -> Triplets:
    U, S, Vh = _decompose(J)
    gap = _gap(S, K)
    U, S, V = U[..., :K], S[..., :K], Vh[..., :K, :].mT
    complete = is_complete(J, U, S, V)
    return Triplets(U, S, V, gap, residual(J, U, S, V), complete, torch.ones_like(complete))


def _decompose(J: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SVD. Small matrices go to the CPU, one to each core: cuSOLVER, and LAPACK's own threads, take them one by one.

    The eigenvectors of J^T J are no way out: half the digits are lost in float32, and in float64 they cost an SVD.
    """
    if J.shape[-1] > SMALL or len(J) == 1:
        return torch.linalg.svd(J, full_matrices=False)
    parts = _at_once(torch.linalg.svd, J.cpu().chunk(torch.get_num_threads()))
    U, S, Vh = (torch.cat(part).to(J.device) for part in zip(*parts, strict=True))
    return U, S, Vh


def _at_once(function: Callable[[Tensor], Result], parts: Sequence[Tensor]) -> list[Result]:
    """The function of every part, the CPU's cores shared out among them."""
    cores = torch.get_num_threads()
    if len(parts) == 1 or cores == 1:
        return [function(part) for part in parts]
    at_once = min(len(parts), cores)
    try:
        with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(cores // at_once,)) as pool:
            return list(pool.map(function, parts))
    finally:
        torch.set_num_threads(cores)


def _by_products(apply: Product, apply_transpose: Product, like: Tensor, K: int, dear: bool = False) -> Triplets:
    """As `triplets_by_products`. The iteration aims at half the tolerance: what it estimates is not yet measured."""
    B, d = like.shape
    tolerance = TOLERANCE[like.dtype]
    start = start_block(d, like).expand(B, -1, -1)
    U, S, V = block_golub_kahan(apply, apply_transpose, start, K, tolerance / 2, dear)
    gap, S = _gap(S, K), S[..., :K]
    error = _residual(apply(V), apply_transpose(U), U, S, V)
    converged = ~(error > tolerance)  # NaN: a zero matrix
    return Triplets(U, S, V, gap, error, converged, torch.zeros_like(converged))


def _gap(S: Tensor, K: int) -> Tensor:
    """(s_k - s_{k+1}) / s_1 for k = 1..K, from singular values of which there may be more; s_{d+1} = 0."""
    following = torch.nn.functional.pad(S[..., 1:], (0, 1))
    return ((S - following) / S[..., :1])[..., :K]


def _residual(JV: Tensor, JTU: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    s_1 = S[..., None, :1]  # divided by before the squares of a tiny Jacobian's entries underflow
    right = torch.linalg.vector_norm((JV - U * S[..., None, :]) / s_1, dim=-2)
    left = torch.linalg.vector_norm((JTU - V * S[..., None, :]) / s_1, dim=-2)
    return torch.maximum(left, right).amax(-1)
