"""Measure the probe on the ranks of a training run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor

from tracker.blocks.find import Blocks
from tracker.capture.inputs import Batch
from tracker.errors import UsageError
from tracker.measurement import measure_samples
from tracker.measures.dataset import Sample
from tracker.measures.settings import Settings
from tracker.training import probe as probes

ATTEMPTS = 3  # with the whole memory budget, half of it and a quarter
ERRORS = (UsageError, FloatingPointError, torch.OutOfMemoryError)


def measure_probe(
    trainer: Trainer, model: nn.Module, blocks: Blocks, probe: Any, tokenizer: Any, settings: Settings
) -> list[Sample]:
    """Measure the samples of a probe, shared by the ranks; every rank returns all samples in their order.

    Raises:
        UsageError, FloatingPointError, torch.OutOfMemoryError: the same error on every rank, if any rank fails.
    """
    rank, ranks, device = trainer.global_rank, trainer.world_size, trainer.strategy.root_device
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        rank, ranks = 0, 1  # all ranks gather sharded weights together, block by block: each measures all samples
    samples, error = [], None
    try:
        if rank < probes.sample_count(probe):
            part = probes.select_samples(probe, slice(rank, None, ranks))
            calls = probes.forward_calls(model, part, tokenizer)
            samples = _measure_with_less_memory(model, blocks, calls, settings, device)
    except ERRORS as caught:
        error = caught
    if ranks > 1:
        parts: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(parts, (samples, error))
        samples = probes.interleave([samples for samples, _ in parts])
        error = next((error for _, error in parts if error is not None), None)
    if error is not None:
        raise error
    return samples


def _measure_with_less_memory(
    model: nn.Module, blocks: Blocks, calls: Sequence[Batch], settings: Settings, device: torch.device
) -> list[Sample]:
    """Measure; if memory runs out, again with half the memory budget, and a quarter."""
    error = torch.OutOfMemoryError()
    for attempt in range(ATTEMPTS):
        smaller = replace(settings, memory_budget=settings.memory_budget >> attempt)
        try:
            return measure_samples(model, blocks, calls, smaller, device)
        except torch.OutOfMemoryError as caught:
            error = caught.with_traceback(None)  # a traceback keeps the tensors of the failed attempt alive
        torch.cuda.empty_cache()
    raise error
