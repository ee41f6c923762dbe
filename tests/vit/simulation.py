"""False positives of each question in simulated grids whose coupling depends on no setting.

    value = weight decay + rate + weight decay x rate + seed + seed x rate + seed x decay + e

All effects are normal. Their variances are those found in a shipped grid: accuracy and test loss have all of them, coupling has
those of seeds and e alone, so that every significant result is a false one. `python -m tests.vit.simulation --grids 1000` prints
the share with p < 0.05 of each question, over both positions, by number of seeds: with settings as units, as before, and with the
units of `vit.statistics`.
"""

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import xarray as xr

from tracker.analysis.regression import linear_fit
from tracker.measures.registry import MISCOUPLINGS
from vit.grid import DROP_PATHS, WEIGHT_DECAYS
from vit.results import read_grid
from vit.statistics import (
    QUESTIONS,
    SETTINGS,
    coupling_at_equal_loss,
    final_coupling,
    named_tests,
    primary,
    variables,
)

GRID = Path(__file__).parents[2] / "docs" / "cifar10_small" / "grid.nc"
TOKENS = ("class token", "last patch")
AXES = ("decay", "rate", "seed")
# Which axes an effect varies along
EFFECTS = [kept for kept in product((True, False), repeat=3) if any(kept)]


def variances(values: np.ndarray) -> dict[tuple[bool, ...], float]:
    """Return the variance of each effect, by the axes that it varies along, from values (decay, rate, seed); at least 0.

    The expected mean square of an effect is the sum of the variances of all effects that vary along its axes, each times the
    number of cells that share a value.
    """
    means = {
        kept: values.mean(tuple(i for i in range(3) if not kept[i]), keepdims=True)
        for kept in [*EFFECTS, (False,) * 3]
    }
    found: dict[tuple[bool, ...], float] = {}
    for kept in sorted(EFFECTS, key=sum, reverse=True):
        inside = [part for part in means if all(a >= b for a, b in zip(kept, part, strict=True))]
        effect = np.sum(
            [
                (-1) ** (sum(kept) - sum(part)) * (means[part] + np.zeros(values.shape))
                for part in inside
            ],
            0,
        )
        df = np.prod([values.shape[i] - 1 for i in range(3) if kept[i]])
        shared = np.prod([values.shape[i] for i in range(3) if not kept[i]])
        others = sum(
            variance * np.prod([values.shape[i] for i in range(3) if not part[i]])
            for part, variance in found.items()
            if all(a <= b for a, b in zip(kept, part, strict=True))
        )
        found[kept] = max(0.0, float(((effect**2).sum() / df - others) / shared))
    return found


def of_cells(grid: xr.Dataset, values: np.ndarray) -> np.ndarray:
    """Return the values of the cells of a complete grid as (decay, rate, seed)."""
    order = np.lexsort([grid[name].values for name in reversed(SETTINGS)])
    return values[order].reshape([len(np.unique(grid[name])) for name in SETTINGS])


def found_variances(file: Path = GRID) -> dict[str, dict[tuple[bool, ...], float]]:
    """Return the `variances` of each variable of a grid, by name; those of coupling without the effects of settings."""
    grid = read_grid(file)
    values = {name: grid[name].values for name in ("accuracy", "loss")}
    for token in TOKENS:
        at = primary(grid) | {"token": token}
        values |= {
            f"final/{token}": final_coupling(grid, at),
            f"equal/{token}": coupling_at_equal_loss(grid, at),
        }
    found = {name: variances(of_cells(grid, of)) for name, of in values.items()}
    return {
        name: of if name in ("accuracy", "loss") else {kept: v for kept, v in of.items() if kept[2]}
        for name, of in found.items()
    }


def draw(
    of: dict[tuple[bool, ...], float], shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray:
    """Return one value of each cell, (decay, rate, seed) in one row."""
    values = np.zeros(shape)
    for kept, variance in of.items():
        values += np.sqrt(variance) * random.standard_normal(
            [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        )
    return values.ravel()


def simulated(found: dict, seeds: int, random: np.random.Generator) -> xr.Dataset:
    """Return a grid of the paper's weight decays and rates whose coupling depends on neither.

    The training loss is constant, so that coupling at equal loss is that of the first step.
    """
    axes = [[float(v) for v in text.split(",")] for text in (WEIGHT_DECAYS, DROP_PATHS)] + [
        list(range(seeds))
    ]
    shape = tuple(map(len, axes))
    decay, rate, seed = (of.ravel() for of in np.meshgrid(*axes, indexing="ij"))
    miscoupling = np.full((len(seed), 2, 2, len(MISCOUPLINGS), 1, 1), np.nan)
    for (i, step), (j, token) in product(enumerate(("equal", "final")), enumerate(TOKENS)):
        miscoupling[:, i, j, list(MISCOUPLINGS).index("offdiag_normalized"), 0, 0] = -draw(
            found[f"{step}/{token}"], shape, random
        )
    dims = ("cell", "step", "token", "measure", "k", "pairs")
    coords = {
        "weight_decay": ("cell", decay),
        "drop_path": ("cell", rate),
        "seed": ("cell", seed.astype(int)),
    }
    coords |= {
        "step": [0, 1],
        "token": list(TOKENS),
        "measure": list(MISCOUPLINGS),
        "k": [10],
        "pairs": ["mean_offdiag"],
    }
    return xr.Dataset(
        {
            "miscoupling": (dims, miscoupling),
            "null": (dims, 0 * miscoupling),
            "accuracy": ("cell", 0.5 + draw(found["accuracy"], shape, random)),
            "loss": ("cell", draw(found["loss"], shape, random)),
            "training_loss": (("cell", "step"), np.ones((len(seed), 2))),
        },
        coords,
        {"data": "cifar10", "images": 10_000, "unfinished": []},
    )


def with_settings_as_units(grid: xr.Dataset) -> list[float]:
    """Return p of each question and position as it was before: over settings, means over seeds, within groups."""
    decay, rate, _ = (
        of[..., 0]
        for of in (
            of_cells(grid, grid[name].values) for name in ("weight_decay", "drop_path", "seed")
        )
    )
    p = []
    values = {token: variables(grid, primary(grid) | {"token": token}) for token in TOKENS}
    for question, token in product(QUESTIONS, TOKENS):
        x, y = (
            of_cells(grid, values[token][name]).mean(2).ravel() for name in (question.x, question.y)
        )
        groups = (rate if question.within == "drop_path" else decay).ravel()
        p.append(linear_fit(x, y, groups)["p"])
    return p


def false_positives(seeds: int, grids: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of p < 0.05 of each question before and after; NaN where no grid answers it."""
    random, found = np.random.default_rng([seed, seeds]), found_variances()
    before, after = np.empty((2, grids, len(QUESTIONS) * len(TOKENS)))
    for i in range(grids):
        grid = simulated(found, seeds, random)
        before[i], after[i] = with_settings_as_units(grid), named_tests(grid)["p"]
    return tuple(
        np.where(np.isfinite(p), p < 0.05, np.nan)
        .reshape(grids, len(QUESTIONS), len(TOKENS))
        .mean((0, 2))
        for p in (before, after)
    )  # type: ignore[return-value]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Print the false positives of each question, before and after."
    )
    parser.add_argument("--grids", type=int, default=1000)
    grids = parser.parse_args().grids
    for seeds in (1, 2, 4):
        for question, before, after in zip(QUESTIONS, *false_positives(seeds, grids), strict=True):
            name = question.name.format(coupling="coupling")
            print(f"seeds {seeds}  before {before:.3f}  after {after:.3f}  {name}", flush=True)
