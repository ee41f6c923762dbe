"""Prepare a model for one measurement: find its blocks, and copy it.

    blocks: given, declared by the config, recognised by name and confirmed by a forward pass where that is a guess, or found by
        a forward pass alone (`find`, `behaviour`)
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

from tracker.blocks.behaviour import choose_blocks, confirm_blocks, confirm_list
from tracker.blocks.class_token import require_class_token
from tracker.blocks.find import MIXED, find_blocks, recognised_blocks
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
        preserve_global_state(device),
        noticing_writes(model),
        gathering_together(model) as gather,
    ):
        new_replica = partial(Replica, model, dtype=dtype, device=device, gather=gather)
        replica = new_replica(_find(model, blocks, new_replica, calls[0]))
        if tokens == "cls" and replica.description.class_token is None:
            require_class_token(replica, calls)
            # A replica's description stays as it is: another one states the token.
            replica = new_replica(replace(replica.description, class_token=0))
        yield replica


def _find(
    model: nn.Module,
    blocks: Named | Blocks | None,
    new_replica: Callable[[Blocks], Replica],
    batch: Batch,
) -> Blocks:
    tree = unwrap(model)
    found = recognised_blocks(tree) if blocks is None else find_blocks(model, blocks)
    if found is not None and found.assumed == MIXED:
        whole, finding = confirm_list(found, new_replica, batch)
        if whole is not None:
            return whole
        # The caller asked for this list; otherwise the runs of one class in it are tried.
        if blocks is not None:
            raise BlocksNotFound(
                f"{found.names[0]} to {found.names[-1]} ({found.found_by}) are no chain of blocks: {finding}."
            )
        found = recognised_blocks(tree, mixed_lists=False)
    if found is None:
        return choose_blocks(tree, new_replica, batch)
    return (
        confirm_blocks(found, tree, new_replica, batch) if "attention" in found.assumed else found
    )
