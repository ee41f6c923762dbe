"""The weights of a training run that are measured: those in training, or those of an averaging callback."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tracker.errors import UsageError
from tracker.lightning_packages import is_lightning

AVERAGING = "callbacks.WeightAveraging"


def check_readable(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> None:
    """Check that the weights can be read during the training.

    Raises:
        UsageError: for averaged weights without an averaging callback, and for weights in flattened pieces.
    """
    if weights == "averaged" and not _before(callback, trainer, AVERAGING):
        raise UsageError(
            "weights='averaged' takes those of a WeightAveraging callback; list one before this CouplingCallback"
        )
    if is_lightning(trainer.strategy, "strategies.FSDPStrategy") or any(
        hasattr(p, "ds_id") for p in module.parameters()
    ):
        raise UsageError(
            f"{type(trainer.strategy).__name__} keeps weights in flattened pieces that can't be read one by one; "
            "shard with ModelParallelStrategy (FSDP2), or train with DDP"
        )


def measured_module(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> nn.Module:
    """Return the training module, or its averaged copy."""
    if weights == "raw":
        return module
    averaged = _before(callback, trainer, AVERAGING)[0]._average_model  # Lightning has no public access
    assert averaged is not None
    return averaged.module


def replaces_raw_weights(callback: Callback, trainer: Trainer) -> bool:
    """Whether averaged weights have replaced the raw ones when `callback.on_train_end` is called."""
    return bool(_before(callback, trainer, AVERAGING, "callbacks.StochasticWeightAveraging"))


def _before(callback: Callback, trainer: Trainer, *names: str) -> list[Any]:
    """Return the callbacks of some of Lightning's classes that Lightning calls before this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks[: callbacks.index(callback)] if is_lightning(other, *names)]
