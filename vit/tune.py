"""Cells as trials of Ray Tune: many at once, with fractions of a GPU, on one machine or a cluster.

A trial runs what a process of `vit.processes` runs, into the same directory; on a cluster that directory has to be on a
file system that all machines share. A trial that dies is tried again and goes on from its last epoch. Nothing needs to
be restored besides: cells are keyed by their settings, and what is done is not begun.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import tune  # pyright: ignore[reportMissingImports]

from vit.cells import is_done, write
from vit.recipe import Recipe


class Report(tune.Callback):
    """Tells the driver of each trial that ended; Tune saves its callbacks, and this one has nothing to be saved."""

    def __init__(self, recipes: dict[str, Recipe], ended: Callable[[Recipe], None]):
        self.recipes, self.ended = recipes, ended

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Pass it on."""
        self.ended(self.recipes[trial.config["cell"]])


def run_cells(
    recipes: Sequence[Recipe],
    storage: Path,
    address: str | None,
    cpus: float,
    gpus: float,
    retries: int,
    ended: Callable[[Recipe], None],
) -> None:
    """Train the cells on Ray, each with so many CPUs and GPUs; what has failed for good is recorded in failed.json."""
    # A worker's current directory is Ray's to choose.
    by_name = {recipe.cell: replace(recipe, out=recipe.directory.resolve()) for recipe in recipes}
    ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trial, recipes=by_name), {"cpu": cpus, "gpu": gpus}),
            param_space={"cell": tune.grid_search(list(by_name))},
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(storage.resolve()),
                failure_config=tune.FailureConfig(max_failures=retries),
                callbacks=[Report(by_name, ended)],
                verbose=0,
            ),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    for result in results:
        recipe = by_name[result.config["cell"]] if result.config else None
        if recipe and result.error and not is_done(recipe.directory):
            write(recipe.directory, "failed", {"reason": str(result.error).strip().splitlines()[-1]})
            ended(recipe)


def _trial(config: dict[str, Any], recipes: dict[str, Recipe]) -> dict[str, Any]:
    from vit.train import train

    return {"status": train(recipes[config["cell"]])["status"]}
