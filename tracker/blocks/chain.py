"""Check that the blocks that were found are the whole chain.

What gives the first block its input, and what takes the last one's output, was noted in the recorded pass (`StateMap`). If it
is of the class of a block, or adds to the state (`adds`), the blocks are a part of the chain: the error proposes all of it. The
same holds for what comes before or after that. A warning is enough if none of them is of the class of a block, is in the list of
the blocks or moves information between tokens: they are no transformer blocks. Blocks that the caller names may be a part.

Cost: none if no such module is there, as in most models; else one forward pass of a sample, in which each is called 9 to 14
times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.behaviour import TOKENS, call_on, mixed_axes
from tracker.blocks.lists import LISTS
from tracker.common.errors import warn_caller
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound, Proposal
from tracker.model.recording import Recording
from tracker.model.replica import Replica
from tracker.model.state_maps import adds, ends, is_alike, state_given


def check_chain(replica: Replica, recording: Recording, batch: Batch) -> None:
    """Check on a recorded pass that the chain of blocks begins and ends where they do. Call inside `preserve_global_state`.

    Args:
        batch: the forward call that was recorded.

    Raises:
        BlocksNotFound: if a module before the first or after the last block is a block, too.
    """
    blocks = replica.description
    if not blocks.assumed:
        return
    # Dropout and identities lead from a state to itself.
    maps = [m for m in recording.state_maps if not _equal(m.before, m.after)]
    backward = [Step(m.name, m.after, m.before) for m in maps]
    forward = [Step(m.name, m.before, m.after) for m in maps]
    first, last = ends(recording.calls[0].x), ends(recording.calls[-1].y)
    reached = {step.name for step in (*_reached(backward, first), *_reached(forward, last))}
    if not reached:
        return
    modules = {name: replica.module.get_submodule(name) for name in reached}
    # A block by its class needs no trial.
    alike = {name for name, module in modules.items() if is_alike(module, replica.blocks)}
    tried = _tried(replica, batch, reached - alike)
    adding = alike.union(tried)
    # The blocks' own class first, then what holds others rather than what is held, except Sequentials.
    order = sorted(
        adding,
        key=lambda name: (name not in alike, type(modules[name]) is nn.Sequential, name.count(".")),
    )
    before, after = _path(backward, first, order), _path(forward, last, order)
    if not before and not after:
        return
    holders = {name.rpartition(".")[0] for name in blocks.names}
    lists = {name for name in holders if isinstance(replica.module.get_submodule(name), LISTS)}
    found = [f"{before[0]} gives the first one its input"] if before else []
    found += [f"{after[0]} takes the last one's output"] if after else []
    names = [*reversed(before), *blocks.names, *after]
    whole = _proposal(replica.module, names)
    adds_to_it = f"{' and '.join(found)}, and adds to the state as a block does"
    around = [*before, *after]
    in_lists = any(name.rpartition(".")[0] in lists for name in around)
    if not in_lists and not any(name in alike or tried[name] for name in around):
        warn_caller(
            f"{adds_to_it}. It moves no information between tokens and is not measured; to include it:{whole}"
        )
        return
    raise BlocksNotFound(
        f"{blocks.names[0]} to {blocks.names[-1]} ({blocks.found_by}) are not the whole chain of blocks: {adds_to_it}.",
        [whole, _proposal(replica.module, blocks.names)],
    )


@dataclass(frozen=True, eq=False)
class Step:
    """A module that leads from one state to another, forward or backward."""

    name: str
    start: Tensor
    end: Tensor


def _reached(steps: Sequence[Step], state: Tensor) -> list[Step]:
    """Return all steps that begin at a state, or where such a step ends."""
    found, states = [], [state]
    for state in states:  # it grows
        following = [step for step in steps if step not in found and _equal(step.start, state)]
        found += following
        states += [step.end for step in following]
    return found


def _path(steps: Sequence[Step], state: Tensor, order: Sequence[str]) -> list[str]:
    """Return the modules that lead on from a state, the nearest first; of several that begin at one, the first in `order`."""
    names: list[str] = []
    while True:
        following = [
            step
            for step in steps
            if step.name in order and step.name not in names and _equal(step.start, state)
        ]
        if not following:
            return names
        step = min(following, key=lambda step: order.index(step.name))
        names.append(step.name)
        state = step.end


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b), b)


def _tried(replica: Replica, batch: Batch, names: set[str]) -> dict[str, bool]:
    """Return which of the named modules add to the state, in a pass of the first sample, and whether they move information
    between tokens.
    """
    if not names:
        return {}
    first, replica = batch.of_first_sample(), replica.fresh()
    tokens = TOKENS if replica.description.batch_first else 0
    adding: dict[str, bool] = {}
    tried: set[str] = set()

    def leave(name: str, module: nn.Module, args: tuple, keywords: dict, output: Any) -> None:
        x = None if name in tried else state_given(module, args, keywords, output)
        if x is not None:
            tried.add(name)
            if adds(module, args, keywords):
                adding[name] = tokens in mixed_axes(partial(call_on, module, args, keywords), x)

    def ignore(*_: Any) -> None:
        return None

    with replica.stream_blocks(ignore, ignore):
        modules = {name: replica.module.get_submodule(name) for name in names}
        # A projection that starts at zero hides what an untrained block does.
        replica.fill_zeros(part for module in modules.values() for part in module.modules())
        handles = [
            module.register_forward_hook(partial(leave, name), with_kwargs=True)
            for name, module in modules.items()
        ]
        replica.forward(first.arguments, first.keywords)
        for handle in handles:
            handle.remove()
    return adding


def _proposal(model: nn.Module, names: Sequence[str]) -> Proposal:
    """Return the `blocks=` argument for modules: their list, if they are all its modules."""
    container = names[0].rpartition(".")[0]
    entries = [
        f"{container}.{name}".lstrip(".")
        for name, _ in model.get_submodule(container).named_children()
    ]
    classes = "/".join(dict.fromkeys(type(model.get_submodule(name)).__name__ for name in names))
    whole = container and entries == list(names)
    blocks = container if whole else list(names)
    where = container if whole else f"{names[0]} to {names[-1]}"
    return Proposal(repr(blocks), blocks, where, f"{len(names)} x {classes}")
