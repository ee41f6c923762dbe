"""Correlations of accuracy and coupling over the cells of a grid.

Coupling = -mis-coupling, after the last step, mean over probe images. For the cells of one stochastic depth rate

    r = corr(coupling, accuracy),  R^2 = r^2,  p from t = r sqrt(df / (1 - r^2)),  df = n - 2        (paper, Fig. 6a)

For all cells within rates ("fixed"), the same after each rate's means are subtracted, with df = n - 1 - the number of rates: the
correlation that the rate does not explain (`tracker.analysis.regression`). p is also corrected for the number of mis-couplings,
K and layer pairs tested. Seeds of one setting are not independent; where there are several, a second fit averages them
(cluster_n, cluster_r, cluster_r2, cluster_p).
"""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.regression import holm
from tracker.analysis.statistics import correlations as fits
from tracker.analysis.statistics import curves
from tracker.errors import UsageError
from tracker.measures.registry import MISCOUPLINGS
from tracker.results import open_results
from vit.cells import read


def read_grid(directory: Path) -> xr.Dataset:
    """Read all finished cells of a grid.

    Returns:
        `accuracy` (cell), in [0, 1], and `loss`; `miscoupling` and its `null` (cell, step, measure, k, pairs); along
        `cell` the coordinates weight_decay, drop_path and seed. The attribute `unfinished` lists the cells left out and why.

    Raises:
        FileNotFoundError: if no finished cell has coupling.
        UsageError: if cells were trained by different recipes.
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
            f"{directory} has no finished cell with coupling measured; give a grid's --out directory"
        )
    first, *others = recipes.items()
    for name, recipe in others:
        differing = {key for key in recipe if recipe[key] != first[1].get(key)}
        if differing:
            raise UsageError(
                f"{directory} mixes recipes: {name} and {first[0]} differ in {', '.join(sorted(differing))}; analyse cells "
                "of one recipe"
            )
    # Cells measured before a mis-coupling was added lack it.
    shared = [name for name in MISCOUPLINGS if all(name in cell["measure"] for cell in finished)]
    grid = xr.concat([cell.sel(measure=shared) for cell in finished], "cell", coords="all", join="exact")
    return grid.assign_attrs(unfinished=unfinished, images=images, data=first[1]["data"])


def correlations(grid: xr.Dataset) -> pd.DataFrame:
    """Fit accuracy on coupling for each rate and within rates, by measure, K and layer pairs.

    Returns:
        A row per fit, as `tracker.analysis.statistics.correlations`; drop_path is the rate or "fixed" (within rates), and
        p_holm is corrected for all rows.
    """
    last, accuracy = -grid["miscoupling"].isel(step=-1), grid["accuracy"].values
    rates, setting = grid["drop_path"].values, settings(grid)
    parts = {f"{rate:g}": (rates == rate, None) for rate in sorted(set(rates))}
    parts |= {"fixed": (slice(None), rates)} if len(parts) > 1 else {}
    tables = []
    for name, (chosen, groups) in parts.items():
        table = fits(last.isel(cell=chosen).transpose("cell", ...), accuracy[chosen], groups, setting[chosen])
        table.insert(0, "drop_path", name)
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def settings(grid: xr.Dataset) -> np.ndarray:
    """Number the settings: equal for cells that differ only in their seed."""
    both = np.stack([grid["weight_decay"].values, grid["drop_path"].values])
    return np.unique(both, axis=1, return_inverse=True)[1].ravel()


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """Return a row per cell: its settings, accuracy, loss, and every mis-coupling after the last step."""
    last = grid["miscoupling"].isel(step=-1).stack(what=("measure", "k", "pairs"))
    settings = ["weight_decay", "drop_path", "seed"]
    table = pd.DataFrame({name: grid[name].values for name in (*settings, "accuracy", "loss")})
    for i, (measure, k, pairs) in enumerate(last["what"].values):
        table[f"{measure}/k{k}/{pairs}"] = last.isel(what=i).values
    return table.sort_values(settings, ignore_index=True)
