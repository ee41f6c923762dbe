"""What a grid would take, from a few batches of one training and one measurement; what they write is removed."""

import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import lightning
import torch

from checkpoints.nano import quiet_lightning
from tracker.measures.cost import duration, entry, size
from vit.cells import read
from vit.data import Data
from vit.loaders import Batches
from vit.module import Classifier
from vit.pace import TIMED, WARM_UP, Pace, Parts, memory_use
from vit.recipe import Recipe
from vit.resources import recommended_share
from vit.training import make_trainer

SECONDS = 30.0  # of steps, after which a trial stops


@dataclass(frozen=True)
class Trial:
    """Seconds and bytes of one cell."""

    parts: Parts
    start: float  # seconds until the first step, data included
    memory: int  # bytes, peak of the process, or of its GPU
    of_memory: int  # bytes of the GPU; 0 without one
    checkpoint: int

    def seconds(self, recipe: Recipe, images: int) -> float:
        """Return the seconds of one training, less the epochs that are finished."""
        step = len(read(recipe.directory, "history") or ()) * recipe.steps_per_epoch(images)
        return self.start + self.parts.seconds_left(recipe, images, step)


class _Limit(lightning.Callback):
    """Stops a trial of slow steps."""

    def __init__(self, pace: Pace):
        self.pace = pace

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after the step in which the time is over."""
        trainer.should_stop = self.pace.seconds["step"] > SECONDS


def describe(recipes: Sequence[Recipe], missing: Sequence[Recipe], data: Data, loading: float, jobs: int | None) -> str:
    """Return what training the missing cells would take.

    Args:
        loading: the seconds in which the data was loaded.
        jobs: number of cells that are trained at the same time; None if only a cluster knows.
    """
    lines = [
        ("dry run", "nothing is trained, and nothing is written"),
        ("cells", f"{len(missing)} to train, {len(recipes) - len(missing)} done"),
    ]
    if missing:
        lines += _costs(missing, try_cell(missing[0], data, loading), len(data.train), jobs)
    return "\n".join(entry(*line) for line in lines)


def _costs(missing: Sequence[Recipe], trial: Trial, images: int, jobs: int | None) -> list[tuple[str, str]]:
    recipe, together = missing[0], min(jobs or 1, len(missing))
    by_cell = sorted((trial.seconds(cell, images) for cell in missing), reverse=True)
    whole = ceil(len(by_cell) / together) * sum(by_cell) / len(by_cell)
    at_once = f"{together} at a time, if they do not slow each other down" if jobs else "one at a time"
    kept = f"{size(len(missing) * trial.checkpoint)} (last.ckpt)" if recipe.keep_checkpoint else "none"
    share = recommended_share(trial.memory, trial.of_memory)
    return [
        ("per cell", f"about {duration(max(by_cell))}: {_parts(trial, recipe, images)}"),
        ("in all", f"about {duration(whole)} with {at_once}"),
        ("memory", f"about {size(trial.memory)} per cell, {size(trial.memory * together)} at once"),
        *([("GPU", share)] if share else []),
        ("checkpoints", f"{size(trial.checkpoint)} per cell; kept after training: {kept}"),
        ("timed", f"{TIMED} steps, a test and two measurements of {recipe.cell}"),
    ]


def _parts(trial: Trial, recipe: Recipe, images: int) -> str:
    """Return the parts of a whole training, which add up to its time."""
    words = {"step": "steps", "epoch": "ends of epochs", "test": "tests", "measurement": "measurements"}
    parts = [
        f"{count:,} {words[name] if count > 1 else words[name][:-1]} of {duration(seconds)}"
        + (f" ({duration(count * seconds)})" if count > 1 else "")
        for name, (count, seconds) in trial.parts.left(recipe, images).items()
        if count
    ]
    return ", ".join([*parts, f"start {duration(trial.start)}"])


def try_cell(recipe: Recipe, data: Data, loading: float = 0.0) -> Trial:
    """Train a few batches of a cell, test once and measure twice, in a temporary directory.

    Args:
        loading: the seconds in which the data was loaded.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with tempfile.TemporaryDirectory() as temporary, quiet_lightning():
        measured = "off" if recipe.schedule is None else "0"  # and after the last step
        tried = replace(recipe, out=Path(temporary), measure_at=measured, wandb="off")
        lightning.seed_everything(recipe.seed, verbose=False)
        module = Classifier(tried, len(data.classes), tried.steps_per_epoch(len(data.train)))
        # At least two epochs, because the end of an epoch is timed, too.
        steps = min(tried.steps_per_epoch(len(data.train)), (WARM_UP + TIMED) // 2)
        limits = {"max_epochs": ceil((WARM_UP + TIMED) / steps), "limit_train_batches": steps, "limit_val_batches": 0}
        trainer, batches = make_trainer(tried, data, progress_bar=False, **limits), Batches(data, tried)
        pace = next(callback for callback in trainer.callbacks if isinstance(callback, Pace))  # type: ignore[attr-defined]
        pace.writes = False
        trainer.callbacks.append(_Limit(pace))  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=batches)
        trainer.limit_val_batches = 1.0
        trainer.validate(module, datamodule=batches, verbose=False)
        checkpoint = Path(temporary) / "saved.ckpt"
        trainer.save_checkpoint(checkpoint)
        memory, of_memory = memory_use(trainer.strategy.root_device)
        memory = memory or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert pace.parts is not None
        return Trial(pace.parts, loading + pace.seconds["start"], memory, of_memory, checkpoint.stat().st_size)
