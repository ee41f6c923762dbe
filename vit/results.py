"""What the analysis reads of a grid: the mis-couplings, losses and accuracies of its finished cells.

`read_grid` reads the directory of a grid, or a file that `write_grid` wrote of one, from which the analysis can be repeated
without the trainings.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.reduction import read_miscouplings
from tracker.common.errors import UsageError
from tracker.common.files import write_atomic
from tracker.common.text import by_cause
from tracker.netcdf import decoded, file_content, read_content, seal
from tracker.store import Store
from vit.cells import read
from vit.recipe import SETTINGS

# Positions as --tokens takes them; messages name the last word of each
POSITIONS = {"0": "class token", "cls": "class token", "-1": "last patch", "last": "last patch"}
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
    parts: list[tuple[Path, xr.Dataset]] = []
    unfinished = []
    for source in map(Path, sources):
        cells = sorted(path.parent for path in source.glob("*/recipe.json"))
        for where in [source] if source.is_file() else cells:
            part = _read_file(where) if where.is_file() else _read_cell(where)
            if isinstance(part, str):
                unfinished.append(f"{where.name}: {part}")
                continue
            unfinished += json.loads(part.attrs["unfinished"])
            parts.append((where, part))
            _require_same_recipe(*parts[0], where, part)
    steps = set().union(*(part["step"].values.tolist() for _, part in parts))
    complete = []
    for where, part in parts:
        if lacking := sorted(steps.difference(part["step"].values.tolist())):
            listed = ", ".join(f"step {step}" for step in lacking)
            unfinished.append(f"{where.name}: not measured at {listed}")
        else:
            complete.append(part)
    if not complete:
        raise FileNotFoundError(
            f"{' '.join(map(str, sources))} has no finished cell with coupling measured; give a grid's --out directory"
        )
    grid = xr.concat(complete, "cell", coords="all", join="exact")
    settings = pd.MultiIndex.from_arrays([grid[name].values for name in SETTINGS])
    for decay, rate, seed in settings[settings.duplicated()]:
        raise UsageError(
            f"weight decay {decay:g}, rate {rate:g}, seed {seed} is given twice; give each cell once"
        )
    known = {name: value for part in complete for name, value in part.attrs.items()}
    return grid.assign_attrs(known, unfinished=unfinished)


def write_grid(grid: xr.Dataset, file: Path) -> None:
    """Write what the analysis reads of a grid to one file, from which it can be repeated without the trainings."""
    content = file_content(grid.assign_attrs(unfinished=json.dumps(grid.attrs["unfinished"])))
    write_atomic(file, content, seal(content))


def _read_file(file: Path) -> xr.Dataset:
    try:
        grid = decoded(read_content(file))
        json.loads(grid.attrs["unfinished"])
    except (ValueError, KeyError) as error:
        raise UsageError(f"{file} is no {GRID_FILE} that vit.analysis wrote ({error})") from error
    return grid


def _read_cell(cell: Path) -> xr.Dataset | str:
    """Read the directory of a finished cell, as a grid of one; of another, return why it is left out."""
    result = read(cell, "result")
    measured = (cell / "coupling" / "units").is_dir()
    if result is None or result["status"] != "finished" or not measured:
        why = "no result yet" if result is None else result["reason"] or "coupling was not measured"
        return (read(cell, "failed") or {}).get("reason", why)
    store = Store(cell / "coupling")
    if skipped := store.skipped():
        return f"no results of {'; '.join(by_cause(skipped))}"
    recipe = result["recipe"]
    varied = {name: ("cell", [recipe.pop(name)]) for name in SETTINGS}
    # In models of L blocks, `mean` is `mean_offdiag` times (L - 1) / L.
    points = read_miscouplings(store.path).drop_sel(pairs="mean").expand_dims("cell")
    # What the measurement chose
    tokens = recipe["tokens"] or store.attributes(store.steps()[-1])["tokens"]
    losses = {row["step"]: row["loss"] for row in read(cell, "progress") or ()}
    at_steps = [losses.get(step, np.nan) for step in points["step"].values.tolist()]
    return (
        points.assign_coords(varied | {"token": _positions(tokens, points.sizes["token"])})
        .assign(
            accuracy=("cell", [result["accuracy"]]),
            loss=("cell", [result["loss"]]),
            training_loss=(("cell", "step"), [at_steps]),
        )
        .assign_attrs(
            {"chance": result["chance"]} if "chance" in result else {},
            images=result["images"]["test"],
            data=recipe["data"],
            recipe=json.dumps(recipe, sort_keys=True),
            unfinished="[]",
        )
    )


def _require_same_recipe(first: Path, part: xr.Dataset, where: Path, other: xr.Dataset) -> None:
    one, another = (json.loads(of.attrs["recipe"]) for of in (part, other))
    differing = {key for key in one.keys() | another.keys() if one.get(key) != another.get(key)}
    if differing:
        raise UsageError(
            f"recipes are mixed: {where} and {first} differ in {', '.join(sorted(differing))}; analyse cells of one recipe"
        )


def _positions(tokens: Any, count: int) -> list[str]:
    named = [POSITIONS.get(token, f"position {token}") for token in str(tokens).split(",")]
    return named if len(named) == count else [f"token {i}" for i in range(count)]
