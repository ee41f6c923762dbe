"""How long a training takes: the seconds of its parts, from the steps that were timed.

    seconds left = steps * step + ends of epochs * epoch + tests * test + measurements * measurement

of those still to come. A test that was not timed yet is estimated from a step: a forward pass is a third of one.
"""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import lightning
import torch

from tracker.training import schedule as schedules
from vit.cells import write
from vit.recipe import Recipe

if TYPE_CHECKING:
    from tracker import CouplingCallback
    from vit.data import Data

WARM_UP, TIMED = 2, 20  # steps
SECONDS_BETWEEN_WRITES = 10.0


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, of the end of an epoch (checkpoint and files), of a test and of a measurement."""

    step: float
    epoch: float
    test: float
    measurement: float

    def left(self, recipe: Recipe, images: int, step: int = 0) -> dict[str, tuple[int, float]]:
        """Return how often each part comes after a step, and its seconds each time.

        Args:
            images: number of training images.
        """
        per_epoch = recipe.steps_per_epoch(images)
        last, done, every = recipe.epochs * per_epoch, step // per_epoch, recipe.test_every or recipe.epochs
        return {
            "step": (last - step, self.step),
            "epoch": (recipe.epochs - done, self.epoch),
            "test": (recipe.epochs // every - done // every, self.test),
            "measurement": (measurements(recipe, images, step), self.measurement),
        }

    def seconds_left(self, recipe: Recipe, images: int, step: int = 0) -> float:
        """Return the seconds of a training after a step."""
        return sum(count * seconds for count, seconds in self.left(recipe, images, step).values())


def measurements(recipe: Recipe, images: int, step: int = 0) -> int:
    """Return how often coupling is measured after a step; from step 0 on, how often in a whole training."""
    if recipe.schedule is None:
        return 0
    last, due = recipe.epochs * recipe.steps_per_epoch(images), schedules.choose(**recipe.schedule)
    return (step == 0) + sum(due(s) or s == last for s in range(step + 1, last + 1))


class Pace(lightning.Callback):
    """Times the parts of a training; listed after the callback that measures.

    Writes CELL/pace.json, from which a grid estimates what is left: `whole` and `left`, seconds of the whole training and of the
    rest at the time `written`; `memory` and `of_memory`, bytes of the GPU, the latter 0 without one.
    """

    def __init__(self, recipe: Recipe, data: "Data", coupling: "CouplingCallback | None", writes: bool = True):
        self.recipe, self.images, self.tested = recipe, len(data.train), len(data.test)
        self.coupling, self.writes = coupling, writes
        self.seconds: dict[str, float] = dict.fromkeys(("start", "step", "epoch", "test"), 0.0)
        self.times = dict.fromkeys(self.seconds, 0)
        self.batches = 0  # of this process
        self.since, self.measuring = time.perf_counter(), 0.0
        self.written = 0.0

    @property
    def parts(self) -> Parts | None:
        """The seconds of each part, once `TIMED` steps, or all of them, are timed."""
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
        parts, now = self.parts, time.time()
        if not self.writes or not trainer.is_global_zero or now - self.written < SECONDS_BETWEEN_WRITES:
            return
        if parts is None or self.times["step"] < TIMED:
            return
        self.written = now
        left = parts.seconds_left(self.recipe, self.images, trainer.global_step)
        whole = self.seconds["start"] + parts.seconds_left(self.recipe, self.images)
        memory, of_memory = memory_use(trainer.strategy.root_device)
        sizes = {"memory": memory, "of_memory": of_memory}
        write(self.recipe.directory, "pace", {"written": now, "whole": whole, "left": left, **sizes, **asdict(parts)})


def memory_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process has reserved on a GPU, at most so far, and those of the GPU; zeros elsewhere."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
