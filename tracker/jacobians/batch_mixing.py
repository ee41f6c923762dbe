"""Check that a block does not mix the samples of a batch: its Jacobians would depend on what else is in the batch.

For sets K of samples, two checks that the outputs of K do not depend on the states of the other samples:

- derivative: J^T u, for a random u on the samples of K, is exactly zero on the others;
- value: with other states for the other samples, the outputs of K are the same. This detects dependence without a derivative,
  such as experts of limited capacity, which tokens of another sample can fill.

A block's code would mix samples on any sequences, so both checks use windows of two samples if the block's arguments can be
cut (`slicing`). Otherwise they use the whole batch: for every binary digit of the sample's index, K is the set of samples
with digit 0 and the set with digit 1, so that every ordered pair of samples is separated once. Cost: 2 log2(B) products and
as many forward passes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.capture.recording import BlockCall, recording_kernels
from tracker.jacobians.checks import WINDOW, tolerance
from tracker.jacobians.restriction import replay_errors, slicing_errors
from tracker.jacobians.slicing import NotSliceable, Rows, cut_windows
from tracker.linalg.comparison import relative_error
from tracker.linalg.jacobian import linearize
from tracker.linalg.precision import Roundings


def find_mixing(call: BlockCall, rows: Rows) -> str:
    """Describe how the samples of the call mix; return "" if they do not. Windows end at the requested rows if possible."""
    B, n, _ = call.x.shape
    if n > 2 * WINDOW:
        two = torch.tensor([0, B - 1], device=rows.token.device)
        last = [rows.token[rows.sample == b] for b in two]
        last = torch.stack([t.max() if len(t) else two.new_tensor(n - 1) for t in last])
        try:
            # Without the recorded attention: unless it is plain self-attention, it can't be cut into windows.
            window, _ = cut_windows(replace(call, attention=[]), Rows(two, last), WINDOW)
            with slicing_errors():
                return _mixing_by_derivative(window, two) or _mixing_by_value(window, two)
        except NotSliceable:  # the block needs its whole sequence
            pass
    samples = torch.arange(B, device=call.x.device)
    with replay_errors(call):
        return _mixing_by_derivative(call, samples) or _mixing_by_value(call, samples)


def separating_sets(B: int, device: torch.device | None = None) -> Iterator[Bool[Tensor, " B"]]:
    """Yield sets K of samples such that for any two samples some K contains the first but not the second."""
    numbers = torch.arange(B, device=device)
    for digit in range((B - 1).bit_length()):
        ones = (numbers >> digit & 1).bool()
        yield ones
        yield ~ones


def _mixing_by_derivative(call: BlockCall, samples: Tensor) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH):
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(call.x)
    for in_K in separating_sets(len(u), u.device):
        found = block.pullback((u * in_K[:, None, None]).flatten(0, 1)[None]).view(shape)
        # NaN is 0 times the infinite derivative of a row that attends to nothing: no mixing.
        leaked = found[~in_K].nan_to_num(0, 0, 0).abs()
        if leaked.any():
            size = float(leaked.max() / found[in_K].abs().max())
            by = samples[~in_K][leaked.flatten(1).any(1)]
            return (
                f"outputs of {_format_samples(samples[in_K])} have a derivative with respect to {_format_samples(by)} "
                f"(relative size {size:.1e})"
            )
    return ""


def _mixing_by_value(call: BlockCall, samples: Tensor) -> str:
    x = call.x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    with torch.no_grad(), recording_kernels(x.dtype), Roundings() as roundings:
        y = call(x.clone())  # a copy: a block may work in place
        for in_K in separating_sets(len(x), x.device):
            # All other tokens close to one of K, so that they compete for the same limited capacity.
            row = x[in_K][0, -1]
            others = row + 1e-3 * row.square().mean().sqrt() * noise
            error = _error_on(in_K, x, call(torch.where(in_K[:, None, None], x, others)), y)
            # A block that gives another output on the same states is random, which another check reports.
            if error > tolerance(x.dtype, roundings.seen) and _error_on(in_K, x, call(x.clone()), y) < error / 2:
                return (
                    f"outputs of {_format_samples(samples[in_K])} change with the states of the others "
                    f"(relative error {error:.1e})"
                )
    return ""


def _error_on(in_K: Tensor, x: Tensor, found: Tensor, y: Tensor) -> float:
    return relative_error(found[in_K] - x[in_K], y[in_K] - x[in_K], y[in_K], x.dtype)


def _format_samples(samples: Tensor) -> str:
    numbers = [str(b) for b in samples.tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
