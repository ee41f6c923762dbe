"""Does accuracy follow coupling? A grid's numbers, and what may be said of them.

Coupling = -mis-coupling, after the last step, the mean over probe images. For cells of one stochastic depth rate

    r = corr(coupling, accuracy),  R^2 = r^2,  p from t = r sqrt(df / (1 - r^2)),  df = n - 2        (paper, Fig. 6a)

and for all cells at a fixed rate the same after each rate's means are subtracted, df = n - 1 - the number of rates: what
coupling says beyond the rate (`tracker.analysis.regression`). Many mis-couplings, K and averages are tried, so p is also
corrected.
Seeds of one setting are no settings of their own: where there are several, a second fit averages them (cluster_n, cluster_r,
cluster_r2, cluster_p).
"""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.regression import holm
from tracker.analysis.statistics import correlations as fits
from tracker.analysis.statistics import curves
from tracker.measures.registry import MISCOUPLINGS
from tracker.results import open_results
from vit.cells import read


def read_grid(directory: Path) -> xr.Dataset:
    """All finished cells of a grid.

    Returns:
        `accuracy` (cell), in [0, 1], and `loss`; `miscoupling` and its `null` (cell, step, measure, k, pairs); along
        `cell` the coordinates weight_decay, drop_path and seed. Attribute `unfinished`: the cells left out, and why.

    Raises:
        FileNotFoundError: if no cell with coupling is finished.
        ValueError: if cells were trained by different recipes.
    """
    finished, unfinished, recipes, images = [], [], {}, 0
    for cell in sorted(path.parent for path in directory.glob("*/recipe.json")):
        result = read(cell, "result")
        if result is None or result["status"] != "finished" or not (cell / "coupling" / "units").is_dir():
            why = "no result yet" if result is None else result["reason"] or "coupling was not measured"
            unfinished.append(f"{cell.name}: {(read(cell, 'failed') or {}).get('reason', why)}")
            continue
        points = curves(open_results(cell / "coupling"))
        measure = xr.IndexVariable("measure", [name for name in MISCOUPLINGS if name in points])
        recipe, images = result["recipe"], result["images"]["test"]
        varied = {name: recipe.pop(name) for name in ("weight_decay", "drop_path", "seed")}
        recipes[cell.name] = recipe
        finished.append(
            xr.Dataset(
                {
                    "miscoupling": xr.concat([points[name] for name in measure.values], measure),
                    "null": xr.concat([points[f"{name}_null"] for name in measure.values], measure),
                    "accuracy": result["accuracy"],
                    "loss": result["loss"],
                },
                coords=varied,
            )
        )
    if not finished:
        raise FileNotFoundError(
            f"{directory} holds no finished cell with coupling measured; give a grid's --out directory"
        )
    first, *others = recipes.items()
    for name, recipe in others:
        differing = {key for key in recipe if recipe[key] != first[1].get(key)}
        if differing:
            raise ValueError(
                f"{directory} mixes recipes: {name} and {first[0]} differ in {', '.join(sorted(differing))}; analyse cells "
                "of one recipe"
            )
    # Cells measured before a mis-coupling was added lack it.
    shared = [name for name in MISCOUPLINGS if all(name in cell["measure"] for cell in finished)]
    grid = xr.concat([cell.sel(measure=shared) for cell in finished], "cell", coords="all", join="exact")
    return grid.assign_attrs(unfinished=unfinished, images=images, data=first[1]["data"])


def correlations(grid: xr.Dataset) -> pd.DataFrame:
    """One regression for each stochastic depth rate and for all cells at fixed rate, measure, K and choice of layer pairs.

    `p_holm` is corrected for all rows of the whole table.
    """
    last, accuracy = -grid["miscoupling"].isel(step=-1), grid["accuracy"].values
    rates, setting = grid["drop_path"].values, settings(grid)
    parts = {f"{rate:g}": (rates == rate, None) for rate in sorted(set(rates))}
    parts |= {"fixed": (slice(None), rates)} if len(parts) > 1 else {}
    tables = []
    for name, (there, groups) in parts.items():
        table = fits(last.isel(cell=there).transpose("cell", ...), accuracy[there], groups, setting[there])
        table.insert(0, "drop_path", name)
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def settings(grid: xr.Dataset) -> np.ndarray:
    """A number for each cell, the same for seeds of one weight decay and stochastic depth rate."""
    both = np.stack([grid["weight_decay"].values, grid["drop_path"].values])
    return np.unique(both, axis=1, return_inverse=True)[1].ravel()


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """One row per cell: its settings, accuracy, loss, and every mis-coupling after the last step."""
    last = grid["miscoupling"].isel(step=-1).stack(what=("measure", "k", "pairs"))
    settings = ["weight_decay", "drop_path", "seed"]
    table = pd.DataFrame({name: grid[name].values for name in (*settings, "accuracy", "loss")})
    for i, (measure, k, pairs) in enumerate(last["what"].values):
        table[f"{measure}/k{k}/{pairs}"] = last.isel(what=i).values
    return table.sort_values(settings, ignore_index=True)
