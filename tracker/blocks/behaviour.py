"""Find blocks by what modules do in a forward pass, where no attention is recognised by name.

A list is a chain of blocks if each of its modules

- takes and returns a tensor of one shape, (batch, tokens, width);
- takes the output of the module before it, unchanged;
- moves information between tokens: another value of the first or of the last token changes its output at other tokens.

The last condition tells blocks with attention, whatever their classes are called, from stacks of MLPs. In the pass,
parameters that are all zero get other values, because a projection that starts at zero hides what an untrained block does.
Cost: one forward pass in which each module of a list is called three to six times. Memory: the model's weights in the
measuring dtype, and two hidden states for each list.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import CHECKED, describe
from tracker.blocks.lists import candidate_runs, classes_of, nothing_found
from tracker.blocks.towers import ModuleRun, find_runs, proposals
from tracker.model.description import Blocks
from tracker.model.hidden_state import bind_arguments, check_finite, hidden_state
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound, Proposal
from tracker.model.random_numbers import noise_like
from tracker.model.replica import Replica

TOKENS = 1  # the axis of tokens in a hidden state that is batch first


@dataclass
class Observed:
    """What a forward pass showed of the modules of one list."""

    run: ModuleRun
    # By name, in the order of their first calls: the axes along which each moves information.
    mixed: dict[str, set[int]] = field(default_factory=dict)
    fault: str = ""  # why the list is no chain of hidden states
    last: Tensor | None = None  # the output of the module that ran last
    tokens: int = 0  # the larger one of batch and tokens

    def finding(self) -> str:
        """Say why these modules are no chain of blocks; empty if they are one."""
        if self.fault:
            return self.fault
        if not self.mixed:
            return "the forward pass does not call them"
        if len(self.mixed) < len(self.run.names):
            return f"the forward pass calls {len(self.mixed)} of them"
        still = [name for name, axes in self.mixed.items() if not axes]
        if not still:
            return ""
        if self.tokens < 2:
            return "not decided: with one token, nothing moves between tokens; give an input of at least two"
        if len(still) == len(self.mixed):
            return "they move no information between tokens"
        return f"{len(still)} of them move no information between tokens"

    def pairs(self) -> list[Proposal]:
        """Return spans from each module that moves information between tokens to the next, if some modules move none."""
        starts = [f"input of {name}" for name, axes in self.mixed.items() if axes]
        names = self.run.names
        if self.fault or not 1 < len(starts) < len(names) == len(self.mixed):
            return []
        boundaries = [*starts, f"output of {names[-1]}"]
        contents = f"{len(starts)} blocks; each module that moves no information between tokens belongs to the one before it"
        return [
            Proposal(repr(boundaries), boundaries, f"{boundaries[0]} to {boundaries[-1]}", contents)
        ]


def choose_blocks(
    model: nn.Module, new_replica: Callable[[Blocks], Replica], batch: Batch
) -> Blocks:
    """Return the only chain of blocks that a forward pass shows. Call inside `preserve_global_state`.

    Args:
        model: a model without wrappers in which no attention is recognised by name.
        new_replica: makes the replica for the pass.
        batch: the forward call.

    Raises:
        BlocksNotFound: if no list is such a chain, or several are.
        FloatingPointError: if a module of a list takes or returns a value that is not finite.
    """
    runs = candidate_runs(model)
    observed = _observe(new_replica(Blocks((), "")), runs, batch) if runs else []
    findings = [seen.finding() for seen in observed]
    chains = [seen for seen in observed if not seen.finding()]
    # Of a list and a part of it, the whole
    chains = [
        seen for seen in chains if not any(set(seen.mixed) < set(other.mixed) for other in chains)
    ]
    if not chains:
        raise nothing_found(
            model, runs, findings, [proposal for seen in observed for proposal in seen.pairs()]
        )
    if len(chains) > 1:
        raise BlocksNotFound(
            f"{len(chains)} lists of blocks found in {type(model).__name__} by a forward pass: the modules of each move "
            "information between tokens.",
            proposals(model, [seen.run for seen in chains]),
        )
    (seen,) = chains
    how = f"the only list of modules of {classes_of(seen.run)} that move information between tokens in a forward pass, {seen.run}"
    blocks = describe(model, find_runs(model), list(seen.mixed), how, ("blocks",))
    # Batch first, if information moves along the second axis of the states, rather than along the first.
    return replace(blocks, batch_first=all(TOKENS in axes for axes in seen.mixed.values()))


def confirm_blocks(
    assumed: Blocks, model: nn.Module, new_replica: Callable[[Blocks], Replica], batch: Batch
) -> Blocks:
    """Return the blocks assumed from the module tree, laid out as a forward pass shows. Arguments as in `choose_blocks`.

    Raises:
        BlocksNotFound: if the forward pass shows no chain of blocks, or another one.
    """
    seen = choose_blocks(model, new_replica, batch)
    if seen.names != assumed.names:
        names = list(seen.names)
        where = f"{names[0]} to {names[-1]}"
        raise BlocksNotFound(
            f"{assumed.names[0]} to {assumed.names[-1]} ({assumed.found_by}) are not the blocks: a forward pass shows {where}.",
            [Proposal(repr(names), names, where, seen.found_by)],
        )
    return replace(assumed, batch_first=seen.batch_first)


def confirm_list(
    assumed: Blocks, new_replica: Callable[[Blocks], Replica], batch: Batch
) -> tuple[Blocks | None, str]:
    """Return the modules of one list, of several classes, if a forward pass shows a chain of blocks; else None and why.

    Arguments as in `confirm_blocks`.
    """
    run = ModuleRun("", assumed.names, "", False, len(assumed.names))
    (seen,) = _observe(new_replica(Blocks((), "")), [run], batch)
    if finding := seen.finding():
        return None, finding
    how = f"{assumed.found_by.removesuffix(CHECKED)}, which a forward pass shows to be a chain of blocks"
    batch_first = all(TOKENS in axes for axes in seen.mixed.values())
    return replace(
        assumed, names=tuple(seen.mixed), found_by=how, batch_first=batch_first, assumed=("blocks",)
    ), ""


def _observe(replica: Replica, runs: Sequence[ModuleRun], batch: Batch) -> list[Observed]:
    """Run the model once and watch the modules of every list."""
    observer, observed = _Observer(), [Observed(run) for run in runs]
    with ExitStack() as stack:
        stack.enter_context(replica.materialize(replica.module))
        replica.fill_zeros(replica.module.modules())
        for seen in observed:
            for name in seen.run.names:
                module = replica.module.get_submodule(name)
                enter = partial(observer.enter, name, seen)
                leave = partial(observer.leave, name, seen)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        replica.forward(batch.arguments, batch.keywords)
    return observed


class _Observer:
    """The hooks on the modules of all lists."""

    def __init__(self) -> None:
        self.repeating = False  # whether a module is being called again
        # By the run and name of a module, which may be in several: a copy of the state, as a module may work on it in place.
        self.given: dict[tuple[int, str], Tensor] = {}

    def enter(
        self, name: str, seen: Observed, module: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        """Record the state that a module takes, and whether the module before it returned that."""
        if self.repeating or seen.fault:
            return
        x = next(iter(bind_arguments(module, args, kwargs).arguments.values()), None)
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            seen.fault = f"they take {shape}, not (batch, tokens, width)"
            return
        if seen.last is None:
            check_finite(x, f"the model, before {name},")
        if seen.last is not None and not (x.shape == seen.last.shape and torch.equal(x, seen.last)):
            seen.fault = "the model changes the state between them"
        else:
            self.given[id(seen), name] = x.clone()

    def leave(
        self, name: str, seen: Observed, module: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> None:
        """Record what a module returns, and along which axes it moves information."""
        x = None if self.repeating else self.given.pop((id(seen), name), None)
        if x is None:
            return
        y = hidden_state(output)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            seen.fault = f"they map {tuple(x.shape)} to {shape}"
            return
        check_finite(y, f"block {name}")
        seen.last, seen.tokens = y.clone(), max(x.shape[:2])
        if name not in seen.mixed:
            self.repeating = True
            try:
                seen.mixed[name] = mixed_axes(partial(call_on, module, args, kwargs), x)
            finally:
                self.repeating = False


def mixed_axes(block: Callable[[Tensor], Tensor], x: Tensor) -> set[int]:
    """Return the axes along which another value at the first or the last index changes the output at other indices."""
    plain = block(x)
    mixed = set()
    for axis in (TOKENS, 0):
        n = x.shape[axis]
        for index in (0, n - 1):
            if axis not in mixed and n > 1:
                other = x.clone()
                other.select(axis, index).add_(noise_like(other.select(axis, index)))
                rest = [i for i in range(n) if i != index]
                at = (slice(None), rest) if axis == TOKENS else (rest,)
                # Exactly: a layer scale of 1e-6 moves little, and rows that do not depend on each other stay as they are.
                if not torch.equal(block(other)[at], plain[at]):
                    mixed.add(axis)
    return mixed


def call_on(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> Tensor:
    """Call a module with another hidden state."""
    bound = bind_arguments(module, args, kwargs)
    bound.arguments[next(iter(bound.arguments))] = x.clone()
    return hidden_state(module(*bound.args, **bound.kwargs))
