"""Accuracy and completeness of singular triplets, from the matrix itself.

With R = J - U_K S_K V_K^T and sigma = s_K (1 + 1e-4), the matrix sigma^2 I - R R^T is positive definite, and its Cholesky
factorisation succeeds, if and only if |R|_2 < sigma: no larger singular value is missing.
"""

from collections.abc import Iterator
from math import ceil

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.linalg.linear import inner_products

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
    G.neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    definite = torch.ones(len(G), dtype=torch.bool, device=G.device)
    for start in range(0, d, PANEL):
        stop = min(start + PANEL, d)
        L, info = torch.linalg.cholesky_ex(G[..., start:stop, start:stop])
        definite &= info == 0
        below = torch.linalg.solve_triangular(L, G[..., stop:, start:stop].mT, upper=False).mT.contiguous()
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


def relative_residual(JV: Tensor, JTU: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, " B"]:
    """Return `residual` from the products J V and J^T U."""
    s_1 = S[..., None, :1]  # division first: squares of a tiny Jacobian's entries would underflow
    right = torch.linalg.vector_norm((JV - U * S[..., None, :]) / s_1, dim=-2)
    left = torch.linalg.vector_norm((JTU - V * S[..., None, :]) / s_1, dim=-2)
    return torch.maximum(left, right).amax(-1)
