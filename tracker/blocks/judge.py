"""Judge by a recorded pass whether modules are a chain of blocks.

The pass is recorded as a measurement's is (`tracker.model.recorder`), which refuses modules that are not called, that do not take
and return a state (batch, tokens, width), or that do not take the output of the module before. Each module of a chain of blocks
also moves information between tokens: another value of the first or of the last token changes its output at other tokens. That
tells blocks with attention, whatever their classes are called, from stacks of MLPs.

Parameters that are all zero get other values, because a projection that starts at zero hides what an untrained block does.
Cost: a recorded pass, and each module called three to six times. Memory: the model's weights in the measuring dtype, and the
recording.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tracker.common.errors import UsageError
from tracker.model.inputs import Batch
from tracker.model.proposals import Proposal, between, reason
from tracker.model.random_numbers import noise_like
from tracker.model.recorder import record
from tracker.model.recording import BlockCall
from tracker.model.replica import Replica

TOKENS = 1  # the axis of tokens in a hidden state that is batch first


@dataclass(frozen=True)
class Verdict:
    """What a recorded pass shows of modules that may be the blocks."""

    finding: str  # why they are no chain of blocks; "" if they are one
    # By name, in the order of their first calls: the axes along which each moves information
    axes: Mapping[str, set[int]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The modules in the order of their first calls."""
        return tuple(self.axes)

    @property
    def batch_first(self) -> bool:
        """Whether information moves along the second axis of the states, rather than along the first."""
        return all(TOKENS in axes for axes in self.axes.values())

    def pairs(self) -> list[Proposal]:
        """Propose spans from each module that moves information between tokens to the next, if some modules move none."""
        starts = [f"input of {name}" for name, axes in self.axes.items() if axes]
        if not 1 < len(starts) < len(self.axes):
            return []
        contents = f"{len(starts)} blocks; each module that moves no information between tokens belongs to the one before it"
        return [between([*starts, f"output of {self.names[-1]}"], contents)]


def judge(replica: Replica, batch: Batch) -> Verdict:
    """Judge the blocks of a replica by a forward call. Call inside `preserve_global_state`.

    Raises:
        FloatingPointError: if a block takes or returns a value that is not finite.
    """
    with replica.materialize(replica.module):
        replica.fill_zeros(replica.module.modules())
        try:
            calls = first_calls(replica, batch)
        except UsageError as error:
            return Verdict(reason(error))
        axes = {name: mixed_axes(call) for name, call in calls.items()}
    still = [name for name, moves in axes.items() if not moves]
    finding = ""
    if still and all(max(call.x.shape[:2]) < 2 for call in calls.values()):
        finding = "not decided: with one token, nothing moves between tokens; give an input of at least two"
    elif still:
        number = "they" if len(still) == len(axes) else f"{len(still)} of them"
        finding = f"{number} move no information between tokens"
    return Verdict(finding, axes)


def first_calls(replica: Replica, batch: Batch) -> dict[str, BlockCall]:
    """Record a forward call; return the first call of each block, by name.

    Raises:
        UsageError: if the blocks are not called one after another, on states.
    """
    calls: dict[str, BlockCall] = {}
    for call in record(replica, batch.arguments, batch.keywords).calls:
        calls.setdefault(call.name, call)
    return calls


def mixed_axes(call: BlockCall) -> set[int]:
    """Return the axes along which another value at the first or the last index changes the output at other indices.

    The block has its weights.
    """
    mixed = set()
    call = call.on_device()
    plain = call(call.x)
    for axis in (TOKENS, 0):
        n = call.x.shape[axis]
        for index in (0, n - 1):
            if axis not in mixed and n > 1:
                other = call.x.clone()
                other.select(axis, index).add_(noise_like(other.select(axis, index)))
                rest = [i for i in range(n) if i != index]
                at = (slice(None), rest) if axis == TOKENS else (rest,)
                # Exactly: a layer scale of 1e-6 moves little, and rows that do not depend on each other stay as they are.
                if not torch.equal(call(other)[at], plain[at]):
                    mixed.add(axis)
    return mixed
