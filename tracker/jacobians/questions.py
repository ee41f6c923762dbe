"""Ask a model that is cut at the boundaries of its blocks (`CutModel`) about each block, at one row of each sample that runs.

Each question is a pass in which all blocks begin at their recorded states:

    backward   the values at all rows, and J^T u along every path, in two backward passes: from the rows of half of the samples,
               then of the others. Each must leave the states of the other half without a gradient
    moved      the outputs at the rows of the second half of the samples, with the states moved there
    crowded    the outputs of the second half, where all states of the first half are near copies of a row of theirs, which
               compete with it for any limited capacity

Numbers that are returned are in float64 on the CPU, read once for each pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.jacobians.cut_model import CutModel
from tracker.jacobians.judge import move_weights, moved, norm
from tracker.linalg.jacobian import GradientsStayOn
from tracker.linalg.precision import Roundings
from tracker.linalg.transfer import moved as on_one_device
from tracker.linalg.transfer import to_device
from tracker.model.attention import OriginalAttention, intercept_attention

NEAR = 1e-3  # how far near copies of a row are apart, relative to it


@dataclass(frozen=True)
class Question:
    """What is asked about a block."""

    tokens: Sequence[int]  # of each sample that runs, the row
    u: Float[Tensor, "B d"]


@dataclass
class Backward:
    """What a pass with gradients says of a block."""

    bytes: int  # of the numbers that the block computes with
    moving: bool  # whether its attention has a mask that depends on its state
    x: Float[Tensor, "B d"]
    y: Float[Tensor, "B d"]
    u: Float[Tensor, "B d"]  # rounded as it was in the pass
    gradient: Float[Tensor, "B d"]  # u^T d(block) / dx along every path
    # |u^T d(block) / dx_1| at the row, along what was computed from the first state x_1 before block 1 began
    beside: Float[Tensor, " B"]
    leak: Float[Tensor, ""]  # the gradient by other samples, relative to J^T u
    values: Float[Tensor, "3 B n"]  # at all rows: |f - the recorded f|, |f| recorded, |output|

    @property
    def JTu(self) -> Float[Tensor, "B d"]:
        """The gradient without that of the identity."""
        return self.gradient - self.u


@dataclass(frozen=True)
class Disturbance:
    """Moves of states, cotangents and the weights of a copy by roundings of what each block computes with."""

    bytes: Mapping[int, int]  # by layer
    generator: torch.Generator

    def of(self, l: int, t: Tensor) -> Tensor:
        """Return numbers of block l, moved."""
        return moved(t, self.bytes[l], self.generator)

    def load(self, l: int, parts: Iterable[nn.Module]) -> None:
        """Move the weights of block l, which these parts hold."""
        move_weights(parts, self.bytes[l], self.generator)


def ask_backward(
    model: CutModel,
    questions: Mapping[int, Question],
    gradients: bool = True,
    disturbance: Disturbance | None = None,
) -> dict[int, Backward]:
    """Run a model, and the backward passes of some blocks from their outputs at rows, weighted by u, to their states.

    Args:
        questions: by layer.
        gradients: whether to run backward passes; else J^T u is u.
        disturbance: of a copy.
    """
    leaf = torch.empty(0)
    # Of each block, the fields of `Backward` except the first two
    found: dict[int, tuple[Tensor, ...]] = {}
    least: dict[int, int] = {}
    moving: set[int] = set()
    half = len(model.asked) // 2

    def begin(l: int, state: Tensor) -> Tensor:
        nonlocal leaf
        leaf, roundings.least = model.recorded(l, state), state.itemsize
        if disturbance is not None and l + 1 in questions:
            leaf = disturbance.of(l + 1, leaf)
        # The model may work in place, which a leaf does not allow
        return leaf.requires_grad_(gradients).clone()

    def see(attention: OriginalAttention) -> Any:
        mask = attention.mask
        if isinstance(mask, Tensor) and mask.requires_grad and model.ended >= 0:
            (own,) = torch.autograd.grad(mask.sum(), leaf, retain_graph=True, allow_unused=True)
            if own is not None:
                moving.add(model.ended + 1)
        return attention()

    def end(l: int, y: Tensor) -> None:
        if l not in questions:
            return
        least[l] = min(y.itemsize, roundings.least)
        tokens, u = questions[l].tokens, questions[l].u.to(y.dtype)
        at = model.rows(tokens, y)
        if disturbance is not None:
            u = disturbance.of(l, u)
        (cotangent,) = to_device(y.device, u)
        own, leak = cotangent, y.new_zeros(())
        beside = y.new_zeros(len(tokens), dtype=torch.float64)
        if gradients:
            weighted = (y[at] * cotangent).sum(-1)
            parts = (slice(half), slice(half, None))[not half :]
            to_states, beside = model.gradients([weighted[p].sum() for p in parts], leaf, at)
            own = torch.cat([to_states[0][:half], to_states[-1][half:]])[at]
            if half:
                leak = _leak(own - cotangent, to_states, half)
        x, y = leaf.detach(), y.detach()
        f = model.recorded(l, y, torch.float64) - model.recorded(l - 1, y, torch.float64)
        values = torch.stack([norm(y.double() - x.double() - f), norm(f), norm(y)])
        found[l] = (x[at], y[at], cotangent, own, beside, leak, values)

    with ExitStack() as stack:
        roundings = stack.enter_context(Roundings())
        if disturbance is not None:
            model.loaded = disturbance.load
            stack.callback(setattr, model, "loaded", lambda *_: None)
        if gradients:
            for context in (torch.enable_grad(), GradientsStayOn(), intercept_attention(see)):
                stack.enter_context(context)
        else:
            stack.enter_context(torch.no_grad())
        model.run(begin, end, max(questions))
    stacked = [
        torch.stack(of_all).detach().double() for of_all in zip(*found.values(), strict=True)
    ]
    tensors = on_one_device(stacked, "cpu")
    return {
        l: Backward(least[l], l in moving, *of_one)
        for l, *of_one in zip(found, *tensors, strict=True)
    }


def _leak(
    JTu: Float[Tensor, "B d"], to_states: Sequence[Float[Tensor, "B n d"]], half: int
) -> Float[Tensor, ""]:
    """Return the largest gradient by the other half of the samples, relative to the largest of J^T u."""
    of_others = [to_states[0][half:].abs().amax(), to_states[1][:half].abs().amax()]
    of_own = [JTu[:half].abs().amax(), JTu[half:].abs().amax()]
    # NaN is 0 times the infinite derivative of a row that attends to nothing: no mixing.
    return (torch.stack(of_others) / torch.stack(of_own)).nan_to_num(0, torch.inf).amax()


def ask_crowded(
    model: CutModel,
    tokens: Mapping[int, Sequence[int]],
    sample: int,
    generator: torch.Generator,
) -> dict[int, Float[Tensor, "3 B n"]]:
    """Run a model with near copies of a row as the states of the first half of the samples.

    Args:
        tokens: the rows, by layer.
        sample: whose row it is, one of the second half.
        generator: of the distances between the copies.

    Returns:
        The values of each block, as in `Backward`, without errors in the first half.
    """
    half = len(model.asked) // 2
    values: dict[int, Tensor] = {}

    def begin(l: int, found: Tensor) -> Tensor:
        x = model.recorded(l, found)
        if l + 1 in tokens:
            row = x[sample, tokens[l + 1][sample]]
            noise = torch.randn(x[:half].shape, generator=generator)
            (noise,) = to_device(x.device, noise.to(x.dtype))
            x[:half] = row + NEAR * row.square().mean().sqrt() * noise
        return x

    def end(l: int, y: Tensor) -> None:
        before, recorded = (model.recorded(k, y, torch.float64) for k in (l - 1, l))
        values[l] = torch.stack(
            [norm(y.double() - recorded), norm(recorded - before), norm(recorded)]
        )
        values[l][:, :half] = 0

    with torch.no_grad():
        model.run(begin, end, model.L)
    return dict(zip(values, plain(torch.stack([*values.values()])), strict=True))


def ask_moved(
    model: CutModel,
    tokens: Mapping[int, Sequence[int]],
    moves: Mapping[int, Float[Tensor, "B d"]],
) -> dict[int, Float[Tensor, "b d"]]:
    """Return the outputs of some blocks at the rows of the second half of the samples, with their states moved there.

    Args:
        tokens: the rows, by layer.
        moves: by layer; those of the first half of the samples are not made.
    """
    ends, half = {}, len(model.asked) // 2
    if not moves:
        return {}

    def begin(l: int, found: Tensor) -> Tensor:
        x = model.recorded(l, found)
        if (of_rows := moves.get(l + 1)) is not None:
            at = model.rows(tokens[l + 1], x)
            at = at[0][half:], at[1][half:]
            x[at] += to_device(x.device, of_rows[half:].to(x.dtype))[0]
        return x

    def end(l: int, y: Tensor) -> None:
        if l in moves:
            ends[l] = y[model.rows(tokens[l], y)][half:]

    with torch.no_grad():
        model.run(begin, end, max(moves))
    return dict(zip(ends, plain(torch.stack([*ends.values()])), strict=True))


def plain(t: Tensor) -> Tensor:
    """Return numbers in float64 on the CPU."""
    return t.detach().cpu().double()
