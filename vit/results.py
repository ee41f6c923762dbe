"""What the analysis reads of a grid: the mis-couplings, losses and accuracies of its finished cells.

`read_grid` reads the directory of a grid, or a file that `write_grid` wrote of one, from which the analysis can be repeated
without the trainings.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tracker.analysis.reduction import read_miscouplings
from tracker.common.errors import UsageError
from tracker.common.files import write_atomic
from tracker.common.text import by_cause
from tracker.netcdf import decoded, file_content, read_content, seal
from tracker.store import Store
from vit.cells import read

POSITIONS = {"cls": "class token", "0": "class token", "-1": "last patch", "last": "last patch"}
GRID_FILE = "grid.nc"  # what the analysis reads of all cells


def read_grid(*sources: str | Path) -> xr.Dataset:
    """Read all finished cells of a grid, from its directory, from files that the analysis wrote (`GRID_FILE`), or from both.

    Returns:
        `accuracy` (cell), in [0, 1], and `loss`, of the test; `miscoupling` and its `null` level (cell, step, token, measure,
        k, pairs), NaN in a file that was made without it; `training_loss` (cell, step), NaN where it
        was not recorded; along `cell` the coordinates weight_decay, drop_path and seed. The attribute `unfinished` lists the
        cells left out and why, `recipe` is what all cells share, `chance` the accuracy of one answer for all test images, if it
        was recorded.

    Raises:
        FileNotFoundError: if no finished cell has coupling.
        UsageError: if cells were trained by different recipes, or a cell is given twice.
    """
    paths = map(Path, sources)
    read_sources = [
        (path, _read_file(path) if path.is_file() else _read_directory(path)) for path in paths
    ]
    unfinished = [line for _, part in read_sources for line in part.attrs["unfinished"]]
    parts = [(source, part) for source, part in read_sources if part.sizes]
    if not parts:
        raise FileNotFoundError(
            f"{' '.join(map(str, sources))} has no finished cell with coupling measured; give a grid's --out directory"
        )
    (first, part), *others = parts
    for source, other in others:
        _require_same(
            json.loads(other.attrs["recipe"]), json.loads(part.attrs["recipe"]), source, first
        )
    grid = xr.concat([cells for _, cells in parts], "cell", coords="all", join="exact")
    names = list(
        zip(
            *(grid[name].values.tolist() for name in ("weight_decay", "drop_path", "seed")),
            strict=True,
        )
    )
    for decay, rate, seed in {name for name in names if names.count(name) > 1}:
        raise UsageError(
            f"weight decay {decay:g}, rate {rate:g}, seed {seed} is given twice; give each cell once"
        )
    return grid.assign_attrs(part.attrs, unfinished=unfinished)


def write_grid(grid: xr.Dataset, file: Path) -> None:
    """Write what the analysis reads of a grid to one file, from which it can be repeated without the trainings."""
    content = file_content(grid.assign_attrs(unfinished=json.dumps(grid.attrs["unfinished"])))
    write_atomic(file, content, seal(content))


def _read_file(file: Path) -> xr.Dataset:
    try:
        grid = decoded(read_content(file))
        return grid.assign_attrs(unfinished=json.loads(grid.attrs["unfinished"]))
    except (ValueError, KeyError) as error:
        raise UsageError(f"{file} is no {GRID_FILE} that vit.analysis wrote ({error})") from error


def _read_directory(directory: Path) -> xr.Dataset:
    """Read the finished cells of a directory; without any, return a Dataset without variables."""
    unfinished, first, images, chance = [], None, 0, {}
    finished: dict[str, xr.Dataset] = {}
    for cell in sorted(path.parent for path in directory.glob("*/recipe.json")):
        result = read(cell, "result")
        if (
            result is None
            or result["status"] != "finished"
            or not (cell / "coupling" / "units").is_dir()
        ):
            why = (
                "no result yet"
                if result is None
                else result["reason"] or "coupling was not measured"
            )
            unfinished.append(f"{cell.name}: {(read(cell, 'failed') or {}).get('reason', why)}")
            continue
        if skipped := Store(cell / "coupling").skipped():
            unfinished.append(f"{cell.name}: no results of {'; '.join(by_cause(skipped))}")
            continue
        recipe, images = result["recipe"], result["images"]["test"]
        if "chance" in result:
            chance = {"chance": result["chance"]}
        varied = {name: recipe.pop(name) for name in ("weight_decay", "drop_path", "seed")}
        first = first or (cell, recipe)
        _require_same(recipe, first[1], cell, first[0])
        store = Store(cell / "coupling")
        points = read_miscouplings(store.path)
        # What the measurement chose
        tokens = recipe["tokens"] or store.attributes(store.steps()[-1])["tokens"]
        losses = {row["step"]: row["loss"] for row in read(cell, "progress") or ()}
        finished[cell.name] = points.assign_coords(
            varied | {"token": _positions(tokens, points.sizes["token"])}
        ).assign(
            accuracy=result["accuracy"],
            loss=result["loss"],
            training_loss=("step", [losses.get(int(step), np.nan) for step in points["step"]]),
        )
    steps = set().union(*(points["step"].values.tolist() for points in finished.values()))
    for name, points in list(finished.items()):
        if lacking := steps - {*points["step"].values.tolist()}:
            unfinished.append(
                f"{name}: not measured at {', '.join(f'step {step}' for step in sorted(lacking))}"
            )
            del finished[name]
    if not finished or first is None:
        return xr.Dataset(attrs={"unfinished": unfinished})
    _, recipe = first
    grid = xr.concat(list(finished.values()), "cell", coords="all", join="exact")
    # In models of L blocks, `mean` is `mean_offdiag` times (L - 1) / L.
    return grid.drop_sel(pairs="mean").assign_attrs(
        unfinished=unfinished,
        images=images,
        data=recipe["data"],
        recipe=json.dumps(recipe, sort_keys=True),
        **chance,
    )


def _require_same(recipe: dict, other: dict, where: Path, elsewhere: Path) -> None:
    differing = {key for key in recipe.keys() | other.keys() if recipe.get(key) != other.get(key)}
    if differing:
        raise UsageError(
            f"recipes are mixed: {where} and {elsewhere} differ in {', '.join(sorted(differing))}; analyse cells of one recipe"
        )


def _positions(tokens: Any, count: int) -> list[str]:
    named = [POSITIONS.get(token, f"position {token}") for token in str(tokens).split(",")]
    return named if len(named) == count else [f"token {i}" for i in range(count)]
