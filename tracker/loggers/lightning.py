"""The loggers of a training program as `protocol.Logger`, and Lightning's classes under both names of its package.

Classes of `lightning.pytorch` and `pytorch_lightning` are not related. They are looked up in the modules that the program has
imported, so that the package that it does not use is not imported.
"""

import sys
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from tracker.common.errors import UsageError
from tracker.loggers.protocol import FunctionLogger, Logger, Row
from tracker.loggers.wandb import OpenRun

PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


def is_lightning(value: Any, *names: str) -> bool:
    """Whether a value is of one of Lightning's classes, named within the package, such as "loggers.WandbLogger".

    >>> is_lightning(object(), "Trainer", "loggers.WandbLogger")
    False
    """
    return isinstance(value, classes(*names))


def classes(*names: str) -> tuple[type, ...]:
    """Return the classes of some names, of each package that is imported and has them."""
    paths = [f"{package}.{name}".rpartition(".") for package in PACKAGES for name in names]
    kinds = (getattr(sys.modules.get(module), name, None) for module, _, name in paths)
    return tuple(kind for kind in kinds if kind is not None)


@dataclass
class TensorBoard(Logger):
    """Writes to a `SummaryWriter`.

    Args:
        prefix: put before the name of each metric, such as "val/".
    """

    writer: Any
    prefix: str

    def images(self, row: Row) -> None:
        """Write the heat maps of a step."""
        for name, picture in row.heatmaps().items():
            self.writer.add_image(self.prefix + name, picture, row.step, dataformats="HWC")

    def log(self, row: Row) -> None:
        """Write the scalars of a step."""
        for name, value in row.numbers(self.prefix).items():
            self.writer.add_scalar(name, value, row.step)


def log_metrics(logger: Any, metrics: dict[str, float], step: int) -> None:
    """Log the scalars of a step to a logger of either package of Lightning, or of Fabric, that takes numbers and no pictures."""
    to_csv = is_lightning(logger, "loggers.CSVLogger")
    if to_csv:
        # It numbers rows by those that it holds, where the program leaves their step out.
        writer, logger = copy(logger.experiment), copy(logger)
        writer.metrics, logger._experiment = [], writer
    logger.log_metrics(metrics, step=step)
    if to_csv:
        logger.save()


def logger_of(target: Any, prefix: str = "") -> Logger:
    """Return the logger that sends rows to what a training program has: a W&B run, a logger of Lightning, a writer of
    TensorBoard, or a function.

    Raises:
        UsageError: for anything else.
    """
    if is_lightning(target, "loggers.WandbLogger", "loggers.TensorBoardLogger"):
        # Lightning has no public access
        own = f"{target._prefix}{target.LOGGER_JOIN_CHAR}" if target._prefix else ""
        target, prefix = target.experiment, own + prefix
    # By what its class has, since importing W&B takes seconds
    if hasattr(type(target), "define_metric"):
        return OpenRun(target, prefix)
    if hasattr(target, "log_metrics"):
        return FunctionLogger(partial(log_metrics, target), prefix)
    if hasattr(target, "add_scalar"):
        return TensorBoard(target, prefix)
    if callable(target):
        return FunctionLogger(target, prefix)
    raise UsageError(
        f"log_to={target!r}; give the run that wandb.init returns, a logger of Lightning, a SummaryWriter of TensorBoard, or a "
        "function (metrics, step)"
    )
