"""Jacobians as the tracker finds them, block by block, for comparisons with brute force."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import find_blocks
from tracker.jacobians.rows import CheckResults, Jacobians
from tracker.jacobians.slicing import Rows
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.replica import Replica

CPU = torch.device("cpu")


def jacobians_at(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
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
    (batch,) = batches(model, inputs, None, None)
    with preserve_global_state(CPU):
        replica = Replica(model, find_blocks(model), dtype, CPU)
        recording = record(replica, batch.arguments, batch.keywords)
        recording = recording.with_final_norm() if final_norm else recording
        jacobians = Jacobians(replica)
        calls = [*recording.calls[:-1], recording.normed_last or recording.calls[-1]]
        return [jacobians([(call, Rows(sample, token, *source))])[0] for call in calls]
