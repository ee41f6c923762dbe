"""The loggers of a Lightning run as `protocol.Logger`."""

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from tracker.loggers.protocol import Row
from tracker.loggers.wandb import AXIS, define_metrics


class LightningAdapter:
    """A Lightning logger that receives rows: scalars in every logger, pictures in W&B and TensorBoard.

    Args:
        prefix: put before the name of each metric, such as "val/".
    """

    def __init__(self, logger: Logger, prefix: str = ""):
        self.logger, self.prefix = logger, prefix
        self.defined: set[str] = set()  # metrics with an axis in W&B

    def images(self, row: Row) -> None:
        """Log the heat maps of a step, if the logger takes pictures."""
        if not isinstance(self.logger, (WandbLogger, TensorBoardLogger)):
            return
        for name, picture in row.heatmaps().items():
            if isinstance(self.logger, WandbLogger):
                self.logger.log_image(self.prefix + name, [picture], step=row.step)
            else:
                self.logger.experiment.add_image(self.prefix + name, picture, row.step, dataformats="HWC")

    def log(self, row: Row) -> None:
        """Log the scalars of a step; in W&B over the axis of walks, so that both are drawn in one panel."""
        values = {self.prefix + name: value for name, value in {**row.scalars, **row.checkpoint}.items()}
        if isinstance(self.logger, WandbLogger):
            new = row.scalars.keys() - self.defined
            define_metrics(self.logger.experiment, sorted(new), row.headline, self.prefix)
            self.defined |= row.scalars.keys()
            values[AXIS] = row.step
        self.logger.log_metrics(values, step=row.step)

    def finish(self) -> str:
        """Do nothing: Lightning closes its loggers."""
        return ""
