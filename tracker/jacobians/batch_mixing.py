"""Check that a block does not mix the samples of a batch: its Jacobians would depend on what else is in the batch.

For sets K of samples, two checks that the outputs of K do not depend on the states of the other samples:

- derivative: J^T u, for a random u on the samples of K, is exactly zero on the others;
- value: with other states for the other samples, the outputs of K are the same. This detects dependence without a derivative,
  such as experts of limited capacity, which tokens of another sample can fill.

The derivative is checked for every ordered pair of samples, the values for two halves of the batch. A block's code would mix
samples on any sequences, so both use short windows of all samples if the block's arguments can be cut (`slicing`). Cost: about
log2(B) + 2 cotangents at once, and three forward passes.
"""

from dataclasses import replace
from itertools import combinations, count, islice
from math import comb

import torch
from jaxtyping import Bool
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

NARROWEST = 4  # tokens of a window


def find_mixing(call: BlockCall, rows: Rows) -> str:
    """Describe how the samples of the call mix; return "" if they do not. Windows end at the requested rows if possible."""
    B, n, _ = call.x.shape
    width = max(NARROWEST, 2 * WINDOW // B)
    if n > width:
        last = [int(max(rows.token[rows.sample == b].tolist(), default=n - 1)) for b in range(B)]
        try:
            # Without the recorded attention: unless it is plain self-attention, it can't be cut into windows.
            windows, _ = cut_windows(replace(call, attention=[]), Rows(torch.arange(B), torch.tensor(last)), width)
            with slicing_errors():
                return _mixing_by_derivative(windows) or _mixing_by_value(windows)
        except NotSliceable:  # the block needs its whole sequence
            pass
    with replay_errors(call):
        return _mixing_by_derivative(call) or _mixing_by_value(call)


def separating_sets(B: int) -> Bool[Tensor, "m B"]:
    """Return as few sets K of samples as possible such that for any two samples some K contains the first, not the second.

    Sample b belongs to the sets of the b-th half of all m: of two different halves, neither contains the other (Sperner 1928).
    """
    m = next(m for m in count(1) if comb(m, m // 2) >= B)
    sets = torch.zeros(m, B, dtype=torch.bool)
    for b, half in enumerate(islice(combinations(range(m), m // 2), B)):
        sets[list(half), b] = True
    return sets


def _mixing_by_derivative(call: BlockCall) -> str:
    shape = call.x.shape
    with sdpa_kernel(SDPBackend.MATH):
        block = linearize(lambda x: call(x.view(shape)).flatten(0, 1), call.x.flatten(0, 1))
    u, sets = standard_normal(shape, call.x), separating_sets(len(call.x))
    (masks,) = to_device(u.device, sets)
    gradients = block.pullback((u * masks[..., None, None]).flatten(1, 2)).unflatten(1, shape[:2])
    # NaN is 0 times the infinite derivative of a row that attends to nothing: no mixing.
    found = gradients.nan_to_num(0, 0, 0).abs().amax((2, 3)).cpu()
    for K, largest in zip(sets, found, strict=True):
        leaked = largest.masked_fill(K, 0)
        if leaked.any():
            size = float(leaked.max() / largest[K].max())
            return (
                f"outputs of {_format_samples(K)} have a derivative with respect to "
                f"{_format_samples(leaked > 0)} (relative size {size:.1e})"
            )
    return ""


def _mixing_by_value(call: BlockCall) -> str:
    x = call.x
    noise = standard_normal(x.shape, x, seed=1)
    half = torch.arange(len(x)) < len(x) // 2
    sets = torch.stack([half, ~half])
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
                    f"outputs of {_format_samples(sets[i])} change with the states of the others "
                    f"(relative error {found:.1e})"
                )
    return ""


def _format_samples(chosen: Bool[Tensor, " B"]) -> str:
    numbers = [str(b) for b in chosen.nonzero().squeeze(-1).tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {', '.join(numbers[:4])}{', ...' * (len(numbers) > 4)}"
