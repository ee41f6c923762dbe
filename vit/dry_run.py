"""What a grid would take, from a few batches of one training and one measurement; what they write is removed."""

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch

import tracker
from checkpoints.nano import quiet_lightning
from tracker.measures.cost import duration, entry, size
from tracker.training import schedule as schedules
from vit.cells import read
from vit.data import Data
from vit.loaders import Batches
from vit.module import Classifier
from vit.recipe import Recipe
from vit.training import make_trainer

WARM_UP, TIMED = 2, 5  # batches


@dataclass(frozen=True)
class Trial:
    """Seconds and bytes of one cell's parts."""

    batch: float
    validation: float  # of the whole test split
    measurement: float
    memory: int  # peak of the process, or of its GPU
    checkpoint: int

    def seconds(self, recipe: Recipe, images: int) -> float:
        """Return the seconds of one training, less the epochs that are finished."""
        epochs = recipe.epochs - len(read(recipe.directory, "history") or ())
        steps = epochs * recipe.steps_per_epoch(images)
        share = epochs / recipe.epochs
        return steps * self.batch + epochs * self.validation + share * measurements(recipe, images) * self.measurement


class _Clock(lightning.Callback):
    """Times batches, and stops the training after enough."""

    def __init__(self):
        self.seconds: list[float] = []
        self.since = 0.0

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start to time."""
        self.since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Time a batch."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.since = now
        trainer.should_stop = len(self.seconds) >= WARM_UP + TIMED


def describe(recipes: Sequence[Recipe], missing: Sequence[Recipe], data: Data, jobs: int | None) -> str:
    """Return what training the missing cells would take.

    Args:
        jobs: number of cells that are trained at the same time; None if only a cluster knows.
    """
    lines = [
        ("dry run", "nothing is trained, and nothing is written"),
        ("cells", f"{len(missing)} to train, {len(recipes) - len(missing)} done"),
    ]
    if missing:
        lines += _costs(missing, try_cell(missing[0], data), len(data.train), jobs)
    return "\n".join(entry(*line) for line in lines)


def _costs(missing: Sequence[Recipe], trial: Trial, images: int, jobs: int | None) -> list[tuple[str, str]]:
    recipe, together = missing[0], min(jobs or 1, len(missing))
    by_cell = sorted((trial.seconds(cell, images) for cell in missing), reverse=True)
    whole = ceil(len(by_cell) / together) * sum(by_cell) / len(by_cell)
    steps, count = recipe.steps_per_epoch(images), measurements(recipe, images)
    at_once = f"{together} at a time, if they do not slow each other down" if jobs else "one at a time"
    kept = f"{size(len(missing) * trial.checkpoint)} (last.ckpt)" if recipe.keep_checkpoint else "none"
    return [
        (
            "per cell",
            f"about {duration(max(by_cell))}: {recipe.epochs} epochs of {steps} batches of {duration(trial.batch)} and a test of "
            f"{duration(trial.validation)}, {count} measurements of {duration(trial.measurement)}",
        ),
        ("in all", f"about {duration(whole)} with {at_once}"),
        ("memory", f"about {size(trial.memory)} per cell, {size(trial.memory * together)} at once"),
        ("checkpoints", f"{size(trial.checkpoint)} per cell; kept after training: {kept}"),
        ("timed", f"{TIMED} batches, a test and a measurement of {recipe.cell}"),
    ]


def measurements(recipe: Recipe, images: int) -> int:
    """Return how often a whole training is measured."""
    if recipe.schedule is None:
        return 0
    last = recipe.epochs * recipe.steps_per_epoch(images)
    due = schedules.choose(**recipe.schedule)
    return len({0, last, *(step for step in range(last + 1) if due(step))})


def try_cell(recipe: Recipe, data: Data) -> Trial:
    """Train a few batches of a cell, test and measure once, in a temporary directory."""
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with tempfile.TemporaryDirectory() as temporary, quiet_lightning():
        tried = replace(recipe, out=Path(temporary), measure_at="off", wandb="off")
        lightning.seed_everything(recipe.seed, verbose=False)
        module = Classifier(tried, len(data.classes), tried.steps_per_epoch(len(data.train)))
        trainer, clock, batches = make_trainer(tried, data, progress_bar=False), _Clock(), Batches(data, tried)
        trainer.callbacks.append(clock)  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=batches)
        validation = _seconds(lambda: trainer.validate(module, datamodule=batches, verbose=False))
        checkpoint = Path(temporary) / "saved.ckpt"
        trainer.save_checkpoint(checkpoint)
        device = trainer.strategy.root_device
        measurement = 0.0
        if recipe.schedule is not None:
            probe = data.probe(recipe.probe_size).to(device)
            measured = module.model.to(device)
            options = recipe.settings.as_options()
            measurement = min(
                _seconds(lambda: tracker.measure(measured, probe, progress=False, **options)) for _ in range(2)
            )
        on_gpu = device.type == "cuda"
        memory = (
            torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        return Trial(
            median(clock.seconds[WARM_UP:] or clock.seconds), validation, measurement, memory, checkpoint.stat().st_size
        )


def _seconds(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
