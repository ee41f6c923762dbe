"""Train cells as trials of Ray Tune: concurrently, with fractions of a GPU, on one machine or a cluster.

A trial does the same as a process of `vit.processes` and writes to the same directory, which on a cluster must be on a
shared file system. A trial that crashes is retried and resumes from its last epoch. Tune's own state is not restored: cells
are identified by their settings, and finished cells are skipped.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import tune  # pyright: ignore[reportMissingImports]

from vit.cells import PATIENCE, BusyError, is_done, write
from vit.recipe import Recipe
from vit.resources import check_machines


class Report(tune.Callback):
    """Notifies the driver of each trial that ended. Tune pickles its callbacks; this one has no state to save."""

    def __init__(self, recipes: dict[str, Recipe], on_end: Callable[[Recipe], None]):
        self.recipes, self.on_end = recipes, on_end

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Notify the driver."""
        self.on_end(self.recipes[trial.config["cell"]])


def connect(address: str | None, cpus: float, gpus: float | None) -> float:
    """Start Ray, or connect to a cluster; return the GPUs of a cell.

    Args:
        cpus: CPUs of a cell.
        gpus: GPUs of a cell. Default: 1 if any of Ray's machines has a GPU, which this one need not have.

    Raises:
        ValueError: if there is no cluster, or none of its machines has what a cell needs.
    """
    try:
        ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise ValueError(f"--address {address}; {error}") from error
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        gpus = float(any(machine.get("GPU", 0) for machine in machines))
    try:
        check_machines(machines, cpus, gpus)
    except ValueError:
        ray.shutdown()
        raise
    return gpus


def run_cells(
    recipes: Sequence[Recipe], storage: Path, cpus: float, gpus: float, retries: int, on_end: Callable[[Recipe], None]
) -> None:
    """Train the cells on Ray, which is connected, each with the given CPUs and GPUs; record final failures in failed.json.

    Raises:
        KeyboardInterrupt: if interrupted.
    """
    # Absolute paths, because Ray chooses the current directory of a worker.
    by_name = {recipe.cell: replace(recipe, out=recipe.directory.resolve()) for recipe in recipes}
    try:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trial, recipes=by_name), {"cpu": cpus, "gpu": gpus}),
            param_space={"cell": tune.grid_search(list(by_name))},
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(storage.resolve()),
                failure_config=tune.FailureConfig(max_failures=retries),
                callbacks=[Report(by_name, on_end)],
                verbose=0,
            ),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    for result in results:
        recipe = by_name[result.config["cell"]] if result.config else None
        if recipe and result.error and not is_done(recipe.directory):
            lines = str(result.error).strip().splitlines() or [type(result.error).__name__]
            write(recipe.directory, "failed", {"reason": lines[-1]})
            on_end(recipe)
    if sum(bool(result.error or (result.metrics or {}).get("status")) for result in results) < len(recipes):
        raise KeyboardInterrupt  # Tune returns what it has


def _trial(config: dict[str, Any], recipes: dict[str, Recipe]) -> dict[str, Any]:
    from vit.training import train

    while True:
        try:
            return {"status": train(recipes[config["cell"]])["status"]}
        except BusyError:  # another process trains the cell
            time.sleep(PATIENCE)
