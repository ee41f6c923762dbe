"""Measure the probe on the ranks of a training run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tracker.blocks.find import Blocks
from tracker.capture.inputs import Batch
from tracker.device_errors import is_allocation_failure
from tracker.measurement import measure_samples
from tracker.measures.dataset import Sample
from tracker.measures.memory import release_memory
from tracker.measures.settings import LEAST_MEMORY_BUDGET, Settings
from tracker.training import probe as probes
from tracker.training.ranks import Ranks

ATTEMPTS = 3  # with the whole memory budget, half of it and a quarter


def measure_probe(
    ranks: Ranks,
    together: Callable[..., list[Sample]],
    model: nn.Module,
    blocks: Blocks,
    probe: Any,
    tokenizer: Any,
    settings: Settings,
    device: torch.device,
    unmixed: set[Any],
) -> list[Sample]:
    """Measure the samples of a probe, shared by the ranks; every rank returns all samples in their order.

    Args:
        together: `ranks.together`, for this measurement.
        unmixed: the blocks that earlier measurements found not to mix samples; this one adds to it.

    Raises:
        Failure: on every rank, if any rank fails.
        Exception: as `Ranks.together`.
    """
    # All ranks gather sharded weights together, block by block: each measures all samples.
    shared = not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def measure_own() -> list[Sample]:
        if shared and ranks.rank >= probes.sample_count(probe):
            return []
        part = probes.select_samples(probe, slice(ranks.rank, None, ranks.count)) if shared else probe
        calls = probes.forward_calls(model, part, tokenizer)
        return _measure_with_less_memory(model, blocks, calls, settings, device, unmixed)

    samples = together(measure_own, gathers=not shared)
    return probes.interleave(ranks.gather(samples)) if shared else samples


def _measure_with_less_memory(
    model: nn.Module,
    blocks: Blocks,
    calls: Sequence[Batch],
    settings: Settings,
    device: torch.device,
    unmixed: set[Any],
) -> list[Sample]:
    """Measure; if memory runs out, again with half the memory budget, and a quarter."""
    message = ""
    for attempt in range(ATTEMPTS):
        smaller = replace(settings, memory_budget=max(LEAST_MEMORY_BUDGET, settings.memory_budget >> attempt))
        try:
            return measure_samples(model, blocks, calls, smaller, device, unmixed)
        except (RuntimeError, MemoryError) as error:
            if not is_allocation_failure(error):
                raise
            message = str(error)
        release_memory(device)
    raise torch.OutOfMemoryError(message)
