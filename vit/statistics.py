"""Correlations of coupling, stochastic depth, accuracy and test loss over the cells of a grid.

Coupling = null level - mis-coupling, mean over probe images, of one position (the class token or the last patch; never their
mean). Of a definition whose null level the grid lacks, it is minus mis-coupling, and is called so.

Cells of one seed share initial weights, order of images and draws of stochastic depth. What a seed adds to a value may differ
between rates, and between weight decays:

    value = setting + seed + seed x rate + seed x decay + e

All cells of one seed and rate then share an error, and so do all cells of one seed and decay. The unit of a question is what has
these errors to itself:

    within rates     a weight decay: mean over rates and seeds                         df = decays - 2
    across rates     a rate with a seed: mean over decays, less the seed's mean        df = units - seeds - 1
    r = corr(x, y),  p from t = r sqrt(df / (1 - r^2))

The mean over the decays of a seed and rate holds seed x rate once, and seed x decay alike for all rates; the mean over the rates
and seeds of a decay holds seed x decay once, and seed x rate alike for all decays. Both tests are exact for normal errors. Across
rates, it takes that what a seed adds at one rate is independent of what it adds at the next: if seed x rate were a trend, a rate
with a seed would be no unit.

With a decay as unit, r is large, too, where coupling and the outcome each follow the decay and nothing links them. So each such r
stands beside that of the outcome with log decay, and beside the partial correlation given a quadratic function of log decay.

No r is computed of fewer than `FEWEST_POINTS` units, nor across rates of one seed, which can't show whether it has such a trend.

Coupling at equal training loss: among the cells of one weight decay and seed, the level is the largest final loss on plain
training images, and coupling is that at the first step at which a cell has come down to it, interpolated between measured steps.
Stochastic depth slows training, and coupling changes while a model trains; equal loss tells the two apart.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from scipy.special import ndtri

from tracker.analysis.regression import (
    CONFIDENCE,
    FEWEST_POINTS,
    detectable_correlation,
    holm,
    linear_fit,
    partial_correlation,
)
from tracker.common.text import counted
from vit.recipe import SETTINGS

# The primary test. K is the smallest that was measured.
MEASURE, PAIRS, POSITION = "offdiag_normalized", "mean_offdiag", "last patch"
DEFINITION = ("token", "measure", "k", "pairs")
COUPLING, MINUS_MISCOUPLING = "coupling", "minus mis-coupling"
# Columns of a fit
OF_DECAY = ("r_decay", "r_given_decay", "p_given_decay")
OF_TESTS = ("n", "df", "r", "r_low", "r_high", "p", "why", "detectable", *OF_DECAY)
CHANCE = {"cifar10": 0.1, "digits": 0.1}  # of grids that were trained before it was recorded


def primary(grid: xr.Dataset) -> dict[str, Any]:
    """Return the token, measure, k and pairs of the primary test, as far as they were measured."""
    tokens = grid["token"].values.tolist()
    token = POSITION if POSITION in tokens else tokens[-1]
    return {"token": token, "measure": MEASURE, "k": int(grid["k"].min()), "pairs": PAIRS}


def has_level(grid: xr.Dataset) -> xr.DataArray:
    """Return whether the null level of a measure and K is known in all cells, at all steps, (measure, k)."""
    known = grid["null"].notnull() | grid["miscoupling"].isnull()
    return known.all(["cell", "step", "token", "pairs"])


def couplings(grid: xr.Dataset) -> xr.DataArray:
    """Return null level minus mis-coupling, or minus mis-coupling of a measure and K without a null level in some cell."""
    return grid["null"].where(has_level(grid), 0) - grid["miscoupling"]


def quantity(grid: xr.Dataset, at: dict[str, Any]) -> str:
    """Return what `couplings` holds of a definition, in words."""
    known = has_level(grid).sel(measure=at["measure"], k=at["k"])
    return COUPLING if known else MINUS_MISCOUPLING


def final_coupling(grid: xr.Dataset, at: dict[str, Any]) -> np.ndarray:
    """Return the coupling of each cell after the last step."""
    return couplings(grid).isel(step=-1).sel(at).values


def at_chance(grid: xr.Dataset) -> np.ndarray:
    """Return whether the accuracy of each cell is within 1.96 standard errors of chance, or below; False if that is unknown."""
    chance = grid.attrs.get("chance", CHANCE.get(grid.attrs["data"], np.nan))
    error = np.sqrt(chance * (1 - chance) / grid.attrs["images"])
    return grid["accuracy"].values <= chance + ndtri((1 + CONFIDENCE) / 2) * error


def coupling_at_equal_loss(grid: xr.Dataset, at: dict[str, Any]) -> np.ndarray:
    """Return the coupling of each cell at the training loss that all cells of its weight decay and seed reach.

    NaN for a cell that lacks the loss of a step; the others are compared without it.
    """
    coupling, loss = couplings(grid).sel(at).values, grid["training_loss"].values
    block = _numbered(grid, "weight_decay", "seed")
    complete = np.isfinite(loss).all(1)
    level = np.array([loss[complete & (block == own), -1].max(initial=-np.inf) for own in block])
    out = np.full(len(level), np.nan)
    for i in np.flatnonzero(complete):
        reached = int(np.argmax(loss[i] <= level[i]))
        around = [reached, max(reached - 1, 0)]
        out[i] = np.interp(level[i], loss[i, around], coupling[i, around])
    return out


class Question(NamedTuple):
    """A question about y and x: are they correlated within groups of equal `within`, with the expected sign."""

    name: str  # {coupling} stands for what is known of it: `quantity`
    x: str
    y: str
    within: str
    expected: str = "+"


RISES = "{coupling} rises with stochastic depth"
QUESTIONS = (
    Question("accuracy rises with {coupling}", "coupling", "accuracy", "drop_path"),
    Question("test loss falls with {coupling}", "coupling", "loss", "drop_path", "-"),
    Question(RISES, "drop_path", "coupling", "weight_decay"),
    Question(
        f"{RISES}, at equal training loss", "drop_path", "coupling at equal loss", "weight_decay"
    ),
)


def named_tests(grid: xr.Dataset) -> pd.DataFrame:
    """Answer each question for each position.

    Returns:
        A row per test: question, token, role, x, y, expected (the sign of r), unit (in words), n (units), df, r, r_low, r_high,
        p, why (the reason, where r is undefined), detectable (the smallest r that is found with 80 % power; NaN where r is
        undefined), r_decay (of y with log weight decay), r_given_decay and p_given_decay (given a quadratic function of it; NaN
        across rates, and where a decay is 0) and p_holm. The primary test is the first question at the primary position; its p
        is not corrected. The others are secondary, with p corrected for their number.
    """
    named = primary(grid)
    word, nothing_learned = quantity(grid, named), bool(at_chance(grid).all())
    tokens = sorted(grid["token"].values, key=lambda token: token != named["token"])
    values = {name: grid[name].values for name in ("accuracy", "loss", "drop_path")}
    rows = []
    for question in QUESTIONS:
        for token in tokens:
            at = named | {"token": token}
            values["coupling"] = final_coupling(grid, at)
            values["coupling at equal loss"] = coupling_at_equal_loss(grid, at)
            x, y = values[question.x], values[question.y]
            fit = fit_units(grid, x, y, question.within)
            if nothing_learned and question.y in ("accuracy", "loss"):
                fit = _undefined(fit, "no model is above chance")
            row = {
                "question": question.name.format(coupling=word),
                "token": token,
                "role": "secondary" if rows else "primary",
                "expected": question.expected,
                "x": question.x.replace("coupling", word),
                "y": question.y.replace("coupling", word),
                "unit": UNITS[question.within],
            }
            rows.append(row | {name: fit[name] for name in OF_TESTS})
    _, *p = (row["p"] for row in rows)
    return pd.DataFrame(rows).assign(p_holm=[np.nan, *holm(np.array(p))])


def fit_units(grid: xr.Dataset, x: np.ndarray, y: np.ndarray, within: str) -> dict[str, Any]:
    """Fit y on x over the units of a question; values are those of cells, left out where NaN.

    Args:
        within: drop_path (units are weight decays) or weight_decay (units are rates with seeds).

    Returns:
        The columns of `linear_fit`, detectable (the smallest r that is found with 80 % power), and why: the reason, in words,
        where r is undefined, else "".
    """
    defined = np.isfinite(x) & np.isfinite(y)
    grid, values = grid.isel(cell=defined), np.stack([x, y], 1)[defined]
    if not defined.any():
        return _undefined(linear_fit(x[defined], y[defined]), "the values were not recorded")
    mean_x, mean_y = unit_means(grid, values, within).T
    units, first = np.unique(_units(grid, within)[0], return_index=True)
    groups = grid["seed"].values[first] if within == "weight_decay" else None
    fit = linear_fit(mean_x, mean_y, groups)
    why = too_few(within, *(len(np.unique(grid[name])) for name in SETTINGS), units=len(units))
    if not np.isfinite([mean_x, mean_y]).all():
        why = "values are missing"
    elif not why and np.isnan(fit["r"]):
        why = "the values are equal"
    if why:
        return _undefined(fit, why)
    fit |= {"why": "", "detectable": detectable_correlation(int(fit["df"]))}
    fit |= dict.fromkeys(OF_DECAY, float("nan"))
    decays = np.unique(grid["weight_decay"])
    if within == "drop_path" and decays.all():
        log_decay = np.log(decays)
        given = partial_correlation(mean_x, mean_y, [log_decay, log_decay**2])
        of_decay = linear_fit(log_decay, mean_y)["r"], given["r"], given["p"]
        fit |= dict(zip(OF_DECAY, of_decay, strict=True))
    return fit


def too_few(within: str, decays: int, rates: int, seeds: int, units: int | None = None) -> str:
    """Return why a grid of this size can't answer a question, in words; "" if it can.

    Args:
        within: as in `fit_units`.
        units: the number of units. Default: that of a complete grid.
    """
    if within == "weight_decay" and rates < 2:
        return "there is one stochastic depth rate"
    if within == "weight_decay" and seeds < 2:
        return "one seed does not tell an effect of the rate from what the seed adds at each rate"
    units = units or (decays if within == "drop_path" else rates * seeds)
    if units < FEWEST_POINTS:
        return f"it takes {counted(FEWEST_POINTS, UNITS[within])}, and the grid has {units}"
    return ""


def smallest_grid(decays: int, rates: int, seeds: int) -> tuple[int, int, int]:
    """Return the smallest numbers, not below these, with which a grid can test all questions."""
    rates = max(rates, 2)
    return max(decays, FEWEST_POINTS), rates, max(seeds, 2, -(-FEWEST_POINTS // rates))


def _undefined(fit: dict[str, Any], why: str) -> dict[str, Any]:
    """Return a fit without what a test of it would say."""
    known = {"n": fit["n"], "df": fit["df"], "why": fit.get("why") or why}
    return dict.fromkeys([*fit, "detectable", *OF_DECAY], float("nan")) | known


# Of a question within these, in words
UNITS = {"drop_path": "weight decay", "weight_decay": "rate-seed pair"}


def _units(grid: xr.Dataset, within: str) -> tuple[np.ndarray, np.ndarray]:
    """Number the unit of each cell, and the block of cells with one cell of each unit, or of each unit of a seed."""
    if within == "drop_path":
        return _numbered(grid, "weight_decay"), _numbered(grid, "drop_path", "seed")
    return _numbered(grid, "drop_path", "seed"), _numbered(grid, "weight_decay")


def unit_means(grid: xr.Dataset, values: np.ndarray, within: str) -> np.ndarray:
    """Return the mean of each unit of a question, (units, columns), after the effects of blocks of cells are removed.

    The effects are those of the additive model value = unit + block by least squares; where every unit has every block, they do
    not change the means. NaN where missing cells leave units that no chain of blocks connects.

    Args:
        values: (cells, columns).
        within: as in `fit_units`.
    """
    unit, block = _units(grid, within)
    units = unit.max() + 1
    design = np.concatenate([np.eye(units)[unit], np.eye(block.max() + 1)[block]], 1)
    effects, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    by_unit, by_block = effects[:units], effects[units:]
    connected = rank == len(effects) - 1
    return by_unit + by_block.mean(0) if connected else np.full_like(by_unit, np.nan)


def _numbered(grid: xr.Dataset, *names: str) -> np.ndarray:
    """Number the cells, equal for those that agree in these coordinates."""
    values = np.stack([grid[name].values for name in names])
    return np.unique(values, axis=1, return_inverse=True)[1].ravel()


def cell_table(grid: xr.Dataset) -> pd.DataFrame:
    """Return a row per cell: its settings, accuracy, losses, coupling at equal loss, and every coupling at the end."""
    table = pd.DataFrame({name: grid[name].values for name in (*SETTINGS, "accuracy", "loss")})
    table["training_loss"] = grid["training_loss"].isel(step=-1).values
    for token in grid["token"].values:
        at = primary(grid) | {"token": token}
        table[f"{quantity(grid, at)} at equal training loss/{token}"] = coupling_at_equal_loss(
            grid, at
        )
    stacked = couplings(grid).isel(step=-1).stack(definition=DEFINITION)
    names = [
        column(grid, dict(zip(DEFINITION, label, strict=True)))
        for label in stacked["definition"].values
    ]
    named = pd.DataFrame(stacked.values, columns=names)
    return pd.concat([table, named], axis=1).sort_values([*SETTINGS], ignore_index=True)


def column(grid: xr.Dataset, at: dict[str, Any]) -> str:
    """Return the name of a coupling's column in `cell_table`."""
    return f"{quantity(grid, at)}/{at['token']}/{at['measure']}/k{at['k']}/{at['pairs']}"
