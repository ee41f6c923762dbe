"""Proofs that a block restricted to single rows is the block, in value and in derivative.

- value: the rows alone give the recorded output of those rows;
- derivative: J^T u for a random u equals the full-sequence vector-Jacobian product, at the first and the last row asked
  for of every sample (at position 0 a causal row attends to itself alone and proves little: the last position stands in
  for it). The value alone would let a detached key pass, or two attentions named as one block. The sequence is a window
  of the recorded one that ends at the row, where the block's arguments can be cut so: what may differ is the block's
  code and weights, and those are the same on any sequence. It costs 2 x WINDOW rows where one Jacobian costs d.

Errors are relative to the residual function f = block - 1, not to the block's output. Below a floor, |f| < 1e-2 |x| in
float32, rounding of the sum x + f hides it: a Jacobian that small is found again in float64.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.arguments import NotSliceable, Rows, window_of
from tracker.jacobian import linearize
from tracker.recording import BlockCall
from tracker.restriction import Answered, full_sequence, on_single_rows, restrict

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = {torch.float32: 1e-2, torch.float64: 1e-5}  # of |f| / |x|: where rounding of x + f reaches the tolerance
WINDOW = 16


def derivative_error(call: BlockCall, rows: Rows, answered: Answered) -> float:
    """Relative difference of J^T u, sliced against full sequence, for random u at the first and the last row asked for
    of every sample; the last position of the sequence instead, where only position 0 is asked for.

    Of rows with other sources, at the first and the last of every sample.
    """
    if rows.source is not None:
        waves = [wave for _, wave in rows.waves()]
        return max(_derivative_error_at(call, wave, answered) for wave in (waves[0], waves[-1]))
    n, device = call.x.shape[1], call.x.device
    samples = rows.sample.unique()
    asked = [rows.token[rows.sample == sample] for sample in samples]
    last = [int(t.max()) or n - 1 for t in asked]
    first = [min(int(t.min()), l) or l for t, l in zip(asked, last, strict=True)]
    return max(
        _derivative_error_in_window(call, Rows(samples, torch.tensor(at, device=device)), answered)
        for at in {*map(tuple, (first, last))}
    )


def _derivative_error_in_window(call: BlockCall, rows: Rows, answered: Answered) -> float:
    """In the full sequence, unless the window does: padding within it may see nothing, and unknown arguments can't be cut."""
    if call.x.shape[1] > 2 * WINDOW:
        try:
            error = _derivative_error_at(*window_of(call, rows, WINDOW), answered)
        except NotSliceable:
            error = float("nan")
        if error <= TOLERANCE[call.x.dtype]:
            return error
    return _derivative_error_at(call, rows, answered)


def _derivative_error_at(call: BlockCall, rows: Rows, answered: Answered) -> float:
    x = rows.sources_of(call.x)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    sliced = on_single_rows(restrict([(call, rows)], answered), x)
    with sdpa_kernel(SDPBackend.MATH):
        expected = linearize(full_sequence(call, rows), x).pullback(u[None])[0]
    identity = u if rows.source is None else torch.zeros_like(u)
    return relative_error(sliced.pullback(u[None])[0] - identity, expected - identity, u, x.dtype)


def relative_error(f: Tensor, reference: Tensor, scale: Tensor, known_in: torch.dtype) -> float:
    """Largest over the rows of |f - reference| / max(|reference|, floor |scale|); 0 where they agree exactly.

    The floor is that of the precision the reference is known in, whatever precision it is compared in.
    """
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)  # squares of large states overflow float32
    size = torch.maximum(norm(reference), FLOOR[known_in] * norm(scale))
    difference = norm(f - reference)
    return float(torch.where(difference == 0, 0.0, difference / size).max())


def kind_of(call: BlockCall) -> Any:
    """What a derivative proof holds for: one block, and how it and its attention are called."""
    given = tuple((name, type(value).__name__) for name, value in call.arguments.arguments.items())
    attention = tuple((a.mask is None, a.causal) for a in call.attention)
    return call.layer, call.x.dtype, given, attention
