"""Null levels: the mean of each mis-coupling over rotations that are drawn.

`coupling` defines unrelated blocks: one of them is turned, J' -> Q J' Q^T, with a random rotation Q (Haar measure). The value of
a pair is that of one Q, and a level is the mean of the definition itself over Q: the root of a mean square lies above the mean
of roots, and that of a ratio of mean squares may. Frames stand for rotations, step by step:

1.  A pair that is turned has A = (Q U')^T J (Q V'), with U', V' (d, K) of block l'. So Q acts on the span of [U', V'] alone.
2.  With G = U'^T V', the columns of V' - U' G are orthogonal to U', and their products are H^T H = I - G^T G. H is the
    symmetric root (K, K), which no choice of signs or order changes. So V' = U' G + W H, and [U', W] is orthonormal where
    2 K <= d.
3.  Q [U', W] is a Haar frame [F_1, F_2]: 2 K orthonormal columns whose law no rotation changes, and which does not depend on U'
    and V'.
4.  A = F_1^T J (F_1 G + F_2 H). All pairs share the frames, so that F_1^T J [F_1, F_2] (K, 2 K) is all that they need of J.
5.  Where 2 K > d, the frame is a whole rotation: A = U'^T (F^T J F) V'.
6.  Any columns of a Haar frame, in any order, are one, too. So each J is multiplied with `COLUMNS` columns F once, while it is at
    hand, and the frames of every K are drawn from F^T J F: which columns each of them takes, and in which order.

Control variates reduce what a mean over few frames leaves of chance. With

    t = |A|^2,   o = t - sum_k A_kk^2,   r = E o / E t,   w_k = 0.4 / sqrt(E A_kk^2)
    y = 1 + (t - 2 sum_k s_k A_kk) / |s|^2 for the page's, and with |A_kk| for the release's,   y_0: by its formula, squared

the means of t, o, A_kk and A_kk^2 are known exactly (`coupling.Entries`). So the terms that are subtracted here have mean 0.
Their weights are those of the first-order expansion of the definition; 0.4 is the slope of |z| against z^2 for a normal z:

    miscoupling           sqrt(y) - (y - y_0) / (2 sqrt(y_0))
    miscoupling_release   sqrt(y) - (t - E t - 2 sum_k s_k w_k (A_kk^2 - E A_kk^2)) / (2 sqrt(y_0) |s|^2)
    offdiag               sqrt(o) - (o - E o) / (2 sqrt(E o))
    offdiag_normalized    sqrt(o / t) - (o - r t) / (2 sqrt(r) E t)

Frames are the same in all measurements of one width, so that curves are smooth. Signs of singular
vectors are arbitrary: each pair (u_k, v_k) is taken with the sign for which u_k has a positive product with a fixed vector.

Cost: a product of J with `COLUMNS` columns, and `ENTRIES` L^2 numbers for each K. The product takes `COLUMNS` d^2
multiplications; to form J takes d products with a block of about 12 d^2 weights, 12 d^3.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from tracker.linalg.svd import each
from tracker.measures.coupling import (
    BY_ROTATIONS,
    Entries,
    Moments,
    Overlap,
    overlap,
    root_mean_squares,
    side_by_side,
)

COLUMNS = 128  # at most, that each J is multiplied with
ENTRIES = 1 << 11  # of A in all frames of one K: ENTRIES / K^2 frames, but three at least
AT_ONCE = 1 << 17  # entries of A, which a CPU's caches hold, and small budgets
SLOPE = 0.4
ROUNDINGS = 16  # of an entry of G: singular vectors are orthonormal to some roundings
SMALLEST = 0.05  # of a weight's denominator: any fixed weight leaves the mean as it is

Turned = Float[Tensor, "R L n c c"]  # F^T J F of every row and block
Bases = Float[Tensor, "R M d K"]


@lru_cache(maxsize=4)
def frames(d: int) -> Float[Tensor, "n d c"]:
    """Return Haar frames of up to `COLUMNS` columns together, in float64, always the same."""
    generator = torch.Generator().manual_seed(0)
    c = min(d, COLUMNS)
    orthonormal, triangle = torch.linalg.qr(
        torch.randn(COLUMNS // c, d, c, generator=generator, dtype=torch.float64)
    )
    return orthonormal * torch.linalg.diagonal(triangle).sign()[:, None]


@lru_cache(maxsize=16)
def drawn(d: int, K: int) -> tuple[Int[Tensor, " m"], Int[Tensor, "m r"]]:
    """Return which of the `frames` each frame for K singular vectors is drawn from, and which of its columns it takes."""
    generator = torch.Generator().manual_seed(0)
    n, _, columns = frames(d).shape
    m = entries_of_pair(K) // K**2
    orders = torch.rand(m, columns, generator=generator).argsort(-1)
    return torch.arange(m) % n, orders[:, : min(2 * K, d)]


def entries_of_pair(K: int) -> int:
    """Return how many entries of A all frames for K singular vectors have at most."""
    return max(3 * K**2, ENTRIES)


def turned(J: Float[Tensor, "R d d"], F: Float[Tensor, "n d c"]) -> Float[Tensor, "R n c c"]:
    """Return F^T J F."""
    products = F.mT.flatten(0, 1) @ J  # (R, n c, d)
    return products.unflatten(1, (len(F), -1)) @ F


def mean_levels(
    T: Turned,
    s: Float[Tensor, "R L K"],
    of: Moments,
    U: Bases,
    V: Bases,
    ks: Sequence[int],
) -> dict[str, Float[Tensor, "R k L M"]]:
    """Return the levels of `BY_ROTATIONS` for every pair of Jacobian and basis; NaN where the Jacobian is zero.

    Args:
        T: `turned` of the Jacobians.
        s: top singular values of the Jacobians.
        of: moments of the Jacobians, (R, L).
        U, V: singular vectors of the bases.
    """
    of_row = T.shape[1] * U.shape[1] * max(ks) ** 2
    at_once = max(1, AT_ONCE // of_row) if T.is_cpu else len(T)
    rows = [slice(start, start + at_once) for start in range(0, len(T), at_once)]
    parts = [_of_rows(T[r], s[r], each(itemgetter(r), of), U[r], V[r], ks) for r in rows]
    return {name: torch.cat([part[name] for part in parts]) for name in BY_ROTATIONS}


def _of_rows(
    T: Turned, s: Tensor, of: Moments, U: Bases, V: Bases, ks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the `mean_levels` of rows whose pairs are computed at once."""
    K, d = max(ks), U.shape[-2]
    signs = _signs(U[..., :K])
    signed_U, signed_V = U[..., :K] * signs, V[..., :K] * signs
    # The squares of tiny entries underflow
    scale = torch.where(s[..., 0] > 0, s[..., 0], torch.nan)
    unit_s, unit_T = s / scale[..., None], T / scale[..., None, None, None]
    unit_of = each(lambda part: part / scale, of)
    products = signed_U.mT @ signed_V
    of_ks: list[Tensor] = []
    for k in ks:
        left, right = _coordinates(signed_U[..., :k], signed_V[..., :k])
        sums_of = _controlled_sums(unit_s[..., :k], unit_of, overlap(products[..., :k, :k]), d)
        of_frame = len(T) * T.shape[1] * U.shape[1]
        entries = _entries(d, k).to(T.device)
        # An accelerator takes all at once.
        at_once = max(1, AT_ONCE // (of_frame * k**2)) if T.is_cpu else len(entries)
        sums = [sums_of(_matrices(unit_T, some, left, right)) for some in entries.split(at_once)]
        of_ks.append(torch.stack(sums).sum(0) / len(entries))
    levels = dict(zip(BY_ROTATIONS, torch.stack(of_ks, 2), strict=True))
    return levels | {"offdiag": levels["offdiag"] * scale[:, None, :, None]}


def _controlled_sums(
    s: Float[Tensor, "R L K"], of: Moments, basis: Overlap, d: int
) -> Callable[[Float[Tensor, "R L n K M K"]], Float[Tensor, "4 R L M"]]:
    """Return the function of A, which it overwrites, that sums the definitions, less their control variates, over frames.

    The sums are in the order of `BY_ROTATIONS`.
    """
    entries = Entries(of, basis, d)
    roots, off_square = root_mean_squares(s, entries), entries.off_square
    # E o, E t and E A_kk^2 may be 0 except for rounding: antisymmetric Jacobians in symmetric bases, or K = 1.
    least = SMALLEST**2 * (entries.a + entries.tau**2)  # (R, L, 1)
    square, diagonal_squares = entries.square.clamp_min(least), entries.diagonal_squares()
    of_share = off_square / square
    weights = SLOPE * s[..., None, :] / diagonal_squares.clamp_min(least[..., None]).sqrt()
    # With an axis of frames: (R, L, 1, M), and those of each singular vector (R, L, 1, M, K)
    E_t, E_o, E_squares, w, r, page_0, by_page, by_release, by_off, by_share = (
        one.unsqueeze(2)
        for one in (
            entries.square,
            off_square,
            diagonal_squares,
            weights,
            of_share,
            roots[0],
            *(1 / (2 * root.clamp_min(SMALLEST)) for root in roots),
            1 / (2 * off_square.clamp_min(least).sqrt()),
            1 / (2 * of_share.sqrt().clamp_min(SMALLEST) * square),
        )
    )
    # Of each Jacobian: M = 1
    s_k, norm = s[:, :, None, None], vector_norm(s, dim=-1)[..., None, None]

    def sums(A: Float[Tensor, "R L n K M K"]) -> Float[Tensor, "4 R L M"]:
        diagonal = A.diagonal(dim1=3, dim2=5).clone()  # (R, L, n, M, K)
        squares, of_entries = diagonal.square(), A.square_()
        # Without a difference of sums: the root of its rounding is no level of a pair whose A is diagonal.
        of_entries.diagonal(dim1=3, dim2=5).zero_()
        off = of_entries.sum((3, 5))  # (R, L, n, M)
        total = off + squares.sum(-1)
        page = 1 + (total - 2 * (diagonal * s_k).sum(-1)) / norm**2
        release = 1 + (total - 2 * (diagonal.abs() * s_k).sum(-1)) / norm**2
        change = total - E_t - 2 * (w * (squares - E_squares)).sum(-1)
        values = (
            page.clamp_min(0).sqrt() - (page - page_0**2) * by_page,
            release.clamp_min(0).sqrt() - change / norm**2 * by_release,
            off.sqrt() - (off - E_o) * by_off,
            (off / total).sqrt() - (off - r * total) * by_share,
        )
        return torch.stack([of_definition.sum(2) for of_definition in values])

    return sums


def _entries(d: int, K: int) -> Int[Tensor, "m rows r"]:
    """Return which entries of F^T J F each frame for K singular vectors takes: F_1^T J [F_1, F_2], or all of a whole rotation."""
    which, columns = drawn(d, K)
    c = frames(d).shape[-1]
    rows = columns[:, :K] if 2 * K <= d else columns
    return (which[:, None, None] * c + rows[..., None]) * c + columns[:, None]


def _coordinates(U: Bases, V: Bases) -> tuple[Bases | None, Float[Tensor, "R M p K"]]:
    """Return U and V in the columns of their frame; None for U where these are its first ones."""
    d, k = U.shape[-2:]
    if 2 * k > d:
        return U, V
    G = (U.mT @ V).nan_to_num()  # LAPACK may end the process if it is given NaN
    rest, vectors = torch.linalg.eigh(torch.eye(k, dtype=torch.float64) - (G.mT @ G).double().cpu())
    # V' is in the span of U' where J' is symmetric or antisymmetric; the root of what rounding leaves there is no small number.
    rest = torch.where(rest > ROUNDINGS * k * torch.finfo(U.dtype).eps, rest, 0.0)
    H = vectors * rest.sqrt()[..., None, :] @ vectors.mT
    return None, torch.cat([G, H.to(G)], -2)


def _matrices(
    T: Turned, entries: Int[Tensor, "m rows r"], left: Bases | None, right: Bases
) -> Float[Tensor, "R L m K M K"]:
    """Return A of every pair and frame."""
    chosen = T.flatten(2).index_select(-1, entries.flatten()).unflatten(-1, entries.shape)
    products = (chosen.flatten(1, 3) @ side_by_side(right)).unflatten(1, chosen.shape[1:4])
    products = products.unflatten(-1, (right.shape[1], -1))  # (R, L, n, rows, M, K)
    return products if left is None else torch.einsum("rmdi,rlndmj->rlnimj", left, products)


def _signs(U: Bases) -> Float[Tensor, "R M 1 K"]:
    """Return the signs that singular vectors are taken with."""
    fixed = torch.arange(1, U.shape[-2] + 1, device=U.device).to(U).sin()[:, None]
    return torch.where((U * fixed).sum(-2, keepdim=True) < 0, -1.0, 1.0).to(U)
