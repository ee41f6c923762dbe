"""Check that a block does not mix the samples of a batch: its Jacobians would depend on what else is in the batch.

For sets K of samples, two checks that the outputs of K do not depend on the states of the other samples:

- derivative: J^T u, for a random u on the samples of K, is exactly zero on the others;
- value: with other states for the other samples, the outputs of K are the same. This detects dependence without a derivative,
  such as experts of limited capacity, which tokens of another sample can fill.

A block's code would mix samples in any batch and on any sequences, so both checks use windows of two samples if the block's
arguments can be cut (`slicing`). Otherwise they use the whole batch: for every binary digit of the sample's index, K is the
set of samples with digit 0 and the set with digit 1, so that every ordered pair of samples is separated once. Cost:
2 log2(B) products and as many forward passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.capture.recording import BlockCall, recording_kernels
from tracker.jacobians.checks import WINDOW
from tracker.jacobians.restriction import replay_errors, slicing_errors
from tracker.jacobians.slicing import NotSliceable, Rows, cut_windows
from tracker.linalg.comparison import relative_error, tolerance
from tracker.linalg.jacobian import linearize
from tracker.linalg.precision import Roundings
from tracker.linalg.transfer import read, standard_normal, to_device


def find_mixing(call: BlockCall, rows: Rows) -> str:
    """Describe how the samples of the call mix; return "" if they do not. Windows end at the requested rows if possible."""
    B, n, _ = call.x.shape
    width = min(WINDOW, n)
    if B > 2 or n > 2 * WINDOW:
        two = [0, B - 1]
        last = [rows.token[rows.sample == b] for b in two]
        at = Rows(torch.tensor(two), torch.tensor([int(t.max()) if len(t) else n - 1 for t in last]))
        try:
            # Without the recorded attention: unless it is plain self-attention, it can't be cut into windows.
            window, _ = cut_windows(replace(call, attention=[]), at, width)
            with slicing_errors():
                return _mixing_by_derivative(window, two) or _mixing_by_value(window, two)
        except NotSliceable:  # the block needs its whole sequence
            pass
    samples = list(range(B))
    with replay_errors(call):
        return _mixing_by_derivative(call, samples) or _mixing_by_value(call, samples)


def separating_sets(B: int) -> Iterator[Bool[Tensor, " B"]]:
    """Yield sets K of samples such that for any two samples some K contains the first but not the second."""
    numbers = torch.arange(B)
    for digit in range((B - 1).bit_length()):
        ones = (numbers >> digit & 1).bool()
        yield ones
        yield ~ones


def _mixing_by_derivative(call: BlockCall, samples: Sequence[int]) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH):
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    u = standard_normal(shape, call.x)
    sets = torch.stack(list(separating_sets(len(samples))))

    def largest_entries(K: Tensor) -> Float[Tensor, " B"]:
        """Return the largest derivative of the outputs of K with respect to each sample."""
        found = block.pullback((u * K[:, None, None]).flatten(0, 1)[None]).view(shape)
        # NaN is 0 times the infinite derivative of a row that attends to nothing: no mixing.
        return found.nan_to_num(0, 0, 0).abs().amax((1, 2))

    found = torch.stack([largest_entries(K) for K in to_device(u.device, sets)[0]]).cpu()
    for K, largest in zip(sets, found, strict=True):
        leaked = largest.masked_fill(K, 0)
        if leaked.any():
            size = float(leaked.max() / largest[K].max())
            return (
                f"outputs of {_format_samples(samples, K)} have a derivative with respect to "
                f"{_format_samples(samples, leaked > 0)} (relative size {size:.1e})"
            )
    return ""


def _mixing_by_value(call: BlockCall, samples: Sequence[int]) -> str:
    x = call.x
    noise = standard_normal(x.shape, x, seed=1)
    sets = torch.stack(list(separating_sets(len(samples))))
    masks, members = to_device(x.device, sets)[0][..., None, None], sets.int().argmax(1).tolist()
    with torch.no_grad(), recording_kernels(x.dtype), Roundings() as roundings:
        y = call(x.clone())  # a copy: a block may work in place

        def error(K: Tensor, given: Tensor) -> Tensor:
            # Both are 0, so without error, on the samples outside K.
            f, reference = (torch.where(K, change, 0.0) for change in (call(given) - x, y - x))
            return relative_error(f, reference, y, x.dtype)

        def other_states(K: Tensor, member: int) -> Tensor:
            """Return x with all tokens outside K close to one of K, so that they compete for the same limited capacity."""
            row = x[member, -1]
            return torch.where(K, x, row + 1e-3 * row.square().mean().sqrt() * noise)

        errors = read([error(K, other_states(K, member)) for K, member in zip(masks, members, strict=True)])
        for i, found in enumerate(errors):
            # A block that gives another output on the same states is random, which another check reports.
            if found > tolerance(x.dtype, roundings.seen) and error(masks[i], x.clone()) < found / 2:
                return (
                    f"outputs of {_format_samples(samples, sets[i])} change with the states of the others "
                    f"(relative error {found:.1e})"
                )
    return ""


def _format_samples(samples: Sequence[int], chosen: Bool[Tensor, " B"]) -> str:
    numbers = [str(samples[i]) for i in chosen.nonzero().squeeze(-1).tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
