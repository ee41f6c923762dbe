"""The three ways to measure a training, each as one function: a run of small steps in a directory, with a store and checkpoints.

    train(directory, last, resume=None, error=None, every=1, samples=3, logs=False, **options)

trains up to step `last`, from the checkpoint of step `resume` on, raises an error at step 2 if there is one, and returns the
trained model and the probe, of some samples; nothing is random that a resumed run would not draw again. `logs` is whether W&B is
sent the metrics, and `options` are those of the callback or `Watch`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support.draws import normal
from tests.support.lightning_runs import Classifier, Noisy, fit, trainer
from tests.support.models import neox, tokens
from tests.support.trainer import data, make

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
CHEAP = {"k": 2, "measures": "trajectory"}
Trained = tuple[nn.Module, Tensor]


class Failing(Classifier):
    """A module without dropout that raises an error at step 2, if there is one."""

    def __init__(self, error: BaseException | None):
        super().__init__(drop=0.0)
        self.error = error

    def training_step(self, batch, index):
        if self.error is not None and self.trainer.global_step == 2:
            raise self.error
        return super().training_step(batch, index)


def in_lightning(
    directory: Path, last: int, resume=None, error=None, every=1, samples=3, logs=False, **options
) -> Trained:
    probe = normal(3, 6, 8)[:samples]
    given: dict[str, Any] = {"probe": probe, "save_dir": directory / "store", **CHEAP, **options}
    watch = tracker.CouplingCallback(every, **given)
    start = None if resume is None else directory / f"step={resume}.ckpt"
    logger = WandbLogger(save_dir=directory, offline=True) if logs else False
    # One batch is the whole data: Lightning does not restore the random state of a run
    steady = {"data": Noisy(noise=0.0), "batch": 64, "shuffle": False, "ckpt_path": start}
    runner = trainer([watch], last, keep=directory, logger=logger, log_every_n_steps=1)
    return fit(runner, partial(Failing, error), **steady), probe


class Ending(TrainerCallback):
    """Ends a training after a step, or raises an error at step 2."""

    def __init__(self, last: int, error: BaseException | None):
        self.last, self.error = last, error

    def on_step_end(self, args, state, control, **_):
        if self.error is not None and state.global_step == 2:
            raise self.error
        control.should_training_stop = state.global_step >= self.last


def in_transformers(
    directory: Path, last: int, resume=None, error=None, every=1, samples=3, logs=False, **options
) -> Trained:
    if logs:
        wandb.init(mode="offline", dir=directory)
    report_to = ["wandb"] if logs else []
    runner = make(directory / "run", save_strategy="steps", save_steps=1, report_to=report_to)
    probe = torch.stack([row["input_ids"] for row in data()[:samples]])
    given: dict[str, Any] = {"probe": probe, "save_dir": directory / "store", **CHEAP, **options}
    runner.add_callback(tracker.TransformersCallback(every, trainer=runner, **given))
    runner.add_callback(Ending(last, error))
    start = None if resume is None else str(directory / "run" / f"checkpoint-{resume}")
    runner.train(resume_from_checkpoint=start)
    return runner.model, probe


def in_a_loop(
    directory: Path, last: int, resume=0, error=None, every=1, samples=3, logs=False, **options
) -> Trained:
    probe = tokens(samples)
    run = wandb.init(mode="offline", dir=directory) if logs else None
    given: dict[str, Any] = {"probe": probe, "save_dir": directory / "store", **CHEAP, **options}
    with tracker.Watch(every, log_to=run, **given) as watch:
        for step in range(resume, last + 1):
            torch.manual_seed(step)
            watch(step, model := neox())
            if error is not None and step == 2:
                raise error
    return model, probe


DRIVERS = {"lightning": in_lightning, "transformers": in_transformers, "watch": in_a_loop}
