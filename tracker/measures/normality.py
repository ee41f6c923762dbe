"""Whether a block's Jacobian is symmetric, or at least normal: J J^T = J^T J.

The paper's coupling is that of singular vectors, J = U S V^T. Where residual alignment holds, J = U S U^T with v_k = u_k.

    symmetric share       |(J + J^T) / 2|_F^2 / |J|_F^2        1: symmetric, 0: antisymmetric
                          null level (1 + 1/d) / 2, its expectation for independent random U and V
    alignment             u_k . v_k                            1: v_k = u_k, -1: v_k = -u_k; 0 +- 1/sqrt(d) for random U and V
    departure             sqrt(|J|_F^2 - sum_k |lambda_k|^2) / |J|_F         (Henrici, 1962, relative to |J|_F)
                          0: normal, 1: nilpotent

Cost: symmetric share and alignment, some passes over J; the departure needs all eigenvalues of a matrix that is not symmetric,
some 25 products of the size of J.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.cores import batch_on_cores
from tracker.linalg.svd import SMALL, Triplets

Jacobian = Float[Tensor, "*B d d"]
Values = Float[Tensor, "*B"]


def symmetric_share(J: Jacobian) -> Values:
    """Return the share of |J|_F^2 that the symmetric part has; NaN for a zero matrix."""
    unit = _unit(J)
    return torch.linalg.matrix_norm((unit + unit.mT) / 2) ** 2


def alignment(triplets: Triplets) -> Float[Tensor, "B K"]:
    """Return u_k . v_k of the top K singular triplets; NaN where s_k is 0, and its vectors arbitrary."""
    return torch.where(triplets.determined, (triplets.U * triplets.V).sum(-2), torch.nan)


def departure(J: Jacobian) -> Values:
    """Return Henrici's departure from normality relative to |J|_F, in float64; NaN for a zero matrix."""
    zero = J.abs().amax((-2, -1)) == 0
    unit = torch.where(zero[..., None, None], 0, _unit(J.double()))  # LAPACK may end the process if it is given NaN
    if unit.shape[-1] > SMALL:
        eigenvalues = torch.linalg.eigvals(unit)
    else:
        (eigenvalues,) = batch_on_cores(lambda part: (torch.linalg.eigvals(part),), unit.cpu())
    normal = (eigenvalues.real**2 + eigenvalues.imag**2).sum(-1)
    return torch.where(zero, torch.nan, (1 - normal).clamp_min(0).sqrt()).to(J)


def _unit(J: Jacobian) -> Jacobian:
    """Return J / |J|_F: squares of tiny entries underflow."""
    J = J / J.abs().amax((-2, -1), keepdim=True)
    return J / torch.linalg.matrix_norm(J, keepdim=True)
