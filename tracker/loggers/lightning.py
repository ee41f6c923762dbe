"""The loggers of a Lightning run as `protocol.Logger`."""

from typing import Any

from tracker.common.lightning_packages import is_lightning
from tracker.loggers.protocol import Row
from tracker.loggers.wandb import AXIS, define_metrics


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
