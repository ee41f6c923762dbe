"""Two ranks (DDP, gloo) whose measurements fail on one of them: `python -m tests.training.failing_ranks DIRECTORY`.

With `--spawn` they are spawned, and nothing fails.

Each rank writes to DIRECTORY what it found in each run. A run trains on, or ends on both ranks; all runs take the same processes.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed
from lightning.pytorch.loggers import CSVLogger

from tests.support.draws import normal
from tests.support.lightning_runs import Classifier, fit, trainer
from tracker import CouplingCallback, measurement
from tracker.store import Store
from tracker.training import run

PROBE = normal(3, 6, 8)
Fault = tuple[int, Exception]  # the rank that fails, and how
CUDA = RuntimeError("CUDA error: an illegal memory access was encountered")
STEPS = 10
# By the step that is measured: the training continues after these.
CONTINUED: dict[int, tuple[str, Fault]] = {
    1: ("samples", (0, RuntimeError("planted"))),
    2: ("samples", (1, KeyError("planted"))),
    3: ("on_measure", (0, KeyError("planted"))),
    4: ("on_measure", (1, KeyError("never called there"))),
    5: ("write", (0, OSError(28, "No space left on device"))),
    6: ("write", (0, RuntimeError("planted"))),
    7: ("log", (0, ConnectionError("planted"))),
    8: ("dataset", (1, MemoryError("planted"))),
    9: ("float64", (1, torch.OutOfMemoryError("planted"))),
}
# The training ends, on both ranks, after each of these.
ENDED: dict[str, tuple[int, str, Fault]] = {
    "device": (2, "samples", (1, CUDA)),
    "device in on_measure": (2, "on_measure", (0, CUDA)),
    "mistake at first": (0, "samples", (1, KeyError("planted"))),
    "probe": (0, "probe", (1, ValueError("planted"))),
    "store": (0, "claim", (0, PermissionError("planted"))),
}


def plant(
    place: str, watch: CouplingCallback, faults: dict[int, tuple[str, Fault]], function: Callable
) -> Callable:
    """Let a function raise at the steps for which a fault is planted at its place."""

    def planted(*arguments, **options):
        where, fault = faults.get(max(watch.run.last_checked, 0), ("", None))
        if fault is not None and where == place and torch.distributed.get_rank() == fault[0]:
            raise fault[1]
        return function(*arguments, **options)

    return planted


def watched(directory: Path, faults: dict[int, tuple[str, Fault]], **options) -> dict:
    """Train with faults; return what a rank has at the end."""
    seen, logger = [], CSVLogger(directory, "logs")
    watch = CouplingCallback(1, k=2, save_dir=str(directory / "store"), **options)
    watch.run.given_probe = plant("probe", watch, faults, lambda *_: PROBE)
    watch.run.on_measure = plant(
        "on_measure", watch, faults, lambda unit: seen.append(int(unit.step))
    )
    places = {
        "samples": (measurement, "measure_samples"),
        "dataset": (run, "to_dataset"),
        "float64": (run, "has_float64"),
        "write": (Store, "write"),
        "claim": (Store, "check_settings"),
    }
    patches = [
        patch.object(o, name, plant(at, watch, faults, getattr(o, name)))
        for at, (o, name) in places.items()
    ]
    patches.append(
        patch.object(logger, "log_metrics", plant("log", watch, faults, logger.log_metrics))
    )
    for each in patches:
        each.start()
    error, runner = None, trainer([watch], STEPS, **RANKS, logger=logger, log_every_n_steps=100)
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            result = state(runner, fit(runner, Classifier))
    except Exception as raised:
        error = [f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", [])]
        result = None
    finally:
        for each in patches:
            each.stop()
    metric = runner.callback_metrics.get("miscoupling/mean_offdiag")
    return {
        "state": result,
        "error": error,
        "skipped": watch.skipped.reasons,
        "warnings": [str(w.message) for w in caught if "training continues" in str(w.message)],
        "on_measure": seen,
        "stored": Store(directory / "store").steps(),
        "metric": None if metric is None else float(metric),
    }


def state(runner, module) -> list:
    """Return the losses, and the exact weights, optimizer state and random state."""
    tensors = list(module.state_dict().values())
    for optimizer in runner.optimizers:
        tensors += [
            value
            for values in optimizer.state_dict()["state"].values()
            for value in values.values()
        ]
    return [
        module.losses,
        *(torch.as_tensor(tensor).tolist() for tensor in (*tensors, torch.get_rng_state())),
    ]


RANKS = {"strategy": "ddp", "devices": 2}


def main() -> None:
    directory, chosen = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    if "--spawn" in chosen:
        watch = CouplingCallback(steps=[1], k=2, probe=PROBE, save_dir=str(directory / "spawned"))
        fit(trainer([watch], 2, strategy="ddp_spawn", devices=2), Classifier)
        return
    runner = trainer(max_steps=STEPS, **RANKS)
    results = {"plain": {"state": state(runner, fit(runner, Classifier))}}
    for name, faults in {
        "continued": CONTINUED,
        **{name: {s: (p, f)} for name, (s, p, f) in ENDED.items()},
    }.items():
        if not chosen or name in chosen:
            results[name] = watched(directory / name, faults)
            (directory / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
