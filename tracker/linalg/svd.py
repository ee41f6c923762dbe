"""Top-K singular triplets with a certificate.

The certificate shows accuracy and completeness from the matrix itself. With R = J - U_K S_K V_K^T and sigma = s_K (1 +
1e-4), the matrix sigma^2 I - R R^T is positive definite, and its Cholesky factorisation succeeds, if and only if |R|_2 <
sigma: no larger singular value is missing.

J = U S V^T, singular values falling. A triplet is *accurate* when its residuals are small,

    residual = max_k max(|J v_k - s_k u_k|, |J^T u_k - s_k v_k|) / s_1,

and a set of K triplets is *complete* when no larger singular value was missed: the certificate.

Three methods: LAPACK's full decomposition, some 25 d^3 operations at half the speed of a product; LAPACK's eigenvectors of
J J^T, of which it computes the first K alone; and iteration by products with blocks of vectors (`krylov`). For flat singular
values, as at initialisation, J J^T is formed first, in d^3 operations: a step of the iteration then costs half, and J J^T gives
the certificate too. For falling singular values, and for matrices without a certificate, the iteration uses J and J^T; matrices
still without one are decomposed in full.

On an accelerator many matrices are decomposed as one batch (`costs`), because for a single one the launches take longer than
the operations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.common.values import Method
from tracker.linalg.cores import batch_on_cores, map_on_cores
from tracker.linalg.costs import (
    eigenvectors_are_cheaper,
    krylov_is_cheaper,
    matrices_at_once,
)
from tracker.linalg.krylov import Product, basis_fits, block_golub_kahan, block_lanczos, start_block
from tracker.linalg.linear import inner_products, row_products, stacked, uses_onednn
from tracker.linalg.precision import float32_products, is_finite, power_of_two
from tracker.linalg.transfer import moved

COMPLETENESS_MARGIN = 1e-4
PANEL = 256  # rows at once of the Cholesky factor, and on a CPU of symmetric products
PANELS = 4  # of symmetric products on an accelerator: 5/8 of the operations, and few launches


def residual(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, " B"]:
    """Return the largest residual over all triplets, left and right, relative to s_1."""
    return relative_residual(J @ V, (U.mT @ J).mT, U, S, V)


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
    for start, stop, panel in lower_panels(R):
        G[..., start:stop, :stop] = panel
    return below_one(G)


def below_one(G: Tensor) -> Bool[Tensor, " B"]:
    """Whether the eigenvalues of a symmetric matrix are below 1; reads only its lower half, and overwrites it.

    By Cholesky of 1 - G in panels: LAPACK's on the whole matrix is slower and allocates two more matrices.
    """
    d = G.shape[-1]
    G.neg_()
    torch.linalg.diagonal(G).add_(1)
    definite = torch.ones(len(G), dtype=torch.bool, device=G.device)
    for start in range(0, d, PANEL):
        stop = min(start + PANEL, d)
        L, info = torch.linalg.cholesky_ex(G[..., start:stop, start:stop])
        definite &= info == 0
        below = torch.linalg.solve_triangular(
            L, G[..., stop:, start:stop].mT, upper=False
        ).mT.contiguous()
        for first, last, panel in lower_panels(below):
            G[..., stop + first : stop + last, stop : stop + last].sub_(panel)
    return definite


def lower_panels(R: Float[Tensor, "B m d"]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the lower half of R R^T in panels: the first row, the row after the last, and the panel."""
    m = R.shape[-2]
    height = PANEL if R.device.type == "cpu" else max(PANEL, ceil(m / PANELS))
    for start in range(0, m, height):
        stop = min(start + height, m)
        yield start, stop, inner_products(R[..., start:stop, :], R[..., :stop, :])


def relative_residual(
    JV: Tensor, JTU: Tensor, U: Tensor, S: Tensor, V: Tensor
) -> Float[Tensor, " B"]:
    """Return `residual` from the products J V and J^T U."""
    s_1 = S[..., None, :1]  # division first: squares of a tiny Jacobian's entries would underflow
    right = torch.linalg.vector_norm((JV - U * S[..., None, :]) / s_1, dim=-2)
    left = torch.linalg.vector_norm((JTU - V * S[..., None, :]) / s_1, dim=-2)
    return torch.maximum(left, right).amax(-1)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}  # largest residual of the Krylov iteration
OF_FULL = 0.2  # times the tolerance: the residuals that full decompositions have
SMALL = 512  # width up to which a matrix is decomposed on one CPU core
# s_K / s_1 above which rounding of J J^T, eps (s_1 / s_K)^2, is far below the margin of completeness
SQUARABLE = 0.1
POWERS = 4  # steps of power iteration that give s_1 within a tenth, also for flat singular values

Advance = Callable[[int], None]  # receives how many matrices have been decomposed


@dataclass(frozen=True)
class Triplets:
    """The top K singular triplets of B matrices, with their accuracy and completeness.

    The largest entry of each v_k is positive.
    """

    U: Float[Tensor, "B d K"]
    S: Float[Tensor, "B K"]
    V: Float[Tensor, "B d K"]
    gap: Float[Tensor, "B K"]  # (s_k - s_{k+1}) / s_1, s_{d+1} = 0; NaN for a zero matrix
    residual: Float[Tensor, " B"]  # relative to s_1; NaN for a zero matrix
    complete: Bool[Tensor, " B"]  # no larger singular value was missed
    full: Bool[Tensor, " B"]  # found by full decomposition

    @property
    def determined(self) -> Bool[Tensor, "B K"]:
        """Whether each singular value is above 0; the vectors of one that is 0 are arbitrary."""
        return above_rounding(self.S, self.U.shape[-2])


Fields = TypeVar("Fields")  # a dataclass of tensors


def each(function: Callable[..., Tensor], *parts: Fields) -> Fields:
    """Return a dataclass of what a function returns of the tensors that dataclasses have in each field."""
    by_field = zip(*(vars(part).values() for part in parts), strict=True)
    return type(parts[0])(*(function(*tensors) for tensors in by_field))


def joined(parts: Sequence[Fields]) -> Fields:
    """Return dataclasses of tensors as one, with the matrices of each after those of the one before."""
    return each(lambda *tensors: torch.cat(tensors), *parts)


def above_rounding(S: Float[Tensor, "*B K"], d: int) -> Bool[Tensor, "*B K"]:
    """Return whether singular values of (d, d) matrices, largest first, differ from 0 by more than rounding."""
    return S > d * torch.finfo(S.dtype).eps * S[..., :1]


def triplets_of_each(
    Js: Sequence[Float[Tensor, "_ d d"]],
    K: int,
    method: Method,
    memory: int,
    advance: Advance = lambda _: None,
) -> list[Triplets]:
    """Return the K largest singular triplets of each matrix, for each of several batches of matrices of one size.

    On the CPU in parallel on separate cores, as small products do not share cores well; on an accelerator all batches as one,
    as far as `memory` allows.

    Args:
        method: "full" decomposition; "krylov", iteration, with full decomposition only of matrices without a certificate
            or too small for K triplets; "auto", the one that is expected to cost less.
        memory: bytes that a batch and its temporary arrays may take on an accelerator.
        advance: called with numbers of matrices as they are decomposed.

    Raises:
        ValueError: if an entry is not finite (LAPACK would return wrong numbers without an error).
    """
    device = Js[0].device
    at_once = matrices_at_once(Js[0].shape[-1], K, Js[0].dtype, device, memory)
    if device.type == "cpu":
        return map_on_cores(
            lambda J: _in_turn(J.split(at_once), K, method), Js, lambda J: advance(len(J))
        )
    matrices = [matrix for J in Js for matrix in J]
    stacks = (
        stacked(matrices[start : start + at_once]) for start in range(0, len(matrices), at_once)
    )
    together = _in_turn(Js[0].split(at_once) if len(Js) == 1 else stacks, K, method, advance)
    sizes = [len(J) for J in Js]
    by_batch = zip(*(t.split(sizes) for t in vars(together).values()), strict=True)
    return [Triplets(*parts) for parts in by_batch]


def _in_turn(
    batches: Iterable[Float[Tensor, "_ d d"]],
    K: int,
    method: Method,
    advance: Advance = lambda _: None,
) -> Triplets:
    """Decompose one batch after another."""
    parts = []
    for J in batches:
        if not is_finite(J):
            raise ValueError(
                "the Jacobian has entries that are not finite (overflow or NaN); nothing can be decomposed"
            )
        d = J.shape[-1]
        iterated = method == "krylov" or (
            method == "auto" and krylov_is_cheaper(d, K, J.dtype, J.device)
        )
        iterated &= basis_fits(d, K)
        direct = method == "auto" and eigenvectors_are_cheaper(d, K, J.dtype, J.device)
        with float32_products("ieee"):
            parts.append(certified(J, K, direct, iterated) if direct or iterated else in_full(J, K))
        advance(len(J))
    return _with_signs(parts[0] if len(parts) == 1 else joined(parts))


def _with_signs(t: Triplets) -> Triplets:
    """Return triplets with the sign of each (u_k, v_k) chosen, which iterations leave to rounding.

    The vectors are copied: views of those of a full decomposition would keep all d in memory.
    """
    least, largest = torch.aminmax(t.V, dim=-2, keepdim=True)
    sign = torch.where(least + largest < 0, -1.0, 1.0).to(t.V.dtype)
    return replace(t, U=t.U * sign, V=t.V * sign)


def certified(J: Tensor, K: int, direct: bool, iterated: bool) -> Triplets:
    """Find triplets by one method after another, until each matrix has a certificate.

    A batch iterates until all its matrices have converged. Squares take only those that they suit, as they lose what is small.

    Args:
        direct: whether J J^T is decomposed, not iterated with.
        iterated: whether to iterate with J and J^T before matrices are decomposed in full.
    """
    largest = torch.maximum(J.amax((-2, -1), keepdim=True), -J.amin((-2, -1), keepdim=True))
    unit = power_of_two(largest)
    J = J / unit
    every = torch.ones(len(J), dtype=torch.bool)
    if direct:
        # Of a zero matrix, the vectors that are refined would be NaN.
        squares = by_eigenvectors, (largest > 0).flatten().cpu()
    else:
        squares = by_squares, _can_square(J, K).cpu()
    methods = [squares, *([(by_golub_kahan, every)] if iterated else []), (in_full, every)]
    missing, triplets = every.clone(), None
    for method, suited in methods:
        chosen = missing & suited
        if not chosen.any():
            continue
        if chosen.all():
            triplets = better = method(J, K)
        else:
            at = chosen.nonzero()[:, 0].to(J.device)
            better = method(J[at], K)
            if triplets is None:
                triplets = each(lambda t: t.new_empty(len(J), *t.shape[1:]), better)
            for whole, part in zip(vars(triplets).values(), vars(better).values(), strict=True):
                whole[at] = part
        missing[chosen] = ~better.complete.cpu()
    assert triplets is not None
    return replace(triplets, S=triplets.S * unit[..., 0])


def by_eigenvectors(J: Tensor, K: int) -> Triplets:
    """Find triplets from eigenvectors of J J^T. `complete`: the residual is that of a full decomposition, and none is missing."""
    A = _squared(J)
    U, S = _top_eigenvectors(A, K)
    U, S, V, JV, gap, error = _with_right_vectors(J, _refined(A, U, S[..., :K]), S)
    complete = error <= OF_FULL * TOLERANCE[J.dtype]
    if (S[..., -1] > SQUARABLE * S[..., 0]).all():
        complete &= _is_complete_by_square(A, JV, U, S, V)
    else:
        complete &= is_complete(J, U, S, V)
    return Triplets(U, S, V, gap, error, complete, torch.zeros_like(complete))


def _with_right_vectors(J: Tensor, U: Tensor, S: Tensor) -> tuple[Tensor, ...]:
    """Return U, S, V, J V, gap and residual from left singular vectors U, and singular values that continue after them."""
    K = U.shape[-1]
    V, exact, P = _orthogonal_columns(J.mT @ U)
    U = U @ P
    JV = J @ V
    gap = _gap(torch.cat([exact, S[..., K:]], -1), K)
    return U, exact, V, JV, gap, relative_residual(JV, J.mT @ U, U, exact, V)


def _refined(A: Tensor, U: Tensor, S: Tensor) -> Tensor:
    """Return eigenvectors with less of the others in them: a step of power iteration on what is outside their span.

    LAPACK's leave residuals of some 40 units of rounding in float32, and this step some 5.
    """
    AU = A @ U
    outside = AU - U @ (U.mT @ AU)
    squares = torch.maximum(
        S, SQUARABLE * S[..., :1]
    ).square()  # in place of small ones, by which rounding would be divided
    W = U + outside / squares[..., None, :]
    # Its columns are orthonormal except for LAPACK's residuals, so that one Cholesky factor suffices. cuSOLVER's QR takes one
    # matrix after another: 50 ms for 768 matrices of 192 rows.
    L, _ = torch.linalg.cholesky_ex(W.mT @ W)
    return torch.linalg.solve_triangular(L, W.mT, upper=False).mT


def _squared(J: Tensor) -> Tensor:
    """Return J J^T."""
    A = torch.empty_like(J)
    for start, stop, panel in lower_panels(J):
        A[..., start:stop, :stop], A[..., :stop, start:stop] = panel, panel.mT
    return A


def by_squares(J: Tensor, K: int) -> Triplets:
    """Find triplets by iteration with J J^T. `complete`: s_K / s_1 and residual are in bounds, and the certificate holds."""
    B, d, _ = J.shape
    A, tolerance = _squared(J), TOLERANCE[J.dtype]
    U, S = block_lanczos(products_of(A)[0], start_block(d, J).expand(B, -1, -1), K, tolerance / 2)
    U, S, V, JV, gap, error = _with_right_vectors(J, U, S)
    enough = (S[..., -1] > SQUARABLE * S[..., 0]) & (error <= tolerance)
    complete = enough & _is_complete_by_square(A, JV, U, torch.where(enough[..., None], S, 1), V)
    return Triplets(U, S, V, gap, error, complete, torch.zeros_like(complete))


def _is_complete_by_square(
    A: Tensor, JV: Tensor, U: Tensor, S: Tensor, V: Tensor
) -> Bool[Tensor, " B"]:
    """Return `is_complete` where s_K is above SQUARABLE s_1, from A = J J^T, which is overwritten."""
    sigma = (1 + COMPLETENESS_MARGIN) * S[..., -1, None, None]
    # (J - U S V^T) (J - U S V^T)^T / sigma^2, in place of A
    US, JV = U * (S[..., None, :] / sigma), JV / sigma
    A.div_(sigma**2).baddbmm_(
        torch.cat([JV, US], -1), torch.cat([US, JV - US @ (V.mT @ V)], -1).mT, alpha=-1
    )
    return below_one(A)


def _top_eigenvectors(A: Tensor, K: int) -> tuple[Float[Tensor, "B d K"], Float[Tensor, "B r"]]:
    """Return the K first eigenvectors of A = J J^T, and the K + 1 first singular values of J, if there are as many."""
    # cuSOLVER's would take one matrix after another.
    squares, U = batch_on_cores(torch.linalg.eigh, A.cpu())
    first = squares[..., -K - 1 :].flip(-1), U[..., -K:].flip(-1)
    squares, U = moved(first, A.device)
    return U, squares.clamp_min(0).sqrt()


def _orthogonal_columns(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return V, S and P with W P = V S, the columns of V orthonormal, those of P too."""
    if W.device.type == "cpu":
        V, S, Ph = torch.linalg.svd(W.double(), full_matrices=False)
        return V.to(W), S.to(W), Ph.mT.to(W)
    # cuSOLVER would decompose one matrix at a time. In float64, squares are accurate where S falls no further than SQUARABLE.
    wide = W.double()
    (G,) = moved([wide.mT @ wide], "cpu")
    squares, P = batch_on_cores(torch.linalg.eigh, G)
    S, P = moved([squares.flip(-1).clamp_min(0).sqrt(), P.flip(-1)], W.device)
    return (wide @ (P / S[..., None, :])).to(W), S.to(W), P.to(W)


def _can_square(J: Tensor, K: int) -> Bool[Tensor, " B"]:
    """Whether s_K > SQUARABLE s_1 for certain, as sum_k s_k^2 > (K + (d - K) SQUARABLE^2) s_1^2; s_1 by power iteration."""
    d = J.shape[-1]
    apply, apply_transpose = products_of(J)
    x = start_block(d, J)[:, :1].expand(len(J), -1, -1)
    for _ in range(POWERS):
        x = torch.nn.functional.normalize(apply_transpose(apply(x)), dim=-2)
    s_1 = torch.linalg.vector_norm(apply(x), dim=(-2, -1))
    return torch.linalg.matrix_norm(J) ** 2 > (K + (d - K) * SQUARABLE**2) * s_1**2


def by_golub_kahan(J: Tensor, K: int) -> Triplets:
    """Find triplets by iteration with J and J^T. `complete`: the residual is within bounds, and the certificate holds.

    The iteration's own tolerance is half: it estimates the residual, which is computed here.
    """
    B, d, _ = J.shape
    (apply, apply_transpose), tolerance = products_of(J), TOLERANCE[J.dtype]
    U, S, V = block_golub_kahan(
        apply, apply_transpose, start_block(d, J).expand(B, -1, -1), K, tolerance / 2
    )
    gap, S = _gap(S, K), S[..., :K]
    error = relative_residual(apply(V), apply_transpose(U), U, S, V)
    # The residual of a zero matrix is NaN
    complete = ~(error > tolerance) & is_complete(J, U, S, V)
    return Triplets(U, S, V, gap, error, complete, torch.zeros_like(complete))


def products_of(J: Float[Tensor, "B d d"]) -> tuple[Product, Product]:
    """Return V -> J V and U -> J^T U."""
    if not uses_onednn(J):
        return lambda V: (V.mT @ J.mT).mT, lambda U: (U.mT @ J).mT
    forward, back = zip(*map(row_products, J), strict=True)

    def each(products: Sequence[Product], X: Float[Tensor, "B d b"]) -> Float[Tensor, "B d b"]:
        return stacked([product(x) for product, x in zip(products, X.mT, strict=True)]).mT

    return partial(each, forward), partial(each, back)


def in_full(J: Tensor, K: int) -> Triplets:
    """Decompose in full: complete by construction."""
    U, S, Vh = _decompose(J, K)
    gap = _gap(S, K)
    U, S, V = U[..., :K], S[..., :K], Vh[..., :K, :].mT
    complete = is_complete(J, U, S, V)
    return Triplets(U, S, V, gap, residual(J, U, S, V), complete, torch.ones_like(complete))


def _decompose(J: Tensor, K: int) -> Sequence[Tensor]:
    """Compute the SVD, at least K columns of U and rows of V^T; small matrices on the CPU, one per core.

    cuSOLVER and LAPACK's own threads take them one by one. An eigendecomposition of J J^T is no alternative: in float32 it
    loses the small ones of all d values, and in float64 it costs as much as an SVD.
    """
    if J.shape[-1] > SMALL or (J.device.type == "cpu" and len(J) == 1):
        # cuSOLVER's default method, Jacobi's, was off by 1e-4 s_1 at d = 600 in float32.
        driver = "gesvd" if J.device.type == "cuda" else None
        return torch.linalg.svd(J, full_matrices=False, driver=driver)
    U, S, Vh = batch_on_cores(torch.linalg.svd, J.cpu())
    return moved((U[..., :K], S, Vh[..., :K, :]), J.device)


def _gap(S: Tensor, K: int) -> Tensor:
    """Return (s_k - s_{k+1}) / s_1 for k = 1..K from at least K singular values; s_{d+1} = 0."""
    following = torch.nn.functional.pad(S[..., 1:], (0, 1))
    return ((S - following) / S[..., :1])[..., :K]
