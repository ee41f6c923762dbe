"""Whether a block mixes the samples of a batch, which none may: a Jacobian would depend on what else is in the batch.

Two tests, each of which must find that the outputs of some samples K do not depend on the states of the others:

- derivative: J^T u, for a random u on the samples of K, is exactly zero on the others;
- value: with other states for the others, the outputs of K are the same. This finds what has no derivative, such as
  experts of a limited capacity, which a token of another sample can fill.

K is, for every binary digit of a sample's number, the samples that have a 0 there and those that have a 1: so every sample
is once in K while any other is not. It costs 2 log2(B) products and as many forward passes of a batch; where the block's
arguments can be cut, of windows of the sequences (`proof`).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.arguments import NotSliceable, Rows, window_of
from tracker.jacobian import linearize
from tracker.linear import FrozenLinear
from tracker.precision import Roundings
from tracker.proof import WINDOW, relative_error, tolerance
from tracker.recording import BlockCall
from tracker.restriction import run_again, single_rows


def mixing(call: BlockCall, rows: Rows) -> str:
    """How the samples of the call mix; nothing where they do not. The windows end at the rows asked for, or last in the
    sequences of other samples.
    """
    B, n, _ = call.x.shape
    if n > 2 * WINDOW:
        last = torch.full((B,), n - 1, device=call.x.device)
        last.index_reduce_(0, rows.sample, rows.token, "amax", include_self=False)
        try:
            # No attention: what a block not known to be plain self-attention recorded may not be cut like this.
            window, _ = window_of(replace(call, attention=[]), Rows(torch.arange(B, device=call.x.device), last), WINDOW)
            with single_rows():
                return _by_derivative(window) or _by_value(window)
        except NotSliceable:  # the block wants its whole sequence
            pass
    with run_again(call):
        return _by_derivative(call) or _by_value(call)


def halves(B: int, device: torch.device | None = None) -> Iterator[Bool[Tensor, " B"]]:
    """Sets K of samples such that for any two samples one K holds the first without the second."""
    numbers = torch.arange(B, device=device)
    for digit in range((B - 1).bit_length()):
        ones = (numbers >> digit & 1).bool()
        yield ones
        yield ~ones


def _by_derivative(call: BlockCall) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH):
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(call.x)
    for kept in halves(len(u), u.device):
        found = block.pullback((u * kept[:, None, None]).flatten(0, 1)[None]).view(shape)
        # 0 times the infinite derivative of a row that sees nothing is not mixing.
        leaked = found[~kept].nan_to_num(0, 0, 0).abs()
        if leaked.any():
            size = float(leaked.max() / found[kept].abs().max())
            by = (~kept).nonzero()[leaked.flatten(1).any(1)]
            return (
                f"outputs of {_named(kept)} have a derivative by the states of {_named(by)} (relative size {size:.1e})"
            )
    return ""


def _by_value(call: BlockCall) -> str:
    x = call.x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    others = x + noise * x.square().mean((1, 2), keepdim=True).sqrt()
    with torch.no_grad(), FrozenLinear(), Roundings() as roundings:
        y = call(x.clone())  # a copy: a block may work in place
        for kept in halves(len(x), x.device):
            error = _error_on(kept, x, call(torch.where(kept[:, None, None], x, others)), y)
            # A block that gives another output on the very same states is random, which is for others to say.
            if error > tolerance(x.dtype, roundings.seen) and _error_on(kept, x, call(x.clone()), y) < error / 2:
                return f"outputs of {_named(kept)} change with the states of the others (relative error {error:.1e})"
    return ""


def _error_on(kept: Tensor, x: Tensor, found: Tensor, y: Tensor) -> float:
    return relative_error(found[kept] - x[kept], y[kept] - x[kept], y[kept], x.dtype)


def _named(samples: Tensor) -> str:
    numbers = [str(int(b)) for b in (samples.nonzero() if samples.dtype == torch.bool else samples)]
    return f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
