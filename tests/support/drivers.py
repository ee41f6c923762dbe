"""The three ways to measure a training, each as one function: a run of small steps in a directory, with a store and checkpoints.

    train(directory, last, resume=None, fail_at=None, **options)

trains up to step `last`, from the checkpoint of step `resume` on, and runs out of memory at step `fail_at`; nothing is random
that a resumed run would not draw again. `options` are those of the callback or `Watch`.
"""

from functools import partial
from pathlib import Path

import torch
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support.draws import normal
from tests.support.lightning_runs import Classifier, Noisy, fit, trainer
from tests.support.models import neox, tokens
from tests.support.trainer import data, make

CHEAP = {"k": 2, "measures": "trajectory"}
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Failing(Classifier):
    """A module without dropout that runs out of memory at a step."""

    def __init__(self, fail_at: int | None):
        super().__init__(drop=0.0)
        self.fail_at = fail_at

    def training_step(self, batch, index):
        if self.trainer.global_step == self.fail_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return super().training_step(batch, index)


def in_lightning(directory: Path, last: int, resume=None, fail_at=None, **options):
    given = {"probe": normal(3, 6, 8), "save_dir": directory / "store", **CHEAP, **options}
    watch = tracker.CouplingCallback(1, **given)
    start = None if resume is None else directory / f"step={resume}.ckpt"
    # One batch is the whole data: Lightning does not restore the random state of a run
    steady = {"data": Noisy(noise=0.0), "batch": 64, "shuffle": False, "ckpt_path": start}
    fit(trainer([watch], last, keep=directory), partial(Failing, fail_at), **steady)


class Ending(TrainerCallback):
    """Ends a training after a step, or lets it run out of memory."""

    def __init__(self, last: int, fail_at: int | None):
        self.last, self.fail_at = last, fail_at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.fail_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        control.should_training_stop = state.global_step >= self.last


def in_transformers(directory: Path, last: int, resume=None, fail_at=None, **options):
    runner = make(directory / "run", save_strategy="steps", save_steps=1)
    probe = torch.stack([row["input_ids"] for row in data()[:3]])
    given = {"probe": probe, "save_dir": directory / "store", **CHEAP, **options}
    runner.add_callback(tracker.TransformersCallback(1, **given))
    runner.add_callback(Ending(last, fail_at))
    start = None if resume is None else str(directory / "run" / f"checkpoint-{resume}")
    runner.train(resume_from_checkpoint=start)


def in_a_loop(directory: Path, last: int, resume=None, fail_at=None, **options):
    given = {"probe": tokens(3), "save_dir": directory / "store", **CHEAP, **options}
    with tracker.Watch(1, **given) as watch:
        for step in range(resume or 0, last + 1):
            torch.manual_seed(step)
            watch(step, neox())
            if step == fail_at:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)


DRIVERS = {"lightning": in_lightning, "transformers": in_transformers, "watch": in_a_loop}
