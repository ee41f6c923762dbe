"""Proofs that a block restricted to single rows is the block, in value and in derivative.

- value: the rows alone give the recorded output of those rows;
- derivative: J^T u for a random u equals the full-sequence vector-Jacobian product, at the first and the last row asked
  for of every sample (at position 0 a causal row attends to itself alone and proves little: the last position stands in
  for it). The value alone would let a detached key pass, or two attentions named as one block. The sequence is a window
  of the recorded one that ends at the row, where the block's arguments can be cut so: what may differ is the block's
  code and weights, and those are the same on any sequence. It costs 2 x WINDOW rows where one Jacobian costs d.

- adjoint: J V and J^T U are of one matrix, where J V is asked for.

Errors are relative to the residual function f = block - 1, not to the block's output. Below a floor, |f| < 1e-2 |x| in
float32, rounding of the sum x + f hides it: a Jacobian that small is found again in float64.

Many blocks round to float32 inside, whatever they are measured in: routers, norms, softmax, rotary positions. Evaluated in
another way (single rows, another kernel), such a block in float64 differs by float32's rounding, and what is asked of it
is `ROUNDED`. That it is not noise is proved: run once more in the way it was recorded, it gives the same output to the
tolerance of float64.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracker.capture.recording import BlockCall, recording_kernels
from tracker.errors import UsageError
from tracker.jacobians.restriction import (
    RowAttention,
    linearize_full_sequence,
    linearize_rows,
    replay_errors_named,
    restrict,
    slicing_errors_caught,
)
from tracker.jacobians.slicing import NotSliceable, Rows, cut_windows
from tracker.linalg.comparison import FLOOR, TOLERANCE, relative_error
from tracker.linalg.jacobian import LinearOperator

ROUNDED = 1e-5  # of a block that rounds to float32 inside, in float64: some hundred roundings of float32
FAST = 5e-2  # of products in TF32 or bfloat16
WINDOW = 16


def tolerance(dtype: torch.dtype, rounded: bool) -> float:
    """The largest error of a block evaluated in another way, where its own code may round to less than this dtype."""
    return max(TOLERANCE[dtype], ROUNDED) if rounded else TOLERANCE[dtype]


def derivative_error(call: BlockCall, rows: Rows, row_attention: RowAttention) -> float:
    """Relative difference of J^T u, sliced against full sequence, for random u at the first and the last row asked for
    of every sample; the last position of the sequence instead, where only position 0 is asked for.

    Of rows with other sources, at the first and the last of every sample.
    """
    if rows.source is not None:
        groups = [group for _, group in rows.disjoint_groups()]
        return max(_derivative_error_at(call, group, row_attention)[0] for group in (groups[0], groups[-1]))
    n, device = call.x.shape[1], call.x.device
    samples = rows.sample.unique()
    asked = [rows.token[rows.sample == sample] for sample in samples]
    last = [int(t.max()) or n - 1 for t in asked]
    first = [min(int(t.min()), l) or l for t, l in zip(asked, last, strict=True)]
    return max(
        _derivative_error_in_window(call, Rows(samples, torch.tensor(at, device=device)), row_attention)
        for at in {*map(tuple, (first, last))}
    )


def _derivative_error_in_window(call: BlockCall, rows: Rows, row_attention: RowAttention) -> float:
    """In the full sequence, unless the window does: padding within it may see nothing, and unknown arguments can't be cut."""
    if call.x.shape[1] > 2 * WINDOW:
        try:
            error, rounded = _derivative_error_at(*cut_windows(call, rows, WINDOW), row_attention)
        except (NotSliceable, UsageError):
            error, rounded = float("nan"), False
        if error <= tolerance(call.x.dtype, rounded):
            return error
    return _derivative_error_at(call, rows, row_attention)[0]


def _derivative_error_at(call: BlockCall, rows: Rows, row_attention: RowAttention) -> tuple[float, bool]:
    """And whether the block rounds inside."""
    x = rows.select_sources(call.x)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    block = linearize_rows(restrict([(call, rows)], row_attention), x)
    with slicing_errors_caught():
        found = block.pullback(u[None])[0]
    with replay_errors_named(call):
        expected = linearize_full_sequence(call, rows).pullback(u[None])[0]
    identity = u if rows.source is None else torch.zeros_like(u)
    return relative_error(found - identity, expected - identity, u, x.dtype), block.rounded


def reproduction_error(call: BlockCall, recorded_dtype: torch.dtype) -> float:
    """How far the block's output is from the recorded one where it is run in the same way: 0, or a rounding or two."""
    with replay_errors_named(call), torch.no_grad(), recording_kernels(recorded_dtype):
        y = call(call.x.clone())  # a block may work in place
    return relative_error(y - call.x, call.y - call.x, call.y, recorded_dtype)


def adjoint_error(operator: LinearOperator, like: Tensor) -> float:
    """How far J V and J^T U are from each other's adjoints: |u . J v - J^T u . v| for random u and v, relative to |J|_F.

    J V is found from the derivative of J^T U. A function with a derivative of its own making may have none beyond: then
    its part of J V is missing, and nothing is raised.
    """
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, *like.shape, 1, generator=generator, dtype=torch.float64).to(like)
    forward, backward = operator.apply(v), operator.apply_transpose(u)
    norm = partial(torch.linalg.vector_norm, dim=(-2, -1), dtype=torch.float64)
    size = torch.maximum(torch.maximum(norm(forward), norm(backward)), FLOOR[like.dtype] * norm(v))
    difference = (
        (u * forward).sum((-2, -1), dtype=torch.float64) - (backward * v).sum((-2, -1), dtype=torch.float64)
    ).abs()
    return float((difference / size).max())


def reproduces_recorded_output(call: BlockCall, recorded_dtype: torch.dtype) -> bool:
    """Whether the block, run in the way it was recorded, gives the recorded output: else it is random, or keeps state."""
    # Sums of a GPU have no fixed order: there a block that rounds inside may differ by that much.
    return reproduction_error(call, recorded_dtype) <= tolerance(recorded_dtype, rounded=call.x.device.type != "cpu")


def reproduced(call: BlockCall, f: Tensor, reference: Tensor, recorded: Tensor, recorded_dtype: torch.dtype) -> float:
    """The relative error of the residual function as the full sequence gives it.

    By other kernels a block that rounds inside gives another output, if not by much; in the same way it must not.

    Raises:
        UsageError: if the block does not reproduce its output.
    """
    error = relative_error(f, reference, recorded, recorded_dtype)
    if error <= TOLERANCE[recorded_dtype]:
        return error
    if not reproduces_recorded_output(call, recorded_dtype):
        raise UsageError(
            f"block {call.layer} ({call.name}) does not reproduce its own output (relative error {error:.1e}): "
            "it is random or keeps state between calls, so it has no Jacobian to measure"
        )
    if not relative_error(f, reference, recorded, torch.float32) <= TOLERANCE[torch.float32]:
        raise UsageError(
            f"block {call.layer} ({call.name}) gives another output with gradients than without (relative error "
            f"{error:.1e}): its code asks whether gradients are on, or rounds to less than float32; measure it without that"
        )
    return error


def check_key(call: BlockCall) -> Any:
    """What a derivative proof holds for: one block, with or without the final norm, and how it and its attention are called."""
    given = tuple((name, type(value).__name__) for name, value in call.arguments.arguments.items())
    attention = tuple((a.mask is None, a.causal) for a in call.attention)
    return call.layer, call.final_norm is None, call.x.dtype, given, attention
