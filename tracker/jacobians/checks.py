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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, count, islice
from math import comb

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.common.errors import UsageError
from tracker.jacobians.restriction import (
    RowAttention,
    evaluating_full_sequence,
    evaluating_rows,
    full_sequence,
    linearize_full_sequence,
    linearize_rows,
    replay_errors,
    restrict,
    slicing_errors,
)
from tracker.jacobians.slicing import NotSliceable, Rows, cut_windows
from tracker.linalg.jacobian import Linearization, linearize
from tracker.linalg.precision import (
    FAST,
    FLOOR,
    TOLERANCE,
    Roundings,
    is_finite,
    relative_error,
    tolerance,
)
from tracker.linalg.transfer import read, standard_normal, to_device
from tracker.model.recording import BlockCall, recording_kernels
from tracker.model.replica import irreproducible

WINDOW = 16  # tokens
BESIDE = 0.3  # a step to other states, relative to the root mean square of a state
# Returns an error at rows of different samples, and whether the block's code or the recording rounds.
Check = Callable[[BlockCall, Rows], tuple[Tensor, bool]]


def derivative_error(
    call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool = False
) -> float:
    """Return the relative difference of J^T u between single rows and the full sequence, for random u (R, d).

    It is checked at the first and the last requested row of the first and the last sample, or at the last position of the
    sequence if only position 0 is requested; at every requested row if the block has several attentions.

    Args:
        attached: whether `detach` is the identity.
    """
    at = partial(_derivative_error_at, row_attention=row_attention, attached=attached)
    return _largest_error(call, rows, at)


def error_beside(call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool) -> float:
    """Return the relative difference of values between single rows and the full sequence, where these rows have other states.

    It is checked at the rows of `derivative_error`. Rows that follow the full sequence, and whose J v is that of their values,
    have its derivative; at the recorded states alone, a mean over tokens that are equal would not be seen.
    """
    at = partial(_error_beside_at, row_attention=row_attention, attached=attached)
    return _largest_error(call, rows, at)


def _largest_error(call: BlockCall, rows: Rows, at: Check) -> float:
    groups = [group for _, group in rows.disjoint_groups()]
    if len(call.attention) > 1:  # one may read what another wrote anywhere in the sequence
        places = groups
    elif rows.source is not None:
        places = [groups[0], groups[-1]]
    else:
        places = _places(rows, call.x.shape[1])
        in_windows = _error_in_windows(call, places, at)
        # What fails in windows is checked again in the full sequence: padding may fill a window.
        if in_windows is not None and in_windows[0] <= tolerance(call.x.dtype, in_windows[1]):
            return in_windows[0]
    errors = read([at(call, place)[0] for place in places])
    # NaN if one is, unlike Python's max
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _places(rows: Rows, n: int) -> list[Rows]:
    """Return the first and the last requested row of two samples; the last position in place of position 0."""
    two = (rows.sample == rows.sample.min()) | (rows.sample == rows.sample.max())
    rows = rows.subset(two)
    samples, which = rows.sample.unique(return_inverse=True)
    last = torch.zeros_like(samples).scatter_reduce(0, which, rows.token, "amax")
    last = torch.where(last == 0, n - 1, last)
    first = last.scatter_reduce(0, which, rows.token, "amin")
    first = torch.where(first == 0, last, first)
    return (
        [Rows(samples, last)]
        if torch.equal(first, last)
        else [Rows(samples, first), Rows(samples, last)]
    )


def _error_in_windows(
    call: BlockCall, places: Sequence[Rows], at: Check
) -> tuple[float, bool] | None:
    """Return the same as `at` in a window for each row; None if the call is small or can't be cut."""
    B, n, _ = call.x.shape
    if B <= 2 and n <= 2 * WINDOW:
        return None
    rows = Rows(
        torch.cat([place.sample for place in places]), torch.cat([place.token for place in places])
    )
    try:
        error, rounded = at(*cut_windows(call, rows, WINDOW))
    except (NotSliceable, UsageError):
        return None
    return float(error), rounded


def _derivative_error_at(
    call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool
) -> tuple[Tensor, bool]:
    """Return the error at rows of different samples, and whether the block's code or the recording rounds."""
    x = rows.select_sources(call.x)
    u = standard_normal(x.shape, x)
    with slicing_errors():
        block = linearize_rows(restrict([(call, rows)], row_attention, attached), x)
        gradient = block.pullback(u[None])[0]
    with replay_errors(call):
        expected = linearize_full_sequence(call, rows, attached).pullback(u[None])[0]
    identity = u if rows.source is None else torch.zeros_like(u)
    error = relative_error(gradient - identity, expected - identity, u, x.dtype)
    return error, block.rounded or call.recorded_coarser


def _error_beside_at(
    call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool
) -> tuple[Tensor, bool]:
    x = rows.select_sources(call.x)
    # Squares of large states overflow float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    step = BESIDE * norm / x.shape[-1] ** 0.5
    x = x + step.to(x.dtype) * standard_normal(x.shape, x)
    with torch.no_grad():
        with evaluating_rows():
            y = restrict([(call, rows)], row_attention, attached)(x)
        with evaluating_full_sequence(call):
            expected = full_sequence(call, rows, attached)(x)
    before = rows.select(call.x) if rows.source is not None else x
    error = relative_error(y - before, expected - before, expected, x.dtype)
    return error, call.recorded_coarser


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


def way_of_calling(call: BlockCall) -> tuple[Hashable, ...]:
    """Return what of a block's call a check holds for: final norm, dtype, arguments and attention masks."""
    types = tuple((name, type(value).__name__) for name, value in call.arguments.arguments.items())
    attention = tuple((a.mask is None, a.causal) for a in call.attention)
    return call.final_norm is None, call.x.dtype, types, attention


NARROWEST = 2  # tokens of a window
# Derivatives by other samples that are no rounding, relative to the residual function's own, by bytes of the numbers that the
# block computes with.
MIXES = {8: 1e-12, 4: 1e-5, 2: FAST}
AT_ONCE = 4096  # rows of cotangents


def find_mixing(call: BlockCall, rows: Rows) -> str:
    """Describe how the samples of the call mix; return "" if they do not. Windows end at the requested rows if possible."""
    B, n, _ = call.x.shape
    width = max(NARROWEST, 2 * WINDOW // B)
    if n > width:
        last = [int(max(rows.token[rows.sample == b].tolist(), default=n - 1)) for b in range(B)]
        try:
            # Without the recorded attention: unless it is plain self-attention, it can't be cut into windows.
            windows, _ = cut_windows(
                replace(call, attention=[]), Rows(torch.arange(B), torch.tensor(last)), width
            )
            with slicing_errors():
                return _mixing_in(windows)
        except NotSliceable:  # the block needs its whole sequence
            pass
    with replay_errors(call):
        return _mixing_in(call)


def separating_sets(B: int) -> Bool[Tensor, "m B"]:
    """Return as few sets K of samples as possible such that for any two samples some K contains the first, not the second.

    Sample b belongs to the sets of the b-th half of all m: of two different halves, neither contains the other (Sperner 1928).
    """
    m = next(m for m in count(1) if comb(m, m // 2) >= B)
    sets = torch.zeros(m, B, dtype=torch.bool)
    for b, half in enumerate(islice(combinations(range(m), m // 2), B)):
        sets[list(half), b] = True
    return sets


def _mixing_in(call: BlockCall) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH), Roundings() as roundings:
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    negligible = MIXES.get(min(call.x.itemsize, roundings.least), FAST)
    return _mixing_by_derivative(call, block, negligible) or _mixing_by_value(
        call, block.y.view(shape)
    )


def _mixing_by_derivative(call: BlockCall, block: Linearization, negligible: float) -> str:
    shape = call.x.shape
    u, sets = standard_normal(shape, call.x), separating_sets(len(call.x))
    (masks,) = to_device(u.device, sets)
    u_on_sets = u * masks[..., None, None]
    cotangents = u_on_sets.flatten(1, 2).split(max(1, AT_ONCE // (shape[0] * shape[1])))
    gradients = torch.cat([block.pullback(part) for part in cotangents]).unflatten(1, shape[:2])
    # Without the identity, beside which a block may add little. NaN is 0 times the infinite derivative of a row that attends to
    # nothing: no mixing.
    maxima = (gradients - u_on_sets).nan_to_num(0, 0, 0).abs().amax((2, 3)).cpu()
    for K, largest in zip(sets, maxima, strict=True):
        leaked = largest.masked_fill(K, 0) / largest[K].max()
        if (leaked > negligible).any():
            return (
                f"outputs of {_format_samples(K)} have a derivative with respect to "
                f"{_format_samples(leaked > negligible)} (relative size {float(leaked.max()):.1e})"
            )
    return ""


def _mixing_by_value(call: BlockCall, y: Float[Tensor, "B n d"]) -> str:
    x = call.x
    noise = standard_normal(x.shape, x, seed=1)
    half = torch.arange(len(x)) < len(x) // 2
    sets = torch.stack([half, ~half])
    masks, members = to_device(x.device, sets)[0][..., None, None], sets.int().argmax(1).tolist()

    def error(K: Tensor, state: Tensor) -> Tensor:
        # Both are 0, so without error, on the samples outside K.
        f, reference = (torch.where(K, change, 0.0) for change in (call(state) - x, y - x))
        return relative_error(f, reference, y, x.dtype)

    def other_states(K: Tensor, member: int) -> Tensor:
        """Return x with all tokens outside K close to one of K, so that they compete for the same limited capacity."""
        row = x[member, -1]
        return torch.where(K, x, row + 1e-3 * row.square().mean().sqrt() * noise)

    with torch.no_grad(), recording_kernels(x.dtype), Roundings() as roundings:
        errors = read(
            [error(K, other_states(K, member)) for K, member in zip(masks, members, strict=True)]
        )
        for i, size in enumerate(errors):
            # A block that gives another output on the same states is random, which another check reports.
            if size > tolerance(x.dtype, roundings.seen) and error(masks[i], x.clone()) < size / 2:
                return (
                    f"outputs of {_format_samples(sets[i])} change with the states of the others "
                    f"(relative error {size:.1e})"
                )
    return ""


def _format_samples(chosen: Bool[Tensor, " B"]) -> str:
    numbers = [str(b) for b in chosen.nonzero().squeeze(-1).tolist()]
    return (
        f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
    )
