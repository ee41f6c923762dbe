"""Check that the blocks that were found are the whole chain.

What gives the first block its input, and what takes the last one's output, was noted in the recorded pass (`StateMap`). If it
is of the class of a block, or adds to the state (`adds`), the blocks are a part of the chain: the error proposes all of it. The
same holds for what comes before or after that. A warning is enough if none of them is of the class of a block, is in the list of
the blocks or moves information between tokens: they are no transformer blocks. Blocks that the caller names may be a part.

Cost: none if no such module is there, as in most models; else a recorded pass of a sample for each, which is called 9 to 14 times
more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tracker.blocks.candidates import LISTS, parent, proposal
from tracker.blocks.judge import TOKENS, first_calls, mixed_axes
from tracker.common.errors import UsageError, warn_caller
from tracker.model.hidden_state import same_state
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound
from tracker.model.recording import Recording
from tracker.model.replica import Replica
from tracker.model.state_maps import StateMap, adds, ends, is_alike


def check_chain(replica: Replica, recording: Recording, batch: Batch) -> None:
    """Check on a recorded pass that the chain of blocks begins and ends where they do. Call inside `preserve_global_state`.

    Args:
        batch: the forward call that was recorded.

    Raises:
        BlocksNotFound: if a module before the first or after the last block is a block, too.
    """
    blocks, model = replica.description, replica.module
    if not blocks.assumed:
        return
    # Dropout and identities lead from a state to itself.
    maps = [m for m in recording.state_maps if not same_state(m.before, m.after)]
    backward = [StateMap(m.name, m.after, m.before) for m in maps]
    first, last = ends(recording.calls[0].x), ends(recording.calls[-1].y)
    around = _Surroundings(replica, batch.of_first_sample())
    before = around.beyond(backward, first, lambda names: [*reversed(names), *blocks.names])
    after = around.beyond(maps, last, lambda names: [*blocks.names, *names])
    if not around.moving:
        return
    found = [f"{before[0]} gives the first one its input"] if before else []
    found += [f"{after[0]} takes the last one's output"] if after else []
    adds_to_it = f"{' and '.join(found)}, and adds to the state as a block does"
    whole = proposal(model, [*reversed(before), *blocks.names, *after])
    holders = set(map(parent, blocks.names))
    lists = [name for name in holders if isinstance(model.get_submodule(name), LISTS)]
    if not any(moves or parent(name) in lists for name, moves in around.moving.items()):
        warn_caller(
            f"{adds_to_it}. It moves no information between tokens and is not measured; to include it:{whole}"
        )
        return
    raise BlocksNotFound(
        f"{blocks.names[0]} to {blocks.names[-1]} ({blocks.found_by}) are not the whole chain of blocks: {adds_to_it}.",
        [whole, proposal(model, blocks.names)],
    )


@dataclass
class _Surroundings:
    """The modules around the blocks, tried on a sample."""

    replica: Replica
    batch: Batch
    # Of those that belong to the chain: whether they are blocks as surely as those that move information between tokens
    moving: dict[str, bool] = field(default_factory=dict)

    def beyond(
        self, steps: Sequence[StateMap], state: Tensor, chain: Callable[[list[str]], list[str]]
    ) -> list[str]:
        """Return the modules that lead on from a state and belong to the chain, the nearest first.

        Args:
            chain: of the blocks and such modules.
        """
        names: list[str] = []
        while True:
            following = [s for s in steps if s.name not in names and same_state(s.before, state)]
            following.sort(key=self.order)
            step = next((s for s in following if self.adds(s.name, chain([*names, s.name]))), None)
            if step is None:
                return names
            names.append(step.name)
            state = step.after

    def order(self, step: StateMap) -> tuple[bool, bool, int]:
        """Sort the blocks' own class first, then what holds others rather than what is held, except Sequentials."""
        module = self.replica.module.get_submodule(step.name)
        of_class = is_alike(module, self.replica.blocks)
        return not of_class, type(module) is nn.Sequential, step.name.count(".")

    def adds(self, name: str, chain: Sequence[str]) -> bool:
        """Whether a module at an end of a chain belongs to it: it adds to the state, or is of the class of a block."""
        if is_alike(self.replica.module.get_submodule(name), self.replica.blocks):
            self.moving[name] = True
            return True
        longer = replace(self.replica.description, names=tuple(chain), include_final_norm=False)
        tried = self.replica.fresh(longer)
        module = tried.module.get_submodule(name)
        # Its weights throughout, as the model may use them outside of its call
        with tried.materialize(module):
            # A projection that starts at zero hides what an untrained block does.
            tried.fill_zeros(module.modules())
            try:
                call = first_calls(tried, self.batch)[name]
            except (UsageError, FloatingPointError):
                return False
            call = call.on_device()
            belongs = adds(call, call.x)
            if belongs:
                self.moving[name] = TOKENS in mixed_axes(call)
        return belongs
