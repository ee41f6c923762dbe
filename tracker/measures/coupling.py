"""Coupling matrices and their five measures.

J^l = U^l S^l V^l^T is the Jacobian of block l (of L), d x d. Described in the top-K basis of block l' (eq. 10):

    A^{l l'} = U^{l'}_K^T  J^l  V^{l'}_K                                    (K, K)

Mis-coupling, 0 = perfectly coupled, s_K the top K singular values of J^l:

    miscoupling                 |A - diag(s_K)|_F / |s_K|_2      the project page's m_K
    miscoupling_release         | |A| - diag(s_K) |_F / |s_K|_2  the authors' release, "norm" (p = 2); |A| by element
    miscoupling_release_trace   | |A| - diag(s_K) |_F / |s_K|_1  the authors' release, "trace" (p = 1)
    offdiag                     |A - Diag A|_F                   paper eq. 13
    offdiag_normalized          |A - Diag A|_F / |A|_F           paper eq. 14

Each has a *null level*: the root of its expected square for an unrelated basis (U', V' independent and Haar-random).
The matrix for k < K is the leading k x k part of the one for K, so one product serves every k. Cost L^2 K d (d + K).
"""

from math import pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

MEASURES = ("miscoupling", "miscoupling_release", "miscoupling_release_trace", "offdiag", "offdiag_normalized")

# Of layer pairs, results may hold each with the last block before the final norm, and with the sides of the bases swapped.
VARIANTS = tuple(f"{name}{end}" for name in MEASURES for end in ("", "_raw", "_vju"))


def side_by_side(V: Float[Tensor, "*B M d K"]) -> Float[Tensor, "*B d M*K"]:
    """All bases as the columns of one matrix, so that a Jacobian meets them in one product."""
    return V.transpose(-3, -2).flatten(-2)


def in_bases(U: Float[Tensor, "*B M d K"], JV: Float[Tensor, "*B d M*K"]) -> Float[Tensor, "*B M K K"]:
    """A[m] = U[m]^T (J V[m]) of one Jacobian, from its product with all bases."""
    return torch.einsum("...mdi,...dmj->...mij", U, JV.unflatten(-1, (U.shape[-3], U.shape[-1])))


def miscouplings(
    A: Float[Tensor, "L M K K"], s: Float[Tensor, "L K"], d: int, s_basis: Float[Tensor, "M K"] | None = None
) -> dict[str, Float[Tensor, "L M"]]:
    """All five measures of every pair.

    NaN where there is nothing to describe (a zero Jacobian) or no basis to describe it in: a Jacobian of rank below K
    leaves some of its top K singular vectors undetermined.

    Args:
        s: of the Jacobians described.
        s_basis: of those that lend their bases, where these are others.
    """
    s_basis = s if s_basis is None else s_basis
    S = torch.diag_embed(s)[:, None]
    norm_s = torch.linalg.vector_norm(s, dim=-1)[:, None]
    release = _frobenius(A.abs() - S)
    offdiag = _frobenius(A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1)))
    measures = {
        "miscoupling": _ratio(_frobenius(A - S), norm_s),
        "miscoupling_release": _ratio(release, norm_s),
        "miscoupling_release_trace": _ratio(release, s.sum(-1)[:, None]),
        "offdiag": offdiag,
        "offdiag_normalized": _ratio(offdiag, _frobenius(A)),
    }
    determined = s_basis[:, -1] > d * torch.finfo(s.dtype).eps * s_basis[:, 0]
    defined = (s[:, 0] > 0)[:, None] & determined[None, :]
    return {name: torch.where(defined, values, torch.nan) for name, values in measures.items()}


def null_levels(
    s: Float[Tensor, "*batch K"], frobenius: Float[Tensor, "*batch"], d: int
) -> dict[str, Float[Tensor, "*batch"]]:
    """The level of each measure for a basis unrelated to the Jacobian described.

    Args:
        s: its top K singular values.
        frobenius: |J|_F, over all d singular values.
        d: the model's width.
    """
    K = s.shape[-1]
    norm_s = torch.linalg.vector_norm(s, dim=-1)
    page_squared = 1 + _ratio(K * frobenius, d * norm_s) ** 2
    overlap = 2 * sqrt(2 / pi) * _ratio(frobenius * s.sum(-1), d * norm_s**2)
    release = (page_squared - overlap).sqrt()
    some = torch.where(frobenius > 0, 1.0, torch.nan).to(s)
    return {
        "miscoupling": page_squared.sqrt(),
        "miscoupling_release": release,
        "miscoupling_release_trace": release * _ratio(norm_s, s.sum(-1)),
        "offdiag": sqrt(K * (K - 1)) * frobenius * some / d,
        "offdiag_normalized": sqrt((K - 1) / K) * some,
    }


def depth_means(m: Float[Tensor, "*batch L L"]) -> dict[str, Float[Tensor, "*batch"]]:
    """Means over layer pairs: all, off the trivial diagonal, adjacent. NaN entries (undefined pairs) are left out."""
    distance = layer_distance(m.shape[-1]).to(m.device)
    return {
        "mean": _mean_where(m, distance >= 0),
        "mean_offdiag": _mean_where(m, distance > 0),
        "mean_adjacent": _mean_where(m, distance == 1),
    }


def layer_distance(L: int) -> Tensor:
    """|l - l'| as an (L, L) matrix."""
    l = torch.arange(L)
    return (l[:, None] - l).abs()


def _mean_where(m: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, m, torch.nan).nanmean((-2, -1))


def _frobenius(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, torch.nan)
