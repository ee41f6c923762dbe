"""Check that a block restricted to single rows agrees with the block in the full sequence.

- value: the rows alone give the recorded output of those rows;
- derivative: J^T u for a random u equals the full-sequence vector-Jacobian product. It is compared where the model is not asked
  (`witness`), for pairs of rows, and at every requested row of a block with several attentions, of which one may read what
  another wrote anywhere in the sequence.

These are comparisons on random vectors at a tolerance, not proofs. Errors are relative to the residual function
f = block - 1, not to the block's output. If |f| < 1e-2 |x| in float32, rounding of the sum x + f hides f: such a Jacobian is
computed again in float64.

Many blocks compute routers, norms, softmax or rotary positions in float32, whatever the measuring dtype. On another path
(single rows, another kernel), such a block in float64 differs by float32's rounding, and its tolerance is `ROUNDED`. That the
difference is not noise is checked: replayed exactly as it was recorded, the block gives the same output to the tolerance of
float64.

A Jacobian that is computed again in float64 uses the keys and values that the float32 pass recorded, so it carries their
rounding, and its tolerance is `ROUNDED` too.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.common.errors import UsageError
from tracker.jacobians.restriction import (
    RowAttention,
    linearize_full_sequence,
    linearize_rows,
    replay_errors,
    restrict,
    slicing_errors,
)
from tracker.jacobians.slicing import Rows
from tracker.linalg.precision import (
    FLOOR,
    TOLERANCE,
    is_finite,
    relative_error,
    tolerance,
)
from tracker.linalg.transfer import standard_normal
from tracker.model.recording import BlockCall, recording_kernels
from tracker.model.replica import irreproducible


def derivative_error(call: BlockCall, rows: Rows, row_attention: RowAttention) -> float:
    """Return the relative difference of J^T u between single rows and the full sequence, for random u.

    Args:
        rows: of different samples.
    """
    x = rows.select_sources(call.x)
    u = standard_normal(x.shape, x)
    with slicing_errors():
        block = linearize_rows(restrict([(call, rows)], row_attention), x)
        gradient = block.pullback(u[None])[0]
    with replay_errors(call):
        expected = linearize_full_sequence(call, rows).pullback(u[None])[0]
    identity = u if rows.source is None else torch.zeros_like(u)
    return float(relative_error(gradient - identity, expected - identity, u, x.dtype))


def reproduces_recorded_output(call: BlockCall, recorded_dtype: torch.dtype) -> bool:
    """Whether the block gives the recorded output when it runs exactly as it was recorded; if not, it is random or stateful."""
    with replay_errors(call), torch.no_grad(), recording_kernels(recorded_dtype):
        y = call(call.x.clone())  # a block may work in place
    # 0, or a rounding or two. On a GPU sums have no fixed order, so a block that rounds inside may differ by that much.
    error = relative_error(y - call.x, call.y - call.x, call.y, recorded_dtype)
    return bool(error <= tolerance(recorded_dtype, rounded=not call.x.is_cpu))


def require_reproduction(
    call: BlockCall, f: Tensor, reference: Tensor, recorded: Tensor, recorded_dtype: torch.dtype
) -> float:
    """Return the relative error of the residual function in the full sequence.

    With other kernels than when it was recorded, a block that rounds inside may differ a little; with the same ones it must
    not.

    Raises:
        UsageError: if the block does not reproduce its output.
    """
    error = float(relative_error(f, reference, recorded, recorded_dtype))
    if error <= TOLERANCE[recorded_dtype]:
        return error
    if not reproduces_recorded_output(call, recorded_dtype):
        raise irreproducible(
            f"block {call.layer} ({call.name}) does not reproduce its own output (relative error {error:.1e})",
            call.replica.description,
        )
    if not relative_error(f, reference, recorded, torch.float32) <= TOLERANCE[torch.float32]:
        raise UsageError(
            f"block {call.layer} ({call.name}) gives another output with gradients than without (relative error "
            f"{error:.1e}): its code depends on whether gradients are enabled, or rounds to less than float32; remove that, or "
            "give dtype='float64', which autocast does not round"
        )
    return error


def require_derivative(call: BlockCall, rows: Rows, recorded_dtype: torch.dtype) -> None:
    """Check by a few vector-Jacobian products over the full sequence that a block can be linearized. It holds its weights.

    Raises:
        UsageError: if its code fails with gradients, or does not reproduce the recorded output.
    """
    _, group = next(rows.disjoint_groups())
    block = linearize_full_sequence(call, group)
    before, recorded = group.select(call.x), group.select(call.y)
    with replay_errors(call):
        block.pullback(standard_normal((2, *before.shape), before))
    require_reproduction(call, block.y - before, recorded - before, recorded, recorded_dtype)


def quality(J: Float[Tensor, "R d d"], dtype: torch.dtype) -> Bool[Tensor, " 2"]:
    """Whether all entries are finite, and whether rounding hides some row's J from this dtype.

    It does if the root mean square singular value of J is below the floor of the dtype.
    """
    finite = is_finite(J)
    if dtype == torch.float64:
        return torch.stack([finite, torch.zeros_like(finite)])
    hidden = (torch.linalg.matrix_norm(J) < FLOOR[dtype] * J.shape[-2] ** 0.5).any()
    return torch.stack([finite, hidden])
