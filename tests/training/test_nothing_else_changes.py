"""All that a training writes without the tracker it writes with it, too: rows of loggers, evaluations, checkpoints, random state.

Each program trains in a directory, once with and once without; every entry of every file there is compared. Only entries that say
how long something took are left out.
"""

import csv
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import wandb
from lightning.fabric import Fabric
from lightning.fabric import loggers as of_fabric
from lightning.pytorch import loggers as of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support import plain_loop
from tests.support.lightning_runs import Classifier, TwoOptimizers, fit, trainer
from tests.support.models import tokens
from tests.support.trainer import Recorder, make
from tests.support.wandb_runs import of, records
from tracker.store import Store

OPTIONS = {"k": 2, "max_overhead": None, "save_dir": "store"}
AXIS = "training/step"
TIMES = re.compile("runtime|per_second|timestamp")
# The Trainer's rows have these, and ours are rows of it
OURS = re.compile(
    r"^(train/)?mine\d?/|'mine'|^(training/step|(train/)?(epoch|num_input_tokens_seen))$"
)

# Programs


class Lines(TrainerCallback):
    """A logger of one's own."""

    def on_log(self, args, state, control, logs, **_):
        with Path("lines.csv").open("a") as file:
            csv.writer(file).writerows((name, state.global_step, logs[name]) for name in logs)


class Buffering(Recorder):
    """Adds to each row what it has collected since the last one, as the trainers of TRL do."""

    def log(self, logs, start_time=None):
        logs["collected"] = sum(self.losses)
        super().log(logs, start_time)
        self.losses.clear()


def in_transformers(watched: bool, kind: type[Trainer] = Trainer, resumed: bool = False, **options):
    usual = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    for checkpoint in (None, "run/checkpoint-2")[: 1 + resumed]:
        if "wandb" in options.get("report_to", ()):
            wandb.init(mode="offline", dir=Path.cwd())
        runner = make("run", kind, **usual | options)
        runner.add_callback(Lines)
        if runner.args.load_best_model_at_end:
            runner.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        if watched:
            callback = tracker.TransformersCallback(3, trainer=runner, name="mine", **OPTIONS)
            runner.add_callback(callback)
        runner.train(resume_from_checkpoint=checkpoint)


def in_lightning(
    watched: bool,
    module=Classifier,
    others=list,
    loggers=(of_lightning.CSVLogger,),
    workers: int = 0,
    **options,
):
    keep = ModelCheckpoint(".", "{step}", monitor="loss", every_n_train_steps=4, save_top_k=-1)
    ours = [tracker.CouplingCallback(4, name="mine", **OPTIONS)] if watched else []
    writing = {"logger": [kind(save_dir=Path.cwd()) for kind in loggers], "log_every_n_steps": 1}
    runner = trainer([*others(), *ours, keep], enable_checkpointing=True, **writing, **options)
    fit(runner, module, workers)


def compiled():
    module = Classifier()
    module.stages[1] = torch.compile(module.stages[1], backend="eager")
    return module


def drawing(model):
    """Return the samples to measure; it draws random numbers."""
    return tokens() + 0 * int(torch.rand(()) + np.random.rand() + random.random())


def in_a_loop(watched: bool, logs: dict[str, Any], targets: list[Any]):
    """Train with one `Watch` for each target, and log each step in several ways.

    Args:
        logs: functions (metrics, step), called before the measurement if their name begins with "first".
    """
    watches = [
        tracker.Watch(3, probe=drawing, log_to=target, name=f"mine{i}", **OPTIONS | {"save_dir": f"store{i}"})
        for i, target in enumerate(targets) if watched
    ]  # fmt: skip

    def at(step, model, force=False):
        weight = next(model.parameters()).sum().item()
        for after in (False, True):
            for watch in watches if after else ():
                watch(step, model, force=force)
            for name, log in logs.items():
                if name.startswith("first") != after:
                    log({"weight": weight}, step)

    trained = plain_loop.train(at)
    torch.save([trained.losses, trained.tensors], "trained.pt")


def to_wandb(watched: bool):
    """Runs whose rows the loop numbers in all ways that W&B takes."""
    steps = {
        "first, steps": lambda step: step,
        "first, counted": lambda step: None,
        "first, ahead": lambda step: 100 + step,
        "steps": lambda step: step,
        "counted": lambda step: None,
        "epochs": lambda step: step // 2,
    }
    runs = {
        name: wandb.init(mode="offline", dir=Path(name).absolute(), reinit="create_new")
        for name in steps
        if Path(name).mkdir() is None
    }
    logs = {
        name: lambda metrics, step, name=name: runs[name].log(metrics, step=steps[name](step))
        for name in steps
    }
    in_a_loop(watched, logs, [*runs.values()])
    for run in runs.values():
        run.finish()


def in_fabric(watched: bool):
    loggers = [of_fabric.CSVLogger("csv"), of_fabric.TensorBoardLogger("tensorboard")]
    fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers)
    in_a_loop(watched, {"counted": lambda metrics, step: fabric.log_dict(metrics)}, loggers)
    for logger in loggers:
        logger.finalize("success")


THREE = (of_lightning.CSVLogger, of_lightning.TensorBoardLogger, of_lightning.WandbLogger)
# Each with the number of files that have all our rows; a Trainer's last checkpoint is one of them
PROGRAMS = {
    "transformers, as TRL": (
        partial(
            in_transformers,
            kind=Buffering,
            report_to=["tensorboard", "wandb"],
            include_num_input_tokens_seen=True,
        ),
        4,
    ),
    "transformers, accumulation, best": (
        partial(
            in_transformers,
            gradient_accumulation_steps=2,
            load_best_model_at_end=True,
            learning_rate=1.0,
        ),
        2,
    ),
    "transformers, bf16, checkpointing": (
        partial(in_transformers, bf16=True, gradient_checkpointing=True, logging_steps=3),
        2,
    ),
    "transformers, resumed": (partial(in_transformers, resumed=True, logging_steps=1), 2),
    "loop, W&B": (to_wandb, 6),
    "Fabric": (in_fabric, 2),
    "lightning, dropout, stochastic depth": (partial(in_lightning, loggers=THREE), 3),
    "lightning, augmentation in workers": (
        partial(in_lightning, workers=2, max_epochs=2, max_steps=-1),
        1,
    ),
    "lightning, bf16-mixed": (partial(in_lightning, precision="bf16-mixed"), 1),
    "lightning, gradient checkpointing": (
        partial(in_lightning, module=partial(Classifier, checkpointing=True)),
        1,
    ),
    "lightning, manual optimization": (partial(in_lightning, module=TwoOptimizers), 1),
    "lightning, averaged weights": (
        partial(in_lightning, others=lambda: [EMAWeightAveraging(decay=0.5)]),
        1,
    ),
    "lightning, no sanity check": (partial(in_lightning, num_sanity_val_steps=0), 1),
    "lightning, compiled in part": (partial(in_lightning, module=compiled), 1),
}


# What they write


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, None, str]]:
    """Return the entries of a checkpoint, with their names."""
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{name}/{key}")
    else:
        array = isinstance(value, (torch.Tensor, np.ndarray))
        yield name, None, repr((value.dtype, value.tolist()) if array else value)


def of_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Return the entries of rows, each with the step that it is drawn over."""
    for row in rows:
        axes = ("trainer/global_step", "train/global_step", "_step", "step")
        own = next(row[axis] for axis in axes if axis in row)
        for name, value in row.items():
            step = row.get(AXIS, own) if name.startswith(("mine", AXIS)) else own
            if name not in axes and value != "":
                yield name, str(step), repr(value)


def of_events(file: Path) -> Iterator[tuple[str, int, str]]:
    events = EventAccumulator(str(file)).Reload()
    for kind, value in (("scalars", "value"), ("tensors", "tensor_proto")):
        for name in events.Tags()[kind]:
            for event in getattr(events, kind.capitalize())(name):
                yield name, event.step, repr(getattr(event, value))


def entries(file: Path) -> Iterator[tuple[str, Any, str]]:
    """Return what a file contains: names, steps, values."""
    if "tfevents" in file.name:
        return of_events(file)
    if file.suffix == ".wandb":
        found = records(file)
        defined = [
            (metric.get("name", ""), None, json.dumps(metric)) for metric in of("metric", found)
        ]
        rows = of_rows([row["item"] for row in of("history", found)])
        return iter([*rows, *defined])
    if file.name == "metrics.csv":
        return of_rows([*csv.DictReader(file.open())])
    if file.name == "lines.csv":
        return iter([tuple(row) for row in csv.reader(file.open())])
    if file.name == "trainer_state.json":
        state = json.loads(file.read_text())
        return iter([*of_rows(state.pop("log_history")), *leaves(state)])
    if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        return leaves(torch.load(file, weights_only=False))
    return iter([("", None, hashlib.sha256(file.read_bytes()).hexdigest())])


def written(directory: Path) -> Counter[tuple[str, str, Any, str]]:
    """Return the entries of all files, each with its file."""
    found = Counter()
    for file in directory.rglob("*"):
        path = str(file.relative_to(directory))
        # W&B's own notes and pictures
        apart = path.startswith("store") or ("wandb" in path and file.suffix != ".wandb")
        if file.is_file() and not apart:
            # Without the time and the process
            place = re.sub("(offline-run|runs/|tfevents).*", r"\1", path)
            found.update(
                (place, name.replace(str(directory), ""), step, value.replace(str(directory), ""))
                for name, step, value in entries(file)
                if not TIMES.search(name)
            )
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_that_a_training_writes_is_there(program, tmp_path, monkeypatch):
    train, logs = PROGRAMS[program]
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = []
    for watched in (False, True):
        directory = tmp_path / str(watched)
        directory.mkdir()
        monkeypatch.chdir(directory)
        lightning.seed_everything(0, verbose=False)
        try:
            train(watched)
        finally:
            wandb.finish()
        torch.save([torch.get_rng_state(), np.random.get_state(), random.getstate()], "random.pt")
        found.append(written(directory))
    without, within = found
    assert len(without) > 100 and not {entry[:3] for entry in without - within}
    assert not {entry[:3] for entry in within - without if not OURS.search(entry[1])}
    steps = {}
    for file, name, step, _ in within:
        of_row = step is not None  # not of the definition of a metric
        if of_row and re.fullmatch(r"(train/)?mine\d?/miscoupling/mean_offdiag", name):
            steps.setdefault(file, set()).add(int(step))
    measured = Store(next(directory.glob("store*"))).steps()
    assert len(measured) > 2 and [*map(sorted, steps.values())].count(measured) == logs
