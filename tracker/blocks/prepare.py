"""Prepare a model for one measurement: find its blocks, and copy it.

    blocks: given, declared by the config, recognised by name, or guessed (`find`); a forward pass judges guesses (`judge`)
    class token: its position, for `tokens="cls"` where the blocks do not state it (`class_token`); that it is measured by default
        is for `Settings.chosen_tokens` to say
    replica: the copy of the model that runs

Everything else sees the replica alone, whose description states the blocks. That blocks and class token reach the output, where
either is an assumption, is checked after the first call is recorded (`reachability`), and so is that they are the whole chain
(`chain`): where blocks can't be recorded, that says better what is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tracker.blocks.class_token import require_class_token
from tracker.blocks.find import GUESS, choose, confirmed, find_blocks
from tracker.blocks.judge import Verdict, judge
from tracker.model.description import Blocks, Named
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import Batch
from tracker.model.outside import noticing_writes
from tracker.model.proposals import BlocksNotFound
from tracker.model.replica import Replica
from tracker.model.weights import gathering_together
from tracker.model.wrappers import unwrap


@contextmanager
def prepare(
    model: nn.Module,
    blocks: Named | Blocks | None,
    calls: Sequence[Batch],
    device: torch.device,
    dtype: torch.dtype,
    tokens: str | tuple[int, ...] | None = None,
) -> Iterator[Replica]:
    """Yield a replica of a model, with its blocks. Inside, the process is in the state that measuring needs.

    Of a model whose weights are sharded over ranks, all ranks enter and leave together.

    Args:
        blocks: the blocks, an argument of `find_blocks`, or None to find them.
        calls: the forward calls; blocks are confirmed on the first.
        dtype: of the measurement.
        tokens: the tokens that are measured; None: the class token of a model that classifies from it, else the last.

    Raises:
        BlocksNotFound: if no blocks, or several lists of them, are found.
        UsageError: if a class token is to be measured and there is none.
    """
    with (
        gathering_together(model) as gather,  # around all that may fail on one rank alone
        preserve_global_state(device),
        noticing_writes(model),
    ):
        new_replica = partial(Replica, model, dtype=dtype, device=device, gather=gather)
        replica = new_replica(_find(model, blocks, new_replica, calls[0]))
        if tokens == "cls" and replica.description.class_token is None:
            require_class_token(calls)
            # A replica's description stays as it is: another one states the token.
            replica = new_replica(replace(replica.description, class_token=0))
        yield replica


def _find(
    model: nn.Module,
    blocks: Named | Blocks | None,
    new_replica: Callable[[Blocks], Replica],
    batch: Batch,
) -> Blocks:
    def judged(names: Sequence[str]) -> Verdict:
        return judge(new_replica(Blocks(tuple(names), "", include_final_norm=False)), batch)

    if blocks is None:
        return choose(unwrap(model), judged)
    found = find_blocks(model, blocks)
    if found.assumed != GUESS:
        return found
    verdict = judged(found.names)
    if verdict.finding:
        raise BlocksNotFound(
            f"{found.names[0]} to {found.names[-1]} ({found.found_by}) are no chain of blocks: {verdict.finding}."
        )
    return confirmed(found, verdict)
