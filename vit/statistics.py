"""Does accuracy follow coupling? A grid's numbers, and what may be said of them.

Coupling = -mis-coupling, after the last step, the mean over probe images. For cells of one stochastic depth rate

    r = corr(coupling, accuracy),  R^2 = r^2,  p from t = r sqrt(df / (1 - r^2)),  df = n - 2        (paper, Fig. 6a)

and for all cells at a fixed rate the same after each rate's means are subtracted, df = n - 1 - the number of rates: what
coupling says beyond the rate. Intervals are 95 % bootstrap percentiles over cells. Many mis-couplings, K and averages are
tried, so p is also corrected by Holm's method, which holds whatever their dependence.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from tracker.coupling import MEASURES
from tracker.results import open_results
from tracker.statistics import curves
from vit.cells import read

FEWEST = 4  # cells that a line is fitted to: two make R^2 = 1, three nearly so
RESAMPLES = 2000


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
        measure = xr.IndexVariable("measure", [name for name in MEASURES if name in points])
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
    grid = xr.concat(finished, "cell", coords="all", join="exact")
    return grid.assign_attrs(unfinished=unfinished, images=images, data=first[1]["data"])


def regress(coupling: np.ndarray, accuracy: np.ndarray, groups: np.ndarray | None = None) -> dict[str, float]:
    """Linear regression of accuracy on coupling, at fixed group where groups are given.

    Returns:
        n, r, r2, slope, p, and r2_low, r2_high: the bootstrap interval. NaN but for n where fewer than four cells, or no
        spread, let nothing be said.
    """
    x, y = np.asarray(coupling, float), np.asarray(accuracy, float)
    labels = np.zeros(len(x)) if groups is None else np.asarray(groups)
    kinds = np.unique(labels)
    for kind in kinds:
        x, y = (np.where(labels == kind, v - v[labels == kind].mean(), v) for v in (x, y))
    df = len(x) - len(kinds) - 1
    r2 = float(_r2(x, y))
    out = dict.fromkeys(("r", "r2", "slope", "p", "r2_low", "r2_high"), float("nan")) | {"n": len(x)}
    if len(x) < FEWEST or df < 1 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return out
    slope = float(x @ y / (x @ x))
    r = float(np.copysign(np.sqrt(r2), slope))
    p = 2 * stats.t.sf(np.sqrt(r2 * df / max(1 - r2, 1e-300)), df)
    interval = stats.bootstrap(
        (x, y),
        _r2,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return out | {"r": r, "r2": r2, "slope": slope, "p": float(p), "r2_low": interval.low, "r2_high": interval.high}


def _r2(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    """Squared correlation; 0 where one of the two does not vary, as in a resample of one cell alone."""
    x, y = (v - v.mean(axis, keepdims=True) for v in (x, y))
    spread = (x * x).sum(axis) * (y * y).sum(axis)
    return (x * y).sum(axis) ** 2 / np.where(spread > 0, spread, 1)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction; NaN (not tried) stays NaN and does not count.

    >>> holm(np.array([0.01, 0.04, 0.03, np.nan])).round(3).tolist()
    [0.03, 0.06, 0.06, nan]
    """
    out = np.full_like(p, np.nan)
    tried = np.flatnonzero(np.isfinite(p))
    order = tried[np.argsort(p[tried])]
    out[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return out


def correlations(grid: xr.Dataset) -> pd.DataFrame:
    """One regression for each stochastic depth rate and for all cells at fixed rate, measure, K and choice of layer pairs.

    `p_holm` is corrected for all rows of the table.
    """
    last = -grid["miscoupling"].isel(step=-1)
    rates = grid["drop_path"].values
    rows = []
    for measure in last["measure"].values:
        for k in last["k"].values:
            for pairs in last["pairs"].values:
                coupling = last.sel(measure=measure, k=k, pairs=pairs).values
                label = {"measure": str(measure), "k": int(k), "pairs": str(pairs)}
                for rate in sorted(set(rates)):
                    there = rates == rate
                    fit = regress(coupling[there], grid["accuracy"].values[there])
                    rows.append({"drop_path": f"{rate:g}", **label, **fit})
                if len(set(rates)) > 1:
                    fit = regress(coupling, grid["accuracy"].values, rates)
                    rows.append({"drop_path": "fixed", **label, **fit})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """One row per cell: its settings, accuracy, loss, and every mis-coupling after the last step."""
    last = grid["miscoupling"].isel(step=-1).stack(what=("measure", "k", "pairs"))
    settings = ["weight_decay", "drop_path", "seed"]
    table = pd.DataFrame({name: grid[name].values for name in (*settings, "accuracy", "loss")})
    for i, (measure, k, pairs) in enumerate(last["what"].values):
        table[f"{measure}/k{k}/{pairs}"] = last.isel(what=i).values
    return table.sort_values(settings, ignore_index=True)
