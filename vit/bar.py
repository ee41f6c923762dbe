"""The bar of one training on a terminal."""

import time
from math import inf
from typing import Any

import lightning
from lightning.pytorch.callbacks import RichProgressBar

from tracker.common.text import duration

SECONDS_BETWEEN_READINGS = 1.0  # of the loss, for which a GPU is waited for


class Bar(RichProgressBar):
    """Lightning's bar of an epoch, with the mean loss of the epoch so far, the last test accuracy, and the training's time left.

    The time left is that of a step since the first one, all else that the training does included, times the steps left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Any] = {}
        self.read = -inf
        self.first: tuple[float, int] | None = None  # when the first step of this process ended, and its number

    def get_metrics(self, trainer: lightning.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return what is shown beside the bar; Lightning asks after each step."""
        now, step = time.monotonic(), trainer.global_step
        if self.first is None:
            self.first = now, step
        if now - self.read < SECONDS_BETWEEN_READINGS:
            return self.shown
        self.read, self.shown = now, {}
        loss = pl_module.train_loss
        # The values of this process: `compute` would gather those of all, and only the first process has a bar.
        if loss.update_count:
            self.shown["loss"] = float(loss.mean_value / loss.weight)
        accuracies = [row["test/accuracy"] for row in pl_module.history if "test/accuracy" in row]
        if accuracies:
            self.shown["accuracy"] = accuracies[-1]
        since, first_step = self.first
        if step > first_step:
            seconds_per_step = (now - since) / (step - first_step)
            self.shown["left"] = duration(seconds_per_step * (trainer.estimated_stepping_batches - step))
        return self.shown
