"""The grid: `python -m vit.grid` trains one vision transformer for every weight decay x stochastic depth x seed.

All other options are those of the recipe, as in vit.train. A finished cell is not run again; one that diverges or crashes
is recorded and the others continue; the same command resumes an interrupted grid. No heavy module is imported before the
arguments are read.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from checkpoints.cli import FAILED, OK, reports_errors
from tracker.values import as_path
from vit import processes
from vit.cells import check_settings, is_done, read
from vit.command import parse
from vit.overview import shown, state_of
from vit.recipe import DEFAULTS, FLAGS, Recipe, check, from_dict
from vit.resources import check_accelerator, check_ray

# The weight decays are the paper's. It states 64 trainings, hence eight stochastic depth rates, but only 0, 0.05, 0.1 and
# 0.3 of them; the others are our choice.
WEIGHT_DECAYS = "0.005,0.01,0.02,0.04,0.06,0.08,0.1,0.2"
DROP_PATHS = "0,0.05,0.1,0.15,0.2,0.25,0.3,0.35"


@dataclass
class Grid:
    """Train a vision transformer for every weight decay x stochastic depth x seed, and measure coupling in each.

    Results go to OUT/CELL, in the format of vit.train; `python -m vit.analysis OUT` analyzes them. Exit status: 0 all
    trained; 1 some cell diverged or crashed (listed at the end, the others kept); 2 bad usage; 130 interrupted.

    Args:
        weight_decays: weight decays, separated by commas. Default: the paper's.
        drop_paths: stochastic depth rates, separated by commas. The paper states 0, 0.05, 0.1 and 0.3.
        seeds: random seeds, separated by commas.
        out: parent directory of the cells. Default: results/vit/DATA.
        engine: ray, or processes on this machine; auto is ray if it is installed, else processes.
        jobs: number of cells trained at the same time, with processes; they are spread over the GPUs that
            CUDA_VISIBLE_DEVICES names. Default: one for each GPU, or 1 / gpus_per_cell; 1 without a GPU.
        address: address of a Ray cluster, or auto for the cluster that this machine belongs to; all its machines must be
            able to write to OUT. Default: Ray on this machine alone.
        cpus_per_cell: CPUs per cell, with Ray.
        gpus_per_cell: GPUs per cell; cells share a GPU at a fraction. Default: 1 if there are GPUs, else 0.
        retries: number of times that a crashed cell is started again.
        dry_run: print what would be trained, and the expected time, memory and disk space, from a few batches.
    """

    weight_decays: float | str = WEIGHT_DECAYS
    drop_paths: float | str = DROP_PATHS
    seeds: int | str = "0"
    out: Path | None = None
    engine: Literal["auto", "ray", "processes"] = "auto"
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
    from tracker.cli import Parser, summary
    from tracker.measures.options import add_flags

    parser = Parser(prog="python -m vit.grid", description=summary(Grid))
    parser.add_class_arguments(Grid, as_group=False)
    parser.add_class_arguments(Recipe, as_group=False, skip={"weight_decay", "drop_path", "seed", "out", "options"})
    add_flags(parser, dict.fromkeys(DEFAULTS), FLAGS)
    settings = parse(parser, arguments)
    grid = Grid(**{name: settings[name] for name in Grid.__dataclass_fields__})
    return run(grid, from_dict(settings))


@reports_errors(interrupted="interrupted; the same command continues each cell from its last finished epoch")
def run(grid: Grid, recipe: Recipe) -> int:
    """Train the missing cells of a grid and show their progress; return the exit status."""
    recipes = cells(grid, recipe)
    engine = _engine(grid)
    for cell in recipes:
        check_settings(cell.directory, cell)
    missing = [cell for cell in recipes if not is_done(cell.directory)]
    use = _use(grid, recipe, engine)
    if grid.dry_run:
        return _dry_run(recipes, missing, engine, use.jobs)
    share = 0.0
    if missing and engine == "processes":
        processes.start_server()
    elif missing:
        from vit import tune

        share = tune.connect(grid.address, grid.cpus_per_cell, use.share)
    from tracker.loggers.wandb import resolve_mode
    from vit.augment import check_policy
    from vit.data import load
    from vit.model import build

    resolve_mode(recipe.wandb)
    check_policy(recipe)
    data = load(recipe)  # missing or damaged data is reported once here, not by every cell; so is an unsuitable model
    build(recipes[-1], len(data.classes))
    for cell in missing:
        with suppress(OSError):  # none, or a directory that can't be used, which its worker reports
            (cell.directory / "failed.json").unlink()  # of an earlier run of the grid
    out = recipes[0].directory.parent
    print(f"{len(recipes)} cells, {len(recipes) - len(missing)} already done; {engine}; results in {out}", flush=True)
    with shown(recipes, missing, use.jobs, use.on_a_gpu) as ended:
        if missing and engine == "ray":
            from vit import tune

            tune.run_cells(missing, out / ".ray", grid.cpus_per_cell, share, grid.retries, ended)
        elif missing:
            processes.run_cells(missing, use.jobs or 1, grid.retries, ended, use.gpus)
    bad = {
        cell.cell: state_of(cell)
        for cell in recipes
        if (read(cell.directory, "result") or {}).get("status") != "finished"
    }
    for name, state in bad.items():
        print(f"{name}: {state}", file=sys.stderr)
    print(f"analysis: python -m vit.analysis {out}")
    return FAILED if bad else OK


@dataclass(frozen=True)
class Use:
    """What the cells of a grid use.

    Attributes:
        jobs: number of cells at a time; None where Ray decides.
        gpus: names of this machine's GPUs, for processes.
        share: GPUs per cell, for Ray; None: 1 if its machines have any.
        on_a_gpu: number of cells that share a GPU.
    """

    jobs: int | None
    gpus: Sequence[str]
    share: float | None
    on_a_gpu: float


def _use(grid: Grid, recipe: Recipe, engine: str) -> Use:
    """Return what the cells use.

    Raises:
        ValueError: if it is known not to exist.
    """
    on_gpus, share = recipe.accelerator in ("auto", "gpu", "cuda"), grid.gpus_per_cell
    if engine == "ray":
        share = share if on_gpus else share or 0.0
        check_ray(grid.address, grid.cpus_per_cell, share)
        return Use(grid.jobs, (), share, 1 / (share or 1.0))
    check_accelerator(recipe.accelerator)
    gpus = processes.visible_gpus() if on_gpus else []
    on_one = max(1, int(1 / share + 1e-9)) if share else 1  # a cell never takes parts of two GPUs
    whole = max(1.0, share or 1.0)
    jobs = grid.jobs or max(1, int(len(gpus) * on_one / whole))
    return Use(jobs, gpus, share, jobs / max(len(gpus), 1))


def _dry_run(recipes: Sequence[Recipe], missing: Sequence[Recipe], engine: str, jobs: int | None) -> int:
    """Print what the grid would take."""
    from vit.data import load
    from vit.dry_run import describe

    print(f"{engine}; results in {recipes[0].directory.parent}")
    started = time.perf_counter()
    data = load(recipes[0])
    print(describe(recipes, missing, data, time.perf_counter() - started, jobs), flush=True)
    return OK


def cells(grid: Grid, recipe: Recipe) -> list[Recipe]:
    """Return one validated recipe per cell.

    Raises:
        ValueError: for a value that is given twice or is not allowed.
    """
    if (grid.jobs is not None and grid.jobs < 1) or grid.retries < 0:
        raise ValueError(f"--jobs {grid.jobs} --retries {grid.retries}; give at least 1 job and 0 retries")
    if recipe.devices * recipe.num_nodes > 1:
        raise ValueError("--devices or --num_nodes above 1; each cell of a grid trains on one device: leave them out")
    axes = [
        _values("--weight_decays", grid.weight_decays, float),
        _values("--drop_paths", grid.drop_paths, float),
        _values("--seeds", grid.seeds, int),
    ]
    out = grid.out or Path("results") / "vit" / recipe.data_name
    group = recipe.group or f"grid-{recipe.data_name}"
    points = [
        replace(recipe, weight_decay=decay, drop_path=rate, seed=seed, group=group)
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
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{option} {text}; {', '.join(f'{value:g}' for value in twice)} is given twice")
    return values


def _engine(grid: Grid) -> str:
    installed = importlib.util.find_spec("ray") is not None
    if grid.engine == "ray" and not installed:
        raise ValueError(
            "--engine ray; Ray is not installed: pip install 'block-coupling-tracker[ray]', or --engine processes"
        )
    if grid.address and (grid.engine == "processes" or not installed):
        raise ValueError(f"--address {grid.address}; a cluster needs Ray: pip install 'block-coupling-tracker[ray]'")
    return "ray" if installed and grid.engine != "processes" else "processes"


if __name__ == "__main__":
    sys.exit(main())
