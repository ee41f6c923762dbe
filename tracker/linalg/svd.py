"""Top-K singular triplets with a certificate.

J = U S V^T, singular values falling. A triplet is *accurate* when its residuals are small,

    residual = max_k max(|J v_k - s_k u_k|, |J^T u_k - s_k v_k|) / s_1,

and a set of K triplets is *complete* when no larger singular value was missed. With R = J - U_K S_K V_K^T and
sigma = s_K (1 + 1e-4), the matrix sigma^2 I - R R^T is positive definite, and its Cholesky factorisation succeeds,
if and only if |R|_2 < sigma: the *certificate*. Products alone (no dense J) give no certificate; completeness is then only
probable.

Two methods: LAPACK's full decomposition, some 25 d^3 operations at half the speed of a product; and iteration by products
with blocks of vectors (`krylov`). For flat singular values, as at initialisation, J J^T is formed first, in d^3 operations: a
step of the iteration then costs half, and J J^T gives the certificate too. For falling singular values, and for matrices
without a certificate, the iteration uses J and J^T; matrices still without one are decomposed in full.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.linalg.krylov import (
    Product,
    basis_fits,
    basis_size,
    block_golub_kahan,
    block_lanczos,
    expected_columns,
    start_block,
)
from tracker.linalg.linear import inner_products, row_products, stacked, uses_onednn
from tracker.linalg.precision import float32_products

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}  # largest residual of the Krylov iteration
COMPLETENESS_MARGIN = 1e-4
SMALL = 512  # width up to which a matrix is decomposed on one CPU core
GROUP = 1 << 24  # scalars of the matrices decomposed together: 64 MB in float32
SQUARABLE = 0.1  # s_K / s_1 above which rounding of J J^T, eps (s_1 / s_K)^2, is far below the margin of completeness
POWERS = 4  # steps of power iteration that give s_1 within a tenth, also for flat singular values
PANEL = 256  # rows at once of the Cholesky factor, and of symmetric products, of which only the lower half is computed

Method = Literal["auto", "full", "krylov"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Triplets:
    """The top K singular triplets of B matrices, with their accuracy and completeness."""

    U: Float[Tensor, "B d K"]
    S: Float[Tensor, "B K"]
    V: Float[Tensor, "B d K"]
    gap: Float[Tensor, "B K"]  # (s_k - s_{k+1}) / s_1, s_{d+1} = 0; NaN for a zero matrix
    residual: Float[Tensor, " B"]  # relative to s_1; NaN for a zero matrix
    complete: Bool[Tensor, " B"]  # no larger singular value was missed
    full: Bool[Tensor, " B"]  # found by full decomposition


def top_singular_triplets(J: Float[Tensor, "B d d"], K: int, method: Method = "auto") -> Triplets:
    """Return the K largest singular triplets of each matrix.

    Args:
        J: the matrices.
        K: number of triplets.
        method: "full" decomposition; "krylov", iteration, with full decomposition only of matrices without a certificate
            or too small for K triplets; "auto", the one that is expected to cost less.

    Raises:
        ValueError: if an entry of J is not finite (LAPACK would return wrong numbers without an error).
    """
    if not torch.isfinite(torch.stack(J.aminmax())).all():  # NaN where one entry is
        raise ValueError("the Jacobian has entries that are not finite (overflow or NaN); nothing can be decomposed")
    d = J.shape[-1]
    krylov = method == "krylov" or (method == "auto" and krylov_is_cheaper(d, K, J.dtype))
    decompose = _krylov if krylov and basis_fits(d, K) else _full
    with float32_products("ieee"):
        groups = [decompose(some, K) for some in J.split(max(1, GROUP // d**2))]
    return Triplets(*(torch.cat([getattr(group, field.name) for group in groups]) for field in fields(Triplets)))


def triplets_of_each(Js: Sequence[Float[Tensor, "B d d"]], K: int, method: Method = "auto") -> list[Triplets]:
    """Return the same for several batches, on the CPU in parallel on separate cores: small products do not share cores well."""
    find = partial(top_singular_triplets, K=K, method=method)
    return [find(J) for J in Js] if Js[0].device.type != "cpu" else _map_on_cores(find, Js)


def triplets_by_products(apply: Product, apply_transpose: Product, like: Float[Tensor, "B d"], K: int) -> Triplets:
    """Return the K largest singular triplets of B operators from their products alone.

    There is no certificate: `complete` states that the iteration has converged, which from a random start makes completeness
    probable. If it is False, the triplets are not usable, and the dense matrix has to be decomposed.

    Args:
        apply: V -> J V, for blocks (B, d, b).
        apply_transpose: U -> J^T U.
        like: any tensor of the vectors' shape (B, d), dtype and device.
        K: number of triplets.

    Raises:
        ValueError: if K is too large for the iteration, or a product is not finite.
    """
    if not basis_fits(like.shape[-1], K):
        raise ValueError(f"K={K} triplets are too many for products alone with d = {like.shape[-1]}; decompose in full")
    with float32_products("ieee"):
        return _by_products(apply, apply_transpose, like, K, check_every_block=True)


def krylov_is_cheaper(d: int, K: int, dtype: torch.dtype) -> bool:
    """Whether products are expected to find K triplets of a (d, d) matrix faster than full decomposition.

    It compares operation counts, LAPACK's and single steps' weighted by their time relative to a product on a CPU core.
    Measured for flat singular values, both methods take equally long at about d = 320 for K = 10 and d = 480 for K = 50.
    """
    n, m = expected_columns(d, K, dtype), basis_size(d, K)
    return n * (2 * d**2 + 4 * d * m + 100 * m**2 + 1.5e6) + 1.5 * d**3 < 25 * d**3


def residual(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, " B"]:
    """Return the largest residual over all triplets, left and right, relative to s_1."""
    return _residual(J @ V, (U.mT @ J).mT, U, S, V)


def is_complete(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Bool[Tensor, " B"]:
    """Whether no singular value above s_K (1 + 1e-4) is missing from the triplets: the certificate, by Cholesky.

    For a matrix whose s_K is zero to rounding, none is missing if the remainder is zero to rounding.
    """
    rounding = torch.finfo(J.dtype).eps * J.shape[-1] * S[..., 0]
    sigma = torch.maximum(S[..., -1] * (1 + COMPLETENESS_MARGIN), rounding)
    # Scaled by sigma so that the squares of tiny Jacobians do not underflow; for a zero matrix nothing is missing.
    R = torch.baddbmm(J, U * S[..., None, :], V.mT, alpha=-1)
    R.div_(torch.where(sigma > 0, sigma, 1)[..., None, None])
    G = torch.empty_like(R)
    for start, stop, panel in _lower_panels(R):
        G[..., start:stop, :stop] = panel
    return _below_one(G)


def _below_one(G: Tensor) -> Bool[Tensor, " B"]:
    """Whether the eigenvalues of a symmetric matrix are below 1; reads only its lower half, and overwrites it.

    By Cholesky of 1 - G in panels: LAPACK's on the whole matrix is slower and allocates two more matrices.
    """
    d = G.shape[-1]
    G.neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    definite = torch.ones(len(G), dtype=torch.bool, device=G.device)
    for start in range(0, d, PANEL):
        stop = min(start + PANEL, d)
        L, info = torch.linalg.cholesky_ex(G[..., start:stop, start:stop])
        definite &= info == 0
        below = torch.linalg.solve_triangular(L, G[..., stop:, start:stop].mT, upper=False).mT.contiguous()
        for first, last, panel in _lower_panels(below):
            G[..., stop + first : stop + last, stop : stop + last].sub_(panel)
    return definite


def _lower_panels(R: Float[Tensor, "B m d"]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the lower half of R R^T in panels: the first row, the row after the last, and the panel."""
    for start in range(0, R.shape[-2], PANEL):
        stop = min(start + PANEL, R.shape[-2])
        yield start, stop, inner_products(R[..., start:stop, :], R[..., :stop, :])


def _krylov(J: Tensor, K: int) -> Triplets:
    """Find triplets by iteration; use the next method for matrices without a certificate."""
    largest = torch.maximum(J.amax((-2, -1), keepdim=True), -J.amin((-2, -1), keepdim=True))
    # Squares of tiny entries underflow; division by a power of two rounds nothing.
    unit = torch.exp2(torch.frexp(largest).exponent.to(J.dtype) - 1)
    J = J / unit
    methods = [_by_golub_kahan, _full]
    if bool(_can_square(J, K).any()):
        methods.insert(0, _by_squares)
    found = methods[0](J, K)
    for method in methods[1:]:
        missed = ~found.complete
        if bool(missed.any()):
            better = method(J if bool(missed.all()) else J[missed], K)
            for field in fields(Triplets):
                getattr(found, field.name)[missed] = getattr(better, field.name)
    return replace(found, S=found.S * unit[..., 0])


def _by_squares(J: Tensor, K: int) -> Triplets:
    """Find triplets by iteration with J J^T. `complete`: s_K / s_1 and residual are in bounds, and the certificate holds."""
    B, d, _ = J.shape
    A = torch.empty_like(J)  # J J^T
    for start, stop, panel in _lower_panels(J):
        A[..., start:stop, :stop], A[..., :stop, start:stop] = panel, panel.mT
    tolerance = TOLERANCE[J.dtype]
    U, S = block_lanczos(_products(A)[0], start_block(d, J).expand(B, -1, -1), K, tolerance / 2)
    following = S[..., K:]
    V, S, Ph = torch.linalg.svd((J.mT @ U).double(), full_matrices=False)
    U, S, V = U @ Ph.mT.to(J), S.to(J), V.to(J)
    JV = J @ V
    error = _residual(JV, J.mT @ U, U, S, V)
    enough = (S[..., -1] > SQUARABLE * S[..., 0]) & (error <= tolerance)
    sigma = (1 + COMPLETENESS_MARGIN) * torch.where(enough, S[..., -1], 1)[..., None, None]
    # (J - U S V^T) (J - U S V^T)^T / sigma^2, in place of A
    US, JV = U * (S[..., None, :] / sigma), JV / sigma
    A.div_(sigma**2).baddbmm_(torch.cat([JV, US], -1), torch.cat([US, JV - US @ (V.mT @ V)], -1).mT, alpha=-1)
    complete = enough & _below_one(A)
    gap = _gap(torch.cat([S, following], -1), K)
    return Triplets(U, S, V, gap, error, complete, torch.zeros_like(complete))


def _can_square(J: Tensor, K: int) -> Bool[Tensor, " B"]:
    """Whether s_K > SQUARABLE s_1 for certain, as sum_k s_k^2 > (K + (d - K) SQUARABLE^2) s_1^2; s_1 by power iteration."""
    d = J.shape[-1]
    apply, apply_transpose = _products(J)
    x = start_block(d, J)[:, :1].expand(len(J), -1, -1)
    for _ in range(POWERS):
        x = torch.nn.functional.normalize(apply_transpose(apply(x)), dim=-2)
    s_1 = torch.linalg.vector_norm(apply(x), dim=(-2, -1))
    return torch.linalg.matrix_norm(J) ** 2 > (K + (d - K) * SQUARABLE**2) * s_1**2


def _by_golub_kahan(J: Tensor, K: int) -> Triplets:
    """Find triplets by iteration with J and J^T. `complete`: the residual is within bounds, and the certificate holds."""
    found = _by_products(*_products(J), J[..., 0], K)
    return replace(found, complete=found.complete & is_complete(J, found.U, found.S, found.V))


def _products(J: Float[Tensor, "B d d"]) -> tuple[Product, Product]:
    """Return V -> J V and U -> J^T U."""
    if not uses_onednn(J):
        return lambda V: (V.mT @ J.mT).mT, lambda U: (U.mT @ J).mT
    forward, back = zip(*map(row_products, J), strict=True)

    def each(products: Sequence[Product], X: Float[Tensor, "B d b"]) -> Float[Tensor, "B d b"]:
        return stacked([product(x) for product, x in zip(products, X.mT, strict=True)]).mT

    return partial(each, forward), partial(each, back)


def _full(J: Tensor, K: int) -> Triplets:
    U, S, Vh = _decompose(J)
    gap = _gap(S, K)
    U, S, V = U[..., :K], S[..., :K], Vh[..., :K, :].mT
    complete = is_complete(J, U, S, V)
    return Triplets(U, S, V, gap, residual(J, U, S, V), complete, torch.ones_like(complete))


def _decompose(J: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the SVD; small matrices on the CPU, one per core: cuSOLVER and LAPACK's own threads take them one by one.

    An eigendecomposition of J J^T is no alternative: in float32 it loses the small ones of all d values, and in float64 it
    costs as much as an SVD.
    """
    if J.shape[-1] > SMALL or len(J) == 1:
        return torch.linalg.svd(J, full_matrices=False)
    parts = _map_on_cores(torch.linalg.svd, J.cpu().chunk(torch.get_num_threads()))
    U, S, Vh = (torch.cat(part).to(J.device) for part in zip(*parts, strict=True))
    return U, S, Vh


def _map_on_cores(function: Callable[[Tensor], Result], parts: Sequence[Tensor]) -> list[Result]:
    """Map a function over parts in parallel, the CPU's cores divided among them."""
    cores = torch.get_num_threads()
    if len(parts) == 1 or cores == 1:
        return [function(part) for part in parts]
    at_once = min(len(parts), cores)
    try:
        with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(cores // at_once,)) as pool:
            return list(pool.map(function, parts))
    finally:
        torch.set_num_threads(cores)


def _by_products(
    apply: Product, apply_transpose: Product, like: Tensor, K: int, check_every_block: bool = False
) -> Triplets:
    """Implement `triplets_by_products`. The iteration's own tolerance is half: it estimates the residual, computed here."""
    B, d = like.shape
    tolerance = TOLERANCE[like.dtype]
    start = start_block(d, like).expand(B, -1, -1)
    U, S, V = block_golub_kahan(apply, apply_transpose, start, K, tolerance / 2, check_every_block)
    gap, S = _gap(S, K), S[..., :K]
    error = _residual(apply(V), apply_transpose(U), U, S, V)
    converged = ~(error > tolerance)  # NaN: a zero matrix
    return Triplets(U, S, V, gap, error, converged, torch.zeros_like(converged))


def _gap(S: Tensor, K: int) -> Tensor:
    """Return (s_k - s_{k+1}) / s_1 for k = 1..K from at least K singular values; s_{d+1} = 0."""
    following = torch.nn.functional.pad(S[..., 1:], (0, 1))
    return ((S - following) / S[..., :1])[..., :K]


def _residual(JV: Tensor, JTU: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    s_1 = S[..., None, :1]  # division first: squares of a tiny Jacobian's entries would underflow
    right = torch.linalg.vector_norm((JV - U * S[..., None, :]) / s_1, dim=-2)
    left = torch.linalg.vector_norm((JTU - V * S[..., None, :]) / s_1, dim=-2)
    return torch.maximum(left, right).amax(-1)
