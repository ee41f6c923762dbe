"""Trainings on two ranks (gloo), measured in each way that there is: `python -m tests.support.rank_runs DIRECTORY`, as each rank.

Each rank writes to DIRECTORY what it found in each run; all runs take the same two processes. Some measurements fail on one of
the ranks: then both train on, or both end.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

import tracker
from tests.support import plain_loop
from tests.support.draws import normal
from tests.support.lightning_runs import Classifier, Sharded, fit, trainer
from tests.support.trainer import data, make
from tracker import CouplingCallback, measurement
from tracker.store import Store
from tracker.training import run

STEPS = 10
PROBE = normal(3, 6, 8)  # one rank has two of them
TOKENS = torch.stack([row["input_ids"] for row in data()[:3]])
Faults = dict[
    int, tuple[str, int, Exception]
]  # by the step that is measured: where, on which rank, how
CUDA = RuntimeError("CUDA error: an illegal memory access was encountered")
PLANTED = RuntimeError("planted")
# The training continues after these.
CONTINUED = {
    1: ("samples", 0, PLANTED),
    2: ("samples", 1, KeyError("planted")),
    3: ("on_measure", 0, KeyError("planted")),
    4: ("on_measure", 1, KeyError("never called there")),
    5: ("write", 0, OSError(28, "No space left on device")),
    6: ("write", 0, PLANTED),
    7: ("log", 0, ConnectionError("planted")),
    8: ("dataset", 1, MemoryError("planted")),
    9: ("float64", 1, torch.OutOfMemoryError("planted")),
}
# The training ends, on both ranks, after each of these.
ENDED = {
    "device": {2: ("samples", 1, CUDA)},
    "device in on_measure": {2: ("on_measure", 0, CUDA)},
    "mistake at first": {0: ("samples", 1, KeyError("planted"))},
    "probe": {0: ("probe", 1, ValueError("planted"))},
    "store": {0: ("claim", 0, PermissionError("planted"))},
    "sharded, mistake": {0: ("forward", 1, PLANTED)},
}


def plant(place: str, watch: CouplingCallback, faults: Faults, function: Callable) -> Callable:
    """Let a function raise at the steps for which a fault is planted at its place."""

    def planted(*arguments, **options):
        where, rank, error = faults.get(max(watch.run.last_checked, 0), ("", None, None))
        if error is not None and where == place and torch.distributed.get_rank() == rank:
            raise error
        return function(*arguments, **options)

    return planted


def whole(tensors: Iterable[Any]) -> list[Tensor]:
    """Return tensors in full, of which each rank may hold a part."""
    return [
        torch.as_tensor(getattr(tensor, "full_tensor", lambda t=tensor: t)()) for tensor in tensors
    ]


def state(losses: list[float], module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list:
    """Return the losses, and the exact weights, optimizer state and random state."""
    moments = [
        value
        for optimizer in optimizers
        for values in optimizer.state_dict()["state"].values()
        for value in values.values()
    ]
    tensors = [*whole([*module.state_dict().values(), *moments]), torch.get_rng_state()]
    return [losses, *(tensor.tolist() for tensor in tensors)]


def in_lightning(directory: Path, faults: Faults | None, probe: Tensor, every: int) -> dict:
    """Train, measuring with faults unless they are None, every so many steps; return what a rank has at the end."""
    sharded, seen, logger = "sharded" in directory.name, [], CSVLogger(directory, "logs")
    strategy = ModelParallelStrategy(2, 1) if sharded else "ddp"
    watch = CouplingCallback(every, k=2, dtype="float64", save_dir=str(directory / "store"))
    found = {"error": None, "state": None, "on_measure": seen}
    with ExitStack() as patches:
        if faults is not None:
            watch.run.given_probe = plant("probe", watch, faults, lambda *_: probe)
            watch.run.on_measure = plant(
                "on_measure", watch, faults, lambda unit: seen.append(int(unit.step))
            )
            if sharded:
                watch.run.forward = plant(
                    "forward", watch, faults, lambda module, batch: module(batch)
                )
            for place, owner, name in (
                ("samples", measurement, "measure_samples"),
                ("dataset", run, "to_dataset"),
                ("float64", run, "has_float64"),
                ("write", Store, "write"),
                ("claim", Store, "check_settings"),
                ("log", logger, "log_metrics"),
            ):
                planted = plant(place, watch, faults, getattr(owner, name))
                patches.enter_context(patch.object(owner, name, planted))
        runner = trainer(
            [] if faults is None else [watch], STEPS, strategy=strategy, devices=2, logger=logger,
            log_every_n_steps=100,
        )  # fmt: skip
        caught = patches.enter_context(warnings.catch_warnings(record=True, action="always"))
        try:
            module = fit(runner, Sharded if sharded else Classifier)
        except Exception as raised:
            found["error"] = [
                f"{type(raised).__name__}: {raised}",
                *getattr(raised, "__notes__", []),
            ]
        else:
            found["state"] = state(module.losses, module, *runner.optimizers)
            weights = dict(
                zip(module.state_dict(), whole(module.state_dict().values()), strict=True)
            )
            torch.save(weights, directory / f"rank{runner.global_rank}.pt")
    metric = runner.callback_metrics.get("miscoupling/mean_offdiag")
    return found | {
        "skipped": watch.skipped.reasons if faults is not None else {},
        "warnings": [str(w.message) for w in caught if "training continues" in str(w.message)],
        "metric": None if metric is None else float(metric),
    }


def in_transformers(rank: int, **options) -> dict:
    runner = make("unused", ddp_backend="gloo", per_device_train_batch_size=2)
    if options:
        runner.add_callback(tracker.TransformersCallback(3, trainer=runner, **options))
    runner.train()
    return {"state": state(runner.losses, runner.model, runner.optimizer)}


def in_a_loop(rank: int, **options) -> dict:
    rows, watch = [], None
    if options:
        watch = tracker.Watch(3, log_to=lambda _, step: rows.append(step), **options)
    trained = plain_loop.train(watch, rank)
    if watch is not None:
        watch.close()
    assert set(rows) == ({0, 3, plain_loop.STEPS} if options and rank == 0 else set())
    return {"state": [trained.losses, *(tensor.tolist() for tensor in trained.tensors)]}


def main():
    directory, rank, results = Path(sys.argv[1]), int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for way, train in (("transformers", in_transformers), ("watch", in_a_loop)):
        options = {"k": 2, "probe": TOKENS, "save_dir": directory / way / "store"}
        results |= {f"{way}, plain": train(rank), way: train(rank, **options)}
    for way, faults, probe, every in (
        ("lightning, plain", None, PROBE, 1),
        ("lightning", CONTINUED, PROBE, 1),
        ("one sample", {}, PROBE[:1], STEPS),
        ("sharded, plain", None, PROBE, 1),
        ("sharded", {4: ("forward", 1, PLANTED)}, PROBE, 4),
        *((name, faults, PROBE, 1) for name, faults in ENDED.items()),
    ):
        results[way] = in_lightning(directory / way, faults, probe, every)
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
