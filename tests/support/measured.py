"""Jacobians as the tracker finds them, block by block, for comparisons with brute force."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import find_blocks
from tracker.jacobians.rows import CheckResults, Jacobians
from tracker.jacobians.slicing import Rows
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.recording import BlockCall
from tracker.model.replica import Replica

CPU = torch.device("cpu")


def recorded(
    model: nn.Module,
    inputs: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
    final_norm: bool = False,
) -> tuple[Replica, list[list[BlockCall]]]:
    """Return a replica of a model, and the calls of its blocks in the forward pass of each input.

    Args:
        final_norm: whether the last block includes the final norm.
    """
    replica, passes = Replica(model, find_blocks(model), dtype, CPU), []
    for x in inputs:
        (batch,) = batches(model, x.to(dtype) if x.is_floating_point() else x, None, None)
        recording = record(replica, batch.arguments, batch.keywords)
        recording = recording.with_final_norm() if final_norm else recording
        passes.append([*recording.calls[:-1], recording.normed_last or recording.calls[-1]])
    return replica, passes


def jacobians_at(
    model: nn.Module,
    inputs: Tensor,
    rows: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float64,
    final_norm: bool = False,
) -> list[tuple[Tensor, CheckResults]]:
    """Return the Jacobians of every block at some rows, (rows, d, d), and their checks.

    Args:
        rows: of (sample, token), or of (sample, source, token).
        final_norm: whether the last block includes the final norm.
    """
    sample, *source, token = (torch.tensor(index) for index in zip(*rows, strict=True))
    with preserve_global_state(CPU):
        replica, (calls,) = recorded(model, [inputs], dtype, final_norm)
        jacobians = Jacobians(replica)
        return [jacobians([(call, Rows(sample, token, *source))])[0] for call in calls]


def detached(row_attention: Callable[..., Tensor], planted: str) -> Callable[..., Tensor]:
    """Return attention at single rows that gives the right output and no derivative by its keys, or values."""

    def attention(attend: Any, query: Tensor, key: Tensor, value: Tensor, frozen: Any) -> Tensor:
        key, value = (key.detach(), value) if planted == "key" else (key, value.detach())
        return row_attention(attend, query, key, value, frozen)

    return attention
