"""Whether a block mixes the samples of a batch, which none may: a Jacobian would depend on what else is in the batch.

Two tests, each of which must find that the outputs of some samples K do not depend on the states of the others:

- derivative: J^T u, for a random u on the samples of K, is exactly zero on the others;
- value: with other states for the others, the outputs of K are the same. This finds what has no derivative, such as
  experts of a limited capacity, which a token of another sample can fill.

What mixes samples is the block's code, and it would do so on any sequences: so both are made on windows of two of the
samples, where the block's arguments can be cut (`proof`). Else on the whole batch, where K is, for every binary digit of a
sample's number, the samples that have a 0 there and those that have a 1: every sample is once in K while any other is not.
That costs 2 log2(B) products and as many forward passes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.capture.recording import BlockCall, recording_kernels
from tracker.jacobians.checks import WINDOW, tolerance
from tracker.jacobians.restriction import replay_errors_named, slicing_errors_caught
from tracker.jacobians.slicing import NotSliceable, Rows, cut_windows
from tracker.linalg.comparison import relative_error
from tracker.linalg.jacobian import linearize
from tracker.linalg.precision import Roundings


def find_mixing(call: BlockCall, rows: Rows) -> str:
    """How the samples of the call mix; nothing where they do not. Windows end at rows asked for where they can."""
    B, n, _ = call.x.shape
    if n > 2 * WINDOW:
        two = torch.tensor([0, B - 1], device=rows.token.device)
        last = [rows.token[rows.sample == b] for b in two]
        last = torch.stack([t.max() if len(t) else two.new_tensor(n - 1) for t in last])
        try:
            # No attention: what a block not known to be plain self-attention recorded may not be cut like this.
            window, _ = cut_windows(replace(call, attention=[]), Rows(two, last), WINDOW)
            with slicing_errors_caught():
                return _by_derivative(window, two) or _by_value(window, two)
        except NotSliceable:  # the block wants its whole sequence
            pass
    samples = torch.arange(B, device=call.x.device)
    with replay_errors_named(call):
        return _by_derivative(call, samples) or _by_value(call, samples)


def separating_sets(B: int, device: torch.device | None = None) -> Iterator[Bool[Tensor, " B"]]:
    """Sets K of samples such that for any two samples one K holds the first without the second."""
    numbers = torch.arange(B, device=device)
    for digit in range((B - 1).bit_length()):
        ones = (numbers >> digit & 1).bool()
        yield ones
        yield ~ones


def _by_derivative(call: BlockCall, samples: Tensor) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH):
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(call.x)
    for kept in separating_sets(len(u), u.device):
        found = block.pullback((u * kept[:, None, None]).flatten(0, 1)[None]).view(shape)
        # 0 times the infinite derivative of a row that sees nothing is not mixing.
        leaked = found[~kept].nan_to_num(0, 0, 0).abs()
        if leaked.any():
            size = float(leaked.max() / found[kept].abs().max())
            by = samples[~kept][leaked.flatten(1).any(1)]
            return f"outputs of {_named(samples[kept])} have a derivative by {_named(by)} (relative size {size:.1e})"
    return ""


def _by_value(call: BlockCall, samples: Tensor) -> str:
    x = call.x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    with torch.no_grad(), recording_kernels(x.dtype), Roundings() as roundings:
        y = call(x.clone())  # a copy: a block may work in place
        for kept in separating_sets(len(x), x.device):
            # All other tokens like one that is kept: where room is limited, they take it.
            row = x[kept][0, -1]
            others = row + 1e-3 * row.square().mean().sqrt() * noise
            error = _error_on(kept, x, call(torch.where(kept[:, None, None], x, others)), y)
            # A block that gives another output on the very same states is random, which is for others to say.
            if error > tolerance(x.dtype, roundings.seen) and _error_on(kept, x, call(x.clone()), y) < error / 2:
                return f"outputs of {_named(samples[kept])} change with the states of the others (relative error {error:.1e})"
    return ""


def _error_on(kept: Tensor, x: Tensor, found: Tensor, y: Tensor) -> float:
    return relative_error(found[kept] - x[kept], y[kept] - x[kept], y[kept], x.dtype)


def _named(samples: Tensor) -> str:
    numbers = [str(b) for b in samples.tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
