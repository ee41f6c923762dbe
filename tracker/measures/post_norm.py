"""Whether the state enters the blocks through norms alone, where the null level is no baseline.

A norm takes one direction, or two, out of what it is given. Where all that a block returns was normed before (post-norm: x →
N(x + g(x)), as in BERT) or after it was given (x → N(x) + g(N(x))), its I + J is singular. So J is −1 along such directions
in every block, which the blocks have in common before any training.

Where some of the state goes around the norms (pre-norm: x → x + g(N(x))), the smallest singular value of I + J is far above
what rounding leaves: at least 5e-3 of their geometric mean in all checkpoints of `nano`, below 1e-6 in normed blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.common.errors import warn_caller
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import Jacobians
from tracker.measures.layers import Layer

SINGULAR = 1e-5  # smallest singular value of I + J, relative to their geometric mean
ASKED = 5  # blocks
SHARES = "singular_shares"
ROUNDS = 3  # of inverse iteration


def singular_shares(
    jacobians: Jacobians, layers: Sequence[Layer], blocks: Sequence[Sequence[CallRows]]
) -> Float[Tensor, "asked"]:
    """Return `smallest_singular_share` of some blocks at one row.

    Args:
        layers: the Jacobians of the blocks.
        blocks: the recorded calls of each, with their rows.
    """
    L = len(layers)
    if jacobians.precision == "float32":
        asked = {round((i + 0.5) * L / ASKED - 0.5) for i in range(ASKED)}
        return torch.cat([smallest_singular_share(layers[l].jacobian()[:1]) for l in asked])
    # Rounding of other precisions would hide a singular matrix: one Jacobian is formed again.
    call, rows = blocks[L // 2][0]
    ((J, _),) = jacobians.in_float32()([(call, rows.subset(slice(0, 1)))])
    return smallest_singular_share(J)


def most_are_singular(shares: np.ndarray) -> bool:
    """Whether I + J is singular in most of the blocks."""
    return bool(2 * (shares < SINGULAR).sum() > len(shares))


def smallest_singular_share(J: Float[Tensor, "R d d"]) -> Float[Tensor, "R"]:
    """Return the smallest singular value of I + J over the geometric mean of all, from above; 0 for a singular matrix."""
    d = J.shape[-1]
    # Without a check: a singular matrix is an answer.
    factors, pivots, _ = torch.linalg.lu_factor_ex(torch.eye(d).to(J) + J)
    sizes = torch.linalg.diagonal(factors).abs()
    mean = sizes.clamp_min(torch.finfo(J.dtype).tiny).log().mean(-1).exp()
    v = torch.ones_like(J[..., :1])
    for _ in range(ROUNDS):
        unit = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
        left = torch.linalg.lu_solve(factors, pivots, unit, adjoint=True)
        v = torch.linalg.lu_solve(factors, pivots, left)
    smallest = torch.linalg.vector_norm(v, dim=(-2, -1)) ** -0.5
    return torch.where(smallest.isfinite(), smallest / mean, 0)


def warn_of_norms() -> None:
    """Warn that mis-couplings are far below the null level before any training."""
    warn_caller(
        "the state enters the blocks of this model through norms alone (post-norm, as in BERT, or a residual that starts from "
        "the normed state): I + J is singular, so that their Jacobians have top singular vectors in common and mis-coupling is "
        "often far below its null level even untrained. Compare with the same architecture untrained (step 0, of a walk "
        "--untrained 0), not with the null level. "
        "Norms also set the lengths of states: read lss, not alpha_mean or expodistance. The section on post-norm models in "
        "docs/measurements.md says more"
    )
