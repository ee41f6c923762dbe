"""Correlations of coupling, stochastic depth, accuracy and test loss over the cells of a grid.

Coupling = -mis-coupling, mean over probe images, of one position (the class token or the last patch; never their mean). The unit
of every test is a setting, a weight decay with a stochastic depth rate: its seeds are blocks, whose effects are removed, and are
then averaged. For the n settings in G groups (of equal rate, or of equal weight decay), after each group's means are subtracted,

    r = corr(x, y),    p from t = r sqrt(df / (1 - r^2)),    df = n - G - 1         (paper, Fig. 6a, has one group)

Reliability of x or y is the share of the variance of the settings' means, within groups, that is not noise of their seeds. With S
seeds of each setting, value = group + setting + seed + e, and the variances s^2 of settings and v of e,

    F = (n - G, (n - 1)(S - 1) df) ratio of the mean squares of settings within groups and of e
    reliability = 1 - 1 / F, at least 0    estimates    s^2 / (s^2 + v / S)
    F (v / S) / (s^2 + v / S) has an F distribution, whose quantiles give the interval: exact for normal settings and e

Noise attenuates a correlation: the r to expect of means is the correlation of settings times sqrt(reliability_x reliability_y).

Coupling at equal training loss: among the cells of one weight decay and seed, the level is the largest final loss on plain
training images, and coupling is that at the first step at which a cell has come down to it, interpolated between measured steps.
Stochastic depth slows training, and coupling changes while a model trains; equal loss tells the two apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from tracker.analysis.regression import CONFIDENCE, detectable_correlation, holm, linear_fit

# Named before any training (docs/vit.md). K is the smallest that was measured.
MEASURE, PAIRS, POSITION = "offdiag_normalized", "mean_offdiag", "last patch"
RELIABILITY = ("reliability", "reliability_low", "reliability_high")
RELIABLE = 0.5  # of a reliable variable, the lower end of the interval is above it: settings vary more than noise does


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
        A row per test: question, token, role, x, y, expected (the sign of r), n (settings), df, r, r_low, r_high, p, the
        reliabilities of x and y with their intervals, attainable (the r of means to expect of a correlation of 1 of settings),
        detectable (the smallest r of means to expect that is found with 80 % power), detectable_true (the smallest correlation
        of settings found with it; NaN if there is none or no reliability) and p_holm. The primary test is the first question at
        the primary position; its p is not corrected. The others are secondary, with p corrected for their number.
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
            row = {"question": question.name, "token": token, "role": role, "x": question.x, "y": question.y}
            rows.append(row | {"expected": question.expected} | _shown(fit))
    table = pd.DataFrame(rows)
    secondary = (table["role"] == "secondary").to_numpy()
    table["p_holm"] = np.nan
    table.loc[secondary, "p_holm"] = holm(table.loc[secondary, "p"].to_numpy())
    return table


def _shown(fit: dict[str, float]) -> dict[str, float]:
    names = ("n", "df", "r", "r_low", "r_high", "p", *(name for name in fit if name.startswith("reliability")))
    attainable = float(np.sqrt(fit["reliability_x"] * fit["reliability_y"]))
    detectable = detectable_correlation(int(fit["df"]))
    true = detectable / attainable if attainable >= detectable else float("nan")
    return {name: fit[name] for name in names} | {
        "attainable": attainable,
        "detectable": detectable,
        "detectable_true": true,
    }


def correlations(grid: xr.Dataset) -> pd.DataFrame:
    """Fit accuracy and test loss on coupling, for each rate and within rates, by token, measure, K and layer pairs.

    Returns:
        A row per fit: outcome, drop_path (the rate, or "fixed": within rates), token, measure, k, pairs, the columns of
        `linear_fit`, the reliabilities of coupling (x) and outcome (y), and p_holm, corrected for all rows.
    """
    labels, coupling = _final_couplings(grid)
    rates = grid["drop_path"].values
    parts = {f"{rate:g}": rates == rate for rate in sorted(set(rates))}
    parts |= {"fixed": np.full(len(rates), True)} if len(parts) > 1 else {}
    rows = []
    for outcome in ("accuracy", "loss"):
        for name, chosen in parts.items():
            cells = grid.isel(cell=chosen)
            fits = _fits(cells, coupling[chosen], cells[outcome].values, "drop_path")
            rows += [
                {"outcome": outcome, "drop_path": name, **label, **fit} for label, fit in zip(labels, fits, strict=True)
            ]
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def fit_settings(grid: xr.Dataset, x: np.ndarray, y: np.ndarray, within: str) -> dict[str, float]:
    """Fit y on x over settings, within groups of equal `within`; values are those of cells, left out where NaN.

    Returns:
        The columns of `linear_fit`, and reliability_x, reliability_y with their intervals (..._low, ..._high).
    """
    defined = np.isfinite(x) & np.isfinite(y)
    if not defined.any():
        unknown = dict.fromkeys(RELIABILITY, float("nan"))
        return linear_fit(np.empty(0), np.empty(0)) | _beside(unknown, unknown)
    (fit,) = _fits(grid.isel(cell=defined), x[defined, None], y[defined], within)
    return fit


def _fits(grid: xr.Dataset, columns: np.ndarray, y: np.ndarray, within: str) -> list[dict[str, float]]:
    """Fit y on each column, (cells, columns), as `fit_settings` does."""
    values = np.column_stack([columns, y])
    *means, mean_y = setting_means(grid, values).T
    *reliable, reliable_y = reliability(grid, values, within).to_dict("records")
    groups = setting_labels(grid, within)
    return [linear_fit(x, mean_y, groups) | _beside(of_x, reliable_y) for x, of_x in zip(means, reliable, strict=True)]


def _beside(of_x: dict, of_y: dict) -> dict[str, float]:
    return {
        name.replace("reliability", f"reliability_{axis}"): of[name]
        for axis, of in (("x", of_x), ("y", of_y))
        for name in RELIABILITY
    }


def reliability(grid: xr.Dataset, values: np.ndarray, within: str) -> pd.DataFrame:
    """Return the reliability of the means of settings within groups of equal `within`.

    Where settings differ in their number of seeds, F is that of the comparison of the additive model with and without settings,
    and the interval is approximate.

    Args:
        values: (cells, columns).

    Returns:
        A row per column: f, df_settings, df_seeds, reliability, reliability_low, reliability_high (95 %). All but the degrees of
        freedom are NaN where no setting has several seeds, no group has several settings, or the values of a column are equal.
    """
    group = np.unique(grid[within].values, return_inverse=True)[1]
    (*_, of_groups, group_rank), (*_, of_settings, rank) = (
        _additive(grid, label, values) for label in (group, _settings(grid))
    )
    df = rank - group_rank, len(values) - rank
    with np.errstate(divide="ignore", invalid="ignore"):
        f = (of_groups - of_settings) / df[0] / (of_settings / df[1])
    f = np.where(min(df) > 0, f, np.nan)
    quantiles = (1, stats.f.ppf((1 + CONFIDENCE) / 2, *df), stats.f.ppf((1 - CONFIDENCE) / 2, *df))
    shares = {name: np.maximum(1 - quantile / f, 0) for name, quantile in zip(RELIABILITY, quantiles, strict=True)}
    return pd.DataFrame({"f": f, "df_settings": df[0], "df_seeds": df[1]} | shares)


def reliabilities(grid: xr.Dataset) -> pd.DataFrame:
    """Return the reliability, within stochastic depth rates, of accuracy, test loss and every coupling after the last step.

    Returns:
        A row per variable: variable (accuracy, loss or coupling), token, measure, k and pairs of a coupling, the columns of
        `reliability`, and reliable (whether the lower end of its interval is above `RELIABLE`).
    """
    labels, coupling = _final_couplings(grid)
    outcomes = [grid[name].values for name in ("accuracy", "loss")]
    rows = [{"variable": "accuracy"}, {"variable": "loss"}, *({"variable": "coupling"} | label for label in labels)]
    table = reliability(grid, np.column_stack([*outcomes, coupling]), "drop_path")
    named = pd.DataFrame(rows).astype({"k": "Int64"})
    return pd.concat([named, table], axis=1).assign(reliable=table["reliability_low"] > RELIABLE)


def _final_couplings(grid: xr.Dataset) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return token, measure, k and pairs of each coupling, and the couplings after the last step, (cells, couplings)."""
    names = ("token", "measure", "k", "pairs")
    stacked = -grid["miscoupling"].isel(step=-1).stack(definition=names)
    labels: list[dict[str, Any]] = [dict(zip(names, label, strict=True)) for label in stacked["definition"].values]
    return labels, stacked.transpose("cell", "definition").values


def setting_means(grid: xr.Dataset, values: np.ndarray) -> np.ndarray:
    """Return the mean of each setting over its seeds, (settings, columns), after the effects of seeds are removed.

    The effects are those of the additive model value = setting + seed by least squares; where every setting has every seed,
    they do not change the means.

    Args:
        values: (cells, columns).
    """
    by_setting, by_seed, *_ = _additive(grid, _settings(grid), values)
    return by_setting + by_seed.mean(0)


def _additive(
    grid: xr.Dataset, label: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Fit value = label + seed: the effects of labels and of seeds, the squares left, (columns), and the model's rank."""
    seeds, seed = np.unique(grid["seed"].values, return_inverse=True)
    design = np.concatenate([np.eye(label.max() + 1)[label], np.eye(len(seeds))[seed]], 1)
    effects, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    residual = ((values - design @ effects) ** 2).sum(0)
    residual = np.where(residual > 1e-20 * (values**2).sum(0), residual, 0)  # else only rounding error
    return effects[: -len(seeds)], effects[-len(seeds) :], residual, int(rank)


def setting_labels(grid: xr.Dataset, name: str) -> np.ndarray:
    """Return the value of a coordinate for each setting, in the order of `setting_means`."""
    return grid[name].values[np.unique(_settings(grid), return_index=True)[1]]


def _settings(grid: xr.Dataset) -> np.ndarray:
    """Number the settings: equal for cells that differ only in their seed."""
    both = np.stack([grid["weight_decay"].values, grid["drop_path"].values])
    return np.unique(both, axis=1, return_inverse=True)[1].ravel()


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """Return a row per cell: its settings, accuracy, losses, coupling at equal loss, and every mis-coupling at the end."""
    labels, coupling = _final_couplings(grid)
    settings = ["weight_decay", "drop_path", "seed"]
    table = pd.DataFrame({name: grid[name].values for name in (*settings, "accuracy", "loss")})
    table["training_loss"] = grid["training_loss"].isel(step=-1).values
    for token in grid["token"].values:
        at = primary(grid) | {"token": token}
        table[f"coupling at equal training loss/{token}"] = coupling_at_equal_loss(grid, at)
    for label, values in zip(labels, coupling.T, strict=True):
        table["{token}/{measure}/k{k}/{pairs}".format(**label)] = -values
    return table.sort_values(settings, ignore_index=True)
