"""The grid: `python -m vit.grid` trains one vision transformer for every weight decay x stochastic depth x seed.

All other options are those of the recipe, as in vit.train. Ray trains several cells at a time; `--jobs 1` trains one after
another in this process. A finished cell is not run again; one that diverges or crashes is recorded and the others continue; the
same command resumes an interrupted grid. No heavy module is imported before the arguments are read.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any

from tracker.common.command_line import FAILED, OK, reports_errors
from tracker.common.text import counted
from tracker.common.values import as_path
from vit.cells import BusyError, check_settings, is_done, read, record_failure
from vit.overview import describe, shown, state_of
from vit.recipe import DEFAULTS, FLAGS, SETTINGS, Recipe, check, from_dict
from vit.train import parse

PATIENCE = 10.0  # seconds between attempts to train a cell that another process trains
# The weight decays are the paper's. It states 64 trainings, hence eight stochastic depth rates, but only 0, 0.05, 0.1 and
# 0.3 of them; the others are our choice.
WEIGHT_DECAYS = "0.005,0.01,0.02,0.04,0.06,0.08,0.1,0.2"
DROP_PATHS = "0,0.05,0.1,0.15,0.2,0.25,0.3,0.35"


@dataclass
class GridCommand:
    """Train a vision transformer for every weight decay x stochastic depth x seed, and measure coupling in each.

    Results go to OUT/CELL, in the format of vit.train; `python -m vit.analysis OUT` analyzes them. Exit status: 0 all
    trained; 1 some cell diverged or crashed (listed at the end, the others kept); 2 bad usage; 130 interrupted.

    Args:
        weight_decays: weight decays, separated by commas. Default: the paper's.
        drop_paths: stochastic depth rates, separated by commas. The paper states 0, 0.05, 0.1 and 0.3.
        seeds: random seeds, separated by commas.
        out: parent directory of the cells. Default: results/vit/DATA.
        jobs: number of cells trained at the same time, at most; 1 trains one after another in this process, without Ray.
            Default: as many as there are CPUs and GPUs for.
        address: address of a Ray cluster, or auto for the cluster that this machine belongs to; all its machines must be
            able to write to OUT. Default: Ray on this machine alone.
        cpus_per_cell: CPUs per cell.
        gpus_per_cell: GPUs per cell; cells share a GPU at a fraction. Default: 1 if there are GPUs, else 0.
        retries: number of times that a crashed cell is started again.
        dry_run: print what would be trained, the expected time and disk space, and the questions that so
            many decays, rates and seeds can't answer.
    """

    weight_decays: float | str = WEIGHT_DECAYS
    drop_paths: float | str = DROP_PATHS
    seeds: int | str = "0"
    out: Path | None = None
    jobs: int | None = None
    address: str | None = None
    cpus_per_cell: float = 1.0
    gpus_per_cell: float | None = None
    retries: int = 1
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Take the directory as text, too."""
        self.out = as_path("out", self.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser, summary
    from tracker.measures.options import add_flags

    parser = Parser(prog="python -m vit.grid", description=summary(GridCommand))
    parser.add_class_arguments(GridCommand, as_group=False)
    parser.add_class_arguments(Recipe, as_group=False, skip={*SETTINGS, "out", "options"})
    add_flags(parser, DEFAULTS, FLAGS)
    settings = parse(parser, arguments)
    grid = GridCommand(**{name: settings[name] for name in GridCommand.__dataclass_fields__})
    return run(grid, from_dict(settings))


@reports_errors(
    interrupted="interrupted; the same command continues each cell from its last finished epoch"
)
def run(grid: GridCommand, recipe: Recipe) -> int:
    """Train the missing cells of a grid and show their progress; return the exit status."""
    recipes = cells(grid, recipe)
    for cell in recipes:
        check_settings(cell)
    missing = [cell for cell in recipes if not is_done(cell.directory)]
    counts = f"{counted(len(recipes), 'cell')}, {len(recipes) - len(missing)} already done"
    out = recipes[0].directory.parent
    with _training(grid, missing) as failures:
        from tracker.loggers.wandb import resolve_mode
        from vit.augment import parse as parse_policy
        from vit.data import load

        if grid.jobs == 1:
            from vit.training import check_accelerator

            check_accelerator(recipe.accelerator)
        resolve_mode(recipe.wandb)
        parse_policy(recipe.rand_augment)
        data = load(recipe)  # missing or damaged data is reported once here, not by every cell
        if grid.dry_run:
            print(
                f"{counts}; results would be in {out}; nothing is trained, and nothing is written"
            )
            if missing:
                print(describe(missing, recipes, len(data.train), len(data.classes)))
            return OK
        for cell in missing:
            # None, or a directory that can't be used, which is reported when it is trained
            with suppress(OSError):
                (cell.directory / "failed.json").unlink()  # of an earlier run of the grid
        print(f"{counts}; results in {out}, where log.txt of a cell says how far it is", flush=True)
        with shown(missing):
            for cell, error in failures:
                record_failure(cell, error)
    bad = [
        cell
        for cell in recipes
        if (read(cell.directory, "result") or {}).get("status") != "finished"
    ]
    for cell in bad:
        print(f"{cell.cell}: {state_of(cell)}", file=sys.stderr)
    print(f"analysis: python -m vit.analysis {quote(str(out))}")
    return FAILED if bad else OK


@contextmanager
def _training(
    grid: GridCommand, missing: Sequence[Recipe]
) -> Iterator[Iterator[tuple[Recipe, str]]]:
    """Yield an iterator that trains the missing cells, here or on Ray; its items are those that failed, with the last error."""
    if grid.jobs == 1 or grid.dry_run or not missing:
        yield train_in_turn(missing, grid.retries)
        return
    from vit import cluster

    # Absolute paths, because a process of Ray may have another current directory.
    data = missing[0].data_dir and missing[0].data_dir.resolve()
    absolute = [replace(cell, out=cell.directory.resolve(), data_dir=data) for cell in missing]
    cpus, may_use_gpus = grid.cpus_per_cell, missing[0].accelerator in ("auto", "gpu", "cuda")
    with cluster.connected(grid.address, cpus, grid.gpus_per_cell if may_use_gpus else 0.0) as gpus:
        yield cluster.failures(train_on_ray, absolute, grid.jobs, cpus, gpus, grid.retries)


def train_on_ray(recipe: Recipe) -> None:
    """Train a cell in this process of Ray; an error is raised as text, since not every one can be sent to another process."""
    for _, error in train_in_turn([recipe], retries=0):
        raise RuntimeError(error)


def train_in_turn(recipes: Sequence[Recipe], retries: int) -> Iterator[tuple[Recipe, str]]:
    """Train cells one after another in this process; yield those that failed at every try, with the last error.

    A cell that another process trains comes last, and is waited for.
    """
    from vit.training import train_cell

    while recipes:
        busy = []
        for recipe in recipes:
            for left in range(retries, -1, -1):
                try:
                    train_cell(recipe)
                except BusyError:
                    busy.append(recipe)
                except Exception:  # whatever is wrong with this cell, the others are trained
                    if left:
                        continue
                    yield recipe, traceback.format_exc().strip()
                break
        if recipes := busy:
            names = ", ".join(recipe.cell for recipe in busy)
            print(f"{names}: trained by another process; waiting for it", flush=True)
            time.sleep(PATIENCE)


def cells(grid: GridCommand, recipe: Recipe) -> list[Recipe]:
    """Return one validated recipe per cell.

    Raises:
        ValueError: for a value that is given twice or is not allowed.
    """
    if (grid.jobs is not None and grid.jobs < 1) or grid.retries < 0:
        raise ValueError(
            f"--jobs {grid.jobs} --retries {grid.retries}; give at least 1 job and 0 retries"
        )
    if grid.address and grid.jobs == 1:
        raise ValueError(
            f"--address {grid.address} --jobs 1; one cell at a time is trained here: give more jobs, or no address"
        )
    if recipe.devices > 1:
        raise ValueError(
            f"--devices {recipe.devices}; each cell of a grid trains on one device: leave it out"
        )
    axes = [
        _values("--weight_decays", grid.weight_decays, float),
        _values("--drop_paths", grid.drop_paths, float),
        _values("--seeds", grid.seeds, int),
    ]
    out = grid.out or Path("results") / "vit" / recipe.data_name
    points = [
        replace(recipe, weight_decay=decay, drop_path=rate, seed=seed)
        for decay, rate, seed in product(*axes)
    ]
    points = [replace(point, out=out / point.cell) for point in points]
    for point in points:
        check(point)
    return points


def _values(option: str, text: Any, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(part) for part in str(text).split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r}; give numbers separated by commas") from error
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{option} {text}; {value:g} is given twice")
    return values


if __name__ == "__main__":
    sys.exit(main())
