"""Check that a block restricted to single rows agrees with the block in the full sequence, and that it does not mix samples.

- value: the rows alone give the recorded output of those rows;
- derivative: J^T u for a random u equals the full-sequence vector-Jacobian product, at the first and the last requested row
  of the first and the last sample. (A causal row at position 0 attends to itself alone, which checks little; the last position
  replaces it.)
  The value alone would not detect a detached key, or two attentions named as one block. If the block's arguments can be
  cut, the sequence is a window of the recorded one that ends at the row: the check compares code and weights, which are the
  same on any sequence. Cost: WINDOW rows for each, where one Jacobian costs d. A block with several attentions is compared in
  the full sequence at every requested row: a path from a row to another and back is not in every window.
- beside: in all blocks of a class but the first, the rows alone give the full sequence's output where these
  rows have other states, in the same windows; differences of the rows' own values say the rest (`independent`).
- mixing: the samples of a batch do not depend on each other, or Jacobians would depend on what else is in the batch.

These are comparisons on random vectors at a tolerance, not proofs. Errors are relative to the residual function
f = block - 1, not to the block's output. If |f| < 1e-2 |x| in float32, rounding of the sum x + f hides f: such a Jacobian is
computed again in float64.

Many blocks compute routers, norms, softmax or rotary positions in float32, whatever the measuring dtype. On another path
(single rows, another kernel), such a block in float64 differs by float32's rounding, and its tolerance is `ROUNDED`. That the
difference is not noise is checked: replayed exactly as it was recorded, the block gives the same output to the tolerance of
float64.

A Jacobian that is computed again in float64 uses the keys and values that the float32 pass recorded, so it carries their
rounding, and its tolerance is `ROUNDED` too.

Mixing is looked for in two ways: for sets K of samples, the outputs of K do not depend on the states of the others.

- derivative: J^T u, for a random u on the samples of K, is zero on the others. What is below `MIXES` of J^T u - u on K is
  rounding: softmax(s - s.max()) over a batch does not depend on the maximum, and its derivative cancels to 1e-17, not to zero;
- value: with other states for the other samples, the outputs of K are the same. This detects dependence without a derivative,
  such as experts of limited capacity, which tokens of another sample can fill.

The derivative is checked for every ordered pair of samples, the values for two halves of the batch. A block's code would mix
samples on any sequences, so both use short windows of all samples if the block's arguments can be cut (`slicing`). Cost: about
log2(B) + 2 cotangents at once, and three forward passes.
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


def derivative_error(
    call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool
) -> float:
    """Return the relative difference of J^T u between single rows and the full sequence, for random u.

    Args:
        rows: of different samples.
        attached: whether `detach` is the identity.
    """
    x = rows.select_sources(call.x)
    u = standard_normal(x.shape, x)
    with slicing_errors():
        block = linearize_rows(restrict([(call, rows)], row_attention, attached), x)
        gradient = block.pullback(u[None])[0]
    with replay_errors(call):
        expected = linearize_full_sequence(call, rows, attached).pullback(u[None])[0]
    identity = u if rows.source is None else torch.zeros_like(u)
    return float(relative_error(gradient - identity, expected - identity, u, x.dtype))


def reproduction_error(call: BlockCall, recorded_dtype: torch.dtype) -> float:
    """Return the relative error of the block's output when it runs exactly as it was recorded: 0, or a rounding or two."""
    with replay_errors(call), torch.no_grad(), recording_kernels(recorded_dtype):
        y = call(call.x.clone())  # a block may work in place
    return float(relative_error(y - call.x, call.y - call.x, call.y, recorded_dtype))


def reproduces_recorded_output(call: BlockCall, recorded_dtype: torch.dtype) -> bool:
    """Whether the block gives the recorded output when it runs exactly as it was recorded; if not, it is random or stateful."""
    # On a GPU sums have no fixed order, so a block that rounds inside may differ by that much.
    return reproduction_error(call, recorded_dtype) <= tolerance(
        recorded_dtype, rounded=call.x.device.type != "cpu"
    )


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


def require_finite(finite: bool, call: BlockCall) -> None:
    """Raise FloatingPointError, naming the block, if its Jacobian is not finite."""
    if not finite:
        raise FloatingPointError(
            f"the Jacobian of block {call.layer} ({call.name}) is not finite (overflow or NaN in {call.x.dtype})"
        )
