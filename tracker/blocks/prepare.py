"""Prepare a model for one measurement.

    blocks: given, declared by the config, recognised by name and confirmed by a forward pass where that is a guess, or found by
        a forward pass alone (`find`, `behaviour`)
    class token: its position, for `tokens="cls"` where the blocks do not state it; that it is measured by default is for
        `Settings.chosen_tokens` to say
    replica: the copy of the model that runs

Everything else sees the result alone: the blocks as they are, the forward calls, and the replica. That blocks and class token
reach the output, where either is an assumption, is checked after the first call is recorded (`Prepared.check_reachability`):
where blocks can't be recorded, that says better what is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tracker.blocks.behaviour import choose_blocks, confirm_blocks
from tracker.blocks.class_token import with_class_token
from tracker.blocks.find import Named, find_blocks, recognises_blocks
from tracker.blocks.reachability import check_reachability
from tracker.model.description import Blocks
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import Batch
from tracker.model.replica import Replica
from tracker.model.weights import gathering_together


@dataclass(frozen=True)
class Prepared:
    """A model whose blocks are known, and what it is measured on.

    Attributes:
        model: the caller's model, which is only read.
        blocks: its blocks, with a class token if that is measured.
        calls: the forward calls.
        replica: the copy that runs.
        new_replica: makes another one.
        class_token_by_default: whether the class token is measured because the model has one, not because the caller chose it.
    """

    model: nn.Module
    blocks: Blocks
    calls: Sequence[Batch]
    replica: Replica
    new_replica: Callable[[], Replica]
    class_token_by_default: bool

    def check_reachability(self) -> None:
        """Check on the first call that blocks and class token reach the output, as `reachability.check_reachability`."""
        check_reachability(self.blocks, self.new_replica, self.calls[0], self.class_token_by_default)


@contextmanager
def prepare(
    model: nn.Module,
    blocks: Named | Blocks | None,
    calls: Sequence[Batch],
    device: torch.device,
    dtype: torch.dtype,
    tokens: str | tuple[int, ...] | None = None,
) -> Iterator[Prepared]:
    """Prepare a model; inside the context the process is in the state that measuring needs, and restored on exit.

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
    with preserve_global_state(device), gathering_together(model) as gather:
        new_replica = partial(Replica, model, dtype=dtype, device=device, gather=gather)
        model_blocks = _find(model, blocks, new_replica, calls[0])
        if tokens == "cls":
            model_blocks = with_class_token(model_blocks, calls, partial(new_replica, model_blocks))
        of_blocks = partial(new_replica, model_blocks)
        yield Prepared(model, model_blocks, calls, of_blocks(), of_blocks, class_token_by_default=tokens is None)


def _find(
    model: nn.Module, blocks: Named | Blocks | None, new_replica: Callable[[Blocks], Replica], batch: Batch
) -> Blocks:
    if blocks is None and not recognises_blocks(model):
        return choose_blocks(model, new_replica, batch)
    model_blocks = find_blocks(model, blocks)
    return (
        confirm_blocks(model_blocks, model, new_replica, batch) if "attention" in model_blocks.assumed else model_blocks
    )
