"""Correlations of coupling, stochastic depth, accuracy and test loss over the cells of a grid.

Coupling = -mis-coupling, mean over probe images, of one position (the class token or the last patch; never their mean). The unit
of every test is a setting, a weight decay with a stochastic depth rate: its seeds are blocks, whose effects are removed, and are
then averaged. For the n settings in G groups (of equal rate, or of equal weight decay), after each group's means are subtracted,

    r = corr(x, y),    p from t = r sqrt(df / (1 - r^2)),    df = n - G - 1         (paper, Fig. 6a, has one group)

Coupling at equal training loss: among the cells of one weight decay and seed, the level is the largest final loss on plain
training images, and coupling is that at the first step at which a cell has come down to it, interpolated between measured steps.
Stochastic depth slows training, and coupling changes while a model trains; equal loss tells the two apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.regression import detectable_correlation, holm, linear_fit

# Named before any training (docs/vit.md). K is the smallest that was measured.
MEASURE, PAIRS, POSITION = "offdiag_normalized", "mean_offdiag", "last patch"


def primary(grid: xr.Dataset) -> dict[str, Any]:
    """Return the token, measure, k and pairs of the test that was named before any training, as far as they were measured."""
    tokens = grid["token"].values.tolist()
    token = POSITION if POSITION in tokens else tokens[-1]
    return {"token": token, "measure": MEASURE, "k": int(grid["k"].min()), "pairs": PAIRS}


def final_coupling(grid: xr.Dataset, at: dict[str, Any]) -> np.ndarray:
    """Return the coupling of each cell after the last step."""
    return -grid["miscoupling"].isel(step=-1).sel(at).values


def coupling_at_equal_loss(grid: xr.Dataset, at: dict[str, Any]) -> np.ndarray:
    """Return the coupling of each cell at the training loss that all cells of its weight decay and seed reach.

    NaN for a cell that lacks the loss of a step; the others are compared without it.
    """
    coupling, loss = -grid["miscoupling"].sel(at).values, grid["training_loss"].values
    blocks = np.stack([grid["weight_decay"].values, grid["seed"].values])
    block = np.unique(blocks, axis=1, return_inverse=True)[1].ravel()
    complete = np.isfinite(loss).all(1)
    level = np.array([loss[complete & (block == own), -1].max(initial=-np.inf) for own in block])
    out = np.full(len(level), np.nan)
    for i in np.flatnonzero(complete):
        reached = int(np.argmax(loss[i] <= level[i]))
        if reached == 0:
            out[i] = coupling[i, 0]
            continue
        before, after = loss[i, reached - 1], loss[i, reached]
        share = (before - level[i]) / (before - after)
        out[i] = coupling[i, reached - 1] + share * (coupling[i, reached] - coupling[i, reached - 1])
    return out


@dataclass(frozen=True)
class Question:
    """A question that was named before any training: are y and x correlated within groups, with the expected sign."""

    name: str
    x: str
    y: str
    within: str
    expected: str = "+"


RISES = "coupling rises with stochastic depth"
QUESTIONS = (
    Question("accuracy rises with coupling", "coupling", "accuracy", "drop_path"),
    Question("test loss falls with coupling", "coupling", "loss", "drop_path", "-"),
    Question(RISES, "drop_path", "coupling", "weight_decay"),
    Question(f"{RISES}, at equal training loss", "drop_path", "coupling at equal loss", "weight_decay"),
)


def named_tests(grid: xr.Dataset) -> pd.DataFrame:
    """Answer each question for each position.

    Returns:
        A row per test: question, token, role, expected (the sign of r), n (settings), df, r, r_low, r_high, p, detectable (the
        smallest correlation found with 80 % power) and p_holm. The primary test is the first question at the primary position;
        its p is not corrected. The others are secondary, with p corrected for their number.
    """
    named = primary(grid)
    rows = []
    for question in QUESTIONS:
        for token in sorted(grid["token"].values, key=lambda token: token != named["token"]):
            at = named | {"token": token}
            values = {
                "accuracy": grid["accuracy"].values,
                "loss": grid["loss"].values,
                "drop_path": grid["drop_path"].values,
                "coupling": final_coupling(grid, at),
                "coupling at equal loss": coupling_at_equal_loss(grid, at),
            }
            first = question is QUESTIONS[0] and token == named["token"]
            fit = fit_settings(grid, values[question.x], values[question.y], question.within)
            role = "primary" if first else "secondary"
            what = {"question": question.name, "token": token, "role": role, "expected": question.expected}
            rows.append(what | _shown(fit))
    table = pd.DataFrame(rows)
    secondary = (table["role"] == "secondary").to_numpy()
    table["p_holm"] = np.nan
    table.loc[secondary, "p_holm"] = holm(table.loc[secondary, "p"].to_numpy())
    return table


def _shown(fit: dict[str, float]) -> dict[str, float]:
    names = ("n", "df", "r", "r_low", "r_high", "p")
    return {name: fit[name] for name in names} | {"detectable": detectable_correlation(int(fit["df"]))}


def correlations(grid: xr.Dataset) -> pd.DataFrame:
    """Fit accuracy and test loss on coupling, for each rate and within rates, by token, measure, K and layer pairs.

    Returns:
        A row per fit: outcome, drop_path (the rate, or "fixed": within rates), token, measure, k, pairs, the columns of
        `linear_fit`, and p_holm, corrected for all rows.
    """
    coupling = -grid["miscoupling"].isel(step=-1).stack(which=("token", "measure", "k", "pairs"))
    rates = grid["drop_path"].values
    parts = {f"{rate:g}": rates == rate for rate in sorted(set(rates))}
    parts |= {"fixed": np.full(len(rates), True)} if len(parts) > 1 else {}
    rows = []
    for outcome in ("accuracy", "loss"):
        for name, chosen in parts.items():
            cells = grid.isel(cell=chosen)
            columns = setting_means(cells, coupling.transpose("cell", "which").values[chosen])
            (y,) = setting_means(cells, cells[outcome].values[:, None]).T
            groups = setting_labels(cells, "drop_path")
            for label, x in zip(coupling["which"].values, columns.T, strict=True):
                what = dict(zip(("token", "measure", "k", "pairs"), label, strict=True))
                rows.append({"outcome": outcome, "drop_path": name, **what, **linear_fit(x, y, groups)})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def fit_settings(grid: xr.Dataset, x: np.ndarray, y: np.ndarray, within: str) -> dict[str, float]:
    """Fit y on x over settings, within groups of equal `within`; values are those of cells, left out where NaN."""
    defined = np.isfinite(x) & np.isfinite(y)
    if not defined.any():
        return linear_fit(np.empty(0), np.empty(0))
    grid = grid.isel(cell=defined)
    means = setting_means(grid, np.stack([x, y], 1)[defined])
    return linear_fit(means[:, 0], means[:, 1], setting_labels(grid, within))


def setting_means(grid: xr.Dataset, values: np.ndarray) -> np.ndarray:
    """Return the mean of each setting over its seeds, (settings, columns), after the effects of seeds are removed.

    The effects are those of the additive model value = setting + seed by least squares; where every setting has every seed,
    they do not change the means.

    Args:
        values: (cells, columns).
    """
    setting = _settings(grid)
    seeds, seed = np.unique(grid["seed"].values, return_inverse=True)
    design = np.concatenate([np.eye(setting.max() + 1)[setting], np.eye(len(seeds))[seed]], 1)
    effects = np.linalg.lstsq(design, values, rcond=None)[0]
    by_setting, by_seed = effects[: setting.max() + 1], effects[setting.max() + 1 :]
    return by_setting + by_seed.mean(0)


def setting_labels(grid: xr.Dataset, name: str) -> np.ndarray:
    """Return the value of a coordinate for each setting, in the order of `setting_means`."""
    return grid[name].values[np.unique(_settings(grid), return_index=True)[1]]


def _settings(grid: xr.Dataset) -> np.ndarray:
    """Number the settings: equal for cells that differ only in their seed."""
    both = np.stack([grid["weight_decay"].values, grid["drop_path"].values])
    return np.unique(both, axis=1, return_inverse=True)[1].ravel()


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """Return a row per cell: its settings, accuracy, losses, coupling at equal loss, and every mis-coupling at the end."""
    last = grid["miscoupling"].isel(step=-1).stack(what=("token", "measure", "k", "pairs"))
    named = ["weight_decay", "drop_path", "seed"]
    table = pd.DataFrame({name: grid[name].values for name in (*named, "accuracy", "loss")})
    table["training_loss"] = grid["training_loss"].isel(step=-1).values
    for token in grid["token"].values:
        at = primary(grid) | {"token": token}
        table[f"coupling at equal training loss/{token}"] = coupling_at_equal_loss(grid, at)
    for i, (token, measure, k, pairs) in enumerate(last["what"].values):
        table[f"{token}/{measure}/k{k}/{pairs}"] = last.isel(what=i).values
    return table.sort_values(named, ignore_index=True)
