"""How long a training takes, from the steps that were timed, and the bar that shows it.

    seconds left = steps * step + ends of epochs * epoch + tests * test + measurements * measurement

of those still to come. A test that was not timed yet is estimated from a step: a forward pass is a third of one.
"""

import time
from dataclasses import dataclass
from math import inf
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import RichProgressBar

from tracker import CouplingCallback
from tracker.common.text import duration
from tracker.training import schedule as schedules
from vit.cells import write
from vit.data import Data
from vit.recipe import Recipe

WARM_UP, TIMED = 2, 20  # steps
SECONDS_BETWEEN_WRITES = 10.0
SECONDS_BETWEEN_READINGS = 1.0  # of the loss, for which a GPU is waited for


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, of the end of an epoch (checkpoint and files), of a test and of a measurement."""

    step: float
    epoch: float
    test: float
    measurement: float

    def seconds_left(self, recipe: Recipe, images: int, step: int = 0) -> float:
        """Return the seconds of a training after a step.

        Args:
            images: number of training images.
        """
        per_epoch = recipe.steps_per_epoch(images)
        steps, done, every = recipe.epochs * per_epoch, step // per_epoch, recipe.test_every or recipe.epochs
        measurements = 0
        if recipe.schedule is not None:
            due = schedules.choose(**recipe.schedule)
            measurements = (step == 0) + sum(due(s) or s == steps for s in range(step + 1, steps + 1))
        return (
            (steps - step) * self.step
            + (recipe.epochs - done) * self.epoch
            + (recipe.epochs // every - done // every) * self.test
            + measurements * self.measurement
        )


class Pace(lightning.Callback):
    """Times the parts of a training; listed after the callback that measures.

    Writes CELL/pace.json, from which a grid estimates what is left: `whole` and `left`, seconds of the whole training and of the
    rest at the time `written`.

    Args:
        limit: seconds of steps after which the training stops, as a dry run does.
    """

    def __init__(self, recipe: Recipe, data: Data, coupling: CouplingCallback | None, limit: float = inf):
        self.recipe, self.images, self.tested = recipe, len(data.train), len(data.test)
        self.coupling, self.limit = coupling, limit
        self.seconds: dict[str, float] = dict.fromkeys(("start", "step", "epoch", "test"), 0.0)
        self.times = dict.fromkeys(self.seconds, 0)
        self.batches = 0  # of this process
        self.since, self.measuring = time.perf_counter(), 0.0
        self.written = 0.0

    @property
    def parts(self) -> Parts | None:
        """The seconds of each part, once a step is timed."""
        if not self.times["step"]:
            return None
        step, epoch, test = (self.seconds[name] / max(self.times[name], 1) for name in ("step", "epoch", "test"))
        if not self.times["test"]:
            test = step / 3 * self.tested / self.recipe.batch_size
        # The first measurement, before the first step, also makes checks whose results are kept.
        return Parts(step, epoch, test, self.coupling.run.overhead.last if self.coupling else 0.0)

    def left(self, step: int) -> float | None:
        """Return the seconds of this training after a step, if they can be estimated."""
        parts = self.parts
        return parts and parts.seconds_left(self.recipe, self.images, step)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin; `measuring` counts from the start of a run."""
        self.measuring = 0.0
        self._lap("start")

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count what lies between two epochs."""
        self._lap("epoch" if self.batches else None)
        self._write(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step; the first ones allocate memory and choose kernels."""
        self.batches += 1
        if self.batches in (WARM_UP, WARM_UP + TIMED) and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self._lap("step" if self.batches > WARM_UP else None)
        if self.batches == WARM_UP + TIMED:
            self._write(trainer)
        if self.seconds["step"] > self.limit:
            trainer.should_stop = True

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin to count a test."""
        self._lap(None)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count a test."""
        self._lap("test")

    def _lap(self, part: str | None) -> None:
        """Count the time since the last lap, without that of measuring."""
        now, measuring = time.perf_counter(), self.coupling.run.overhead.total if self.coupling else 0.0
        if part is not None:
            self.seconds[part] += now - self.since - (measuring - self.measuring)
            self.times[part] += 1
        self.since, self.measuring = now, measuring

    def _write(self, trainer: lightning.Trainer) -> None:
        now, left, whole = time.time(), self.left(trainer.global_step), self.left(0)
        if left is None or whole is None or self.times["step"] < TIMED:
            return
        if trainer.is_global_zero and now - self.written >= SECONDS_BETWEEN_WRITES:
            self.written = now
            content = {"written": now, "whole": self.seconds["start"] + whole, "left": left}
            write(self.recipe.directory, "pace", content)


class Bar(RichProgressBar):
    """Lightning's bar of an epoch, with the mean loss of the epoch so far, the last test accuracy, and the time left."""

    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace
        self.shown: dict[str, Any] = {}
        self.read = -SECONDS_BETWEEN_READINGS

    def get_metrics(self, trainer: lightning.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return what is shown beside the bar."""
        if time.monotonic() - self.read < SECONDS_BETWEEN_READINGS:
            return self.shown
        self.read, self.shown = time.monotonic(), {}
        loss = pl_module.train_loss
        # The values of this process: `compute` would gather those of all, and only the first process has a bar.
        if loss.update_count:
            self.shown["loss"] = float(loss.mean_value / loss.weight)
        accuracies = [row["test/accuracy"] for row in pl_module.history if "test/accuracy" in row]
        if accuracies:
            self.shown["accuracy"] = accuracies[-1]
        left = self.pace.left(trainer.global_step)
        if left is not None:
            self.shown["left"] = duration(left)
        return self.shown
