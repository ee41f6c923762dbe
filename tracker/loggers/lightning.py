"""The loggers of a Lightning run as `protocol.Logger`, and Lightning's classes under both names of its package.

Classes of `lightning.pytorch` and `pytorch_lightning` are not related. They are looked up in the modules that the program has
imported, so that the package that it does not use is not imported.
"""

import sys
from typing import Any

from tracker.loggers.protocol import Row
from tracker.loggers.wandb import AXIS, define_metrics

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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


class LightningAdapter:
    """A Lightning logger that receives rows: scalars in every logger, pictures in W&B and TensorBoard.

    Args:
        logger: of either package of Lightning.
        prefix: put before the name of each metric, such as "val/".
    """

    def __init__(self, logger: Any, prefix: str = ""):
        self.logger, self.prefix = logger, prefix
        self.to_wandb = is_lightning(logger, "loggers.WandbLogger")
        self.to_tensorboard = is_lightning(logger, "loggers.TensorBoardLogger")
        self.defined: set[str] = set()  # metrics with an axis in W&B

    def images(self, row: Row) -> None:
        """Log the heat maps of a step, if the logger takes pictures."""
        if not (self.to_wandb or self.to_tensorboard):
            return
        for name, picture in row.heatmaps().items():
            if self.to_wandb:
                self.logger.log_image(self.prefix + name, [picture], step=row.step)
            else:
                self.logger.experiment.add_image(self.prefix + name, picture, row.step, dataformats="HWC")

    def log(self, row: Row) -> None:
        """Log the scalars of a step; in W&B over the axis of walks, so that both are drawn in one panel."""
        values = {self.prefix + name: value for name, value in {**row.scalars, **row.checkpoint}.items()}
        if self.to_wandb:
            new = row.scalars.keys() - self.defined
            define_metrics(self.logger.experiment, sorted(new), row.headline, self.prefix)
            self.defined |= row.scalars.keys()
            values[AXIS] = row.step
        self.logger.log_metrics(values, step=row.step)

    def finish(self) -> str:
        """Do nothing: Lightning closes its loggers."""
        return ""
