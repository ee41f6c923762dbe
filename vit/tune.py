"""Train cells as trials of Ray Tune: concurrently, with fractions of a GPU, on one machine or a cluster.

All machines write to the same directory, which on a cluster must be on a shared file system. A trial that crashes is retried and
resumes from its last epoch. Tune's own state is not restored: cells are identified by their settings, and finished cells are
skipped.
"""

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import tune  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

from vit.cells import PATIENCE, BusyError, is_done, record_failure
from vit.recipe import Recipe

SECONDS = 5.0  # to connect to a cluster


def connect(address: str | None, cpus: float, gpus: float | None) -> float:
    """Start Ray, or connect to a cluster; return the GPUs of a cell.

    Args:
        address: as of `ray.init`; None starts Ray on this machine, if RAY_ADDRESS does not name a cluster.
        cpus: CPUs of a cell.
        gpus: GPUs of a cell. Default: 1 if any of Ray's machines has a GPU, which this one need not have.

    Raises:
        ValueError: if there is no cluster, or none of its machines has what a cell needs.
    """
    host, _, port = (address or os.environ.get("RAY_ADDRESS") or "").removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # Ray waits without end, and prints nothing, for a cluster that does not answer
            socket.create_connection((host, int(port)), SECONDS).close()
        ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except OSError as error:
        raise ValueError(
            f"--address {address}; no Ray cluster answers ({error}): give the address that `ray start --head` prints, or leave "
            "it out to train on this machine"
        ) from error
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    sizes = sorted({(machine.get("CPU", 0.0), machine.get("GPU", 0.0)) for machine in machines})
    if gpus is None:
        gpus = float(any(gpu for _, gpu in sizes))
    if not any(cpus <= cpu and gpus <= gpu for cpu, gpu in sizes):  # Ray waits without end for such a one
        ray.shutdown()
        largest = "; ".join(f"{cpu:g} CPUs and {gpu:g} GPUs" for cpu, gpu in sizes)
        raise ValueError(
            f"--cpus_per_cell {cpus:g} --gpus_per_cell {gpus:g}; no machine has that, so no cell would start: give at most what "
            f"one has ({largest})"
        )
    return gpus


def run_cells(recipes: Sequence[Recipe], jobs: int | None, cpus: float, gpus: float, retries: int) -> None:
    """Train the cells on Ray, which is connected, at most `jobs` at a time; record final failures in failed.json.

    Raises:
        KeyboardInterrupt: if interrupted.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints a table although `verbose` is 0
    # Absolute paths, because Ray chooses the current directory of a worker.
    by_name = {recipe.cell: replace(recipe, out=recipe.directory.resolve()) for recipe in recipes}
    storage = next(iter(by_name.values())).directory.parent / ".ray"
    try:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trial, recipes=by_name), {"cpu": cpus, "gpu": gpus}),
            param_space={"cell": tune.grid_search(list(by_name))},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=jobs, reuse_actors=True
            ),  # which have imported all packages
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(storage),
                failure_config=tune.FailureConfig(max_failures=retries),
                verbose=0,
            ),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    for result in results:
        recipe = by_name[result.config["cell"]] if result.config else None
        if recipe and result.error and not is_done(recipe.directory):
            error = str(result.error).strip() or type(result.error).__name__
            killed = isinstance(result.error, RayActorError)
            record_failure(recipe, f"{error}\nits process died, often for lack of memory" if killed else error)
    if sum(bool(result.error or (result.metrics or {}).get("status")) for result in results) < len(recipes):
        raise KeyboardInterrupt  # Tune returns what it has


def _trial(config: dict[str, Any], recipes: dict[str, Recipe]) -> dict[str, Any]:
    from vit.training import train_cell

    while True:
        try:
            return {"status": train_cell(recipes[config["cell"]])["status"]}
        except BusyError:  # another process trains the cell
            time.sleep(PATIENCE)
