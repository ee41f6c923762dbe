"""The bar of a training on a terminal: loss, test accuracy, and the time left of the whole training."""

import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import RichProgressBar

from tracker.measures.cost import duration
from vit.pace import Pace

SECONDS_BETWEEN_READINGS = 1.0  # of the loss, for which a GPU is waited for


class Bar(RichProgressBar):
    """Lightning's bar of an epoch, with the mean loss of the epoch so far, the last test accuracy, and the time left."""

    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace
        self.shown: dict[str, Any] = {}
        self.read = -SECONDS_BETWEEN_READINGS

    def get_metrics(self, trainer: lightning.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return what is shown beside the bar."""
        if time.monotonic() - self.read >= SECONDS_BETWEEN_READINGS:
            self.shown = self._metrics(trainer, pl_module)
            self.read = time.monotonic()
        return self.shown

    def _metrics(self, trainer: lightning.Trainer, module: Any) -> dict[str, Any]:
        shown, mean = {}, module.train_loss
        # The values of this process: `compute` would gather those of all, and only the first process has a bar.
        if mean.update_count:
            shown["loss"] = float(mean.mean_value / mean.weight)
        tested = [row["test/accuracy"] for row in module.history if "test/accuracy" in row]
        if tested:
            shown["accuracy"] = tested[-1]
        left = self.pace.left(trainer.global_step)
        return shown if left is None else {**shown, "left": duration(left)}
