"""The weights of a training run that are measured: those in training, or those of an averaging callback."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from tracker.errors import UsageError


def check_readable(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> None:
    """Check that the weights can be read during the training.

    Raises:
        UsageError: for averaged weights without an averaging callback, and for weights in flattened pieces.
    """
    if weights == "averaged" and not _before(callback, trainer, WeightAveraging):
        raise UsageError(
            "weights='averaged' takes those of a WeightAveraging callback; list one before this CouplingCallback"
        )
    if isinstance(trainer.strategy, FSDPStrategy) or any(hasattr(p, "ds_id") for p in module.parameters()):
        raise UsageError(
            f"{type(trainer.strategy).__name__} keeps weights in flattened pieces that can't be read one by one; "
            "shard with ModelParallelStrategy (FSDP2), or train with DDP"
        )


def measured_module(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> nn.Module:
    """Return the training module, or its averaged copy."""
    if weights == "raw":
        return module
    averaged = _before(callback, trainer, WeightAveraging)[0]._average_model  # Lightning has no public access
    assert averaged is not None
    return averaged.module


def replaces_raw_weights(callback: Callback, trainer: Trainer) -> bool:
    """Whether averaged weights have replaced the raw ones when `callback.on_train_end` is called."""
    return bool(_before(callback, trainer, (WeightAveraging, StochasticWeightAveraging)))


def _before(callback: Callback, trainer: Trainer, classes: Any) -> list[Any]:
    """Return the callbacks of some classes that Lightning calls before this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks[: callbacks.index(callback)] if isinstance(other, classes)]
