"""What the analysis says of a grid whose answer is known."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from tracker.coupling import MEASURES
from tracker.statistics import PAIRS
from vit.analysis import main, write_analysis
from vit.grid import DROP_PATHS, WEIGHT_DECAYS
from vit.statistics import cell_table, correlations, holm, regress

AT = {"measure": "offdiag_normalized", "k": 10, "pairs": "mean_offdiag"}


def planted(seed: int = 0) -> xr.Dataset:
    """The paper's grid: in one measure at one K accuracy follows coupling at fixed rate, and coupling rises with the rate."""
    random = np.random.default_rng(seed)
    decays, rates = (np.array([float(v) for v in text.split(",")]) for text in (WEIGHT_DECAYS, DROP_PATHS))
    decay, rate = (v.ravel() for v in np.meshgrid(decays, rates, indexing="ij"))
    steps, ks = [0, 1, 2, 4, 8, 1000], [10, 30, 50]
    shape = (len(decay), len(steps), len(MEASURES), len(ks), len(PAIRS))
    miscoupling = 0.9 + 0.01 * random.standard_normal(shape)
    accuracy = 0.9 - 0.05 * rate + 0.01 * random.standard_normal(len(decay))
    i, j = list(MEASURES).index(AT["measure"]), PAIRS.index(AT["pairs"])
    miscoupling[:, -1, i, 0, j] = 0.8 - 0.4 * rate - 2 * (accuracy + 0.05 * rate - 0.9)
    dims = ("cell", "step", "measure", "k", "pairs")
    return xr.Dataset(
        {
            "miscoupling": (dims, miscoupling),
            "null": (dims, np.full(shape, 0.95)),
            "accuracy": ("cell", accuracy),
            "loss": ("cell", 1 - accuracy),
        },
        coords={
            "weight_decay": ("cell", decay),
            "drop_path": ("cell", rate),
            "seed": ("cell", np.zeros(len(decay), int)),
            "step": steps,
            "measure": list(MEASURES),
            "k": ks,
            "pairs": list(PAIRS),
        },
        attrs={"unfinished": ["wd1_sd0_seed0: <diverged>"], "images": 10_000, "data": "cifar10"},
    )


def test_regression_is_scipys_without_groups():
    x, y = np.random.default_rng(0).standard_normal((2, 9))
    fit, oracle = regress(x, y), stats.linregress(x, y)
    assert fit["r"] == pytest.approx(oracle.rvalue) and fit["r2"] == pytest.approx(oracle.rvalue**2)
    assert fit["slope"] == pytest.approx(oracle.slope) and fit["p"] == pytest.approx(oracle.pvalue)
    assert 0 <= fit["r2_low"] < fit["r2"] < fit["r2_high"] <= 1 and fit["n"] == 9


def test_at_fixed_group_it_is_the_regression_with_a_dummy_for_each():
    """Frisch and Waugh: slope and p of x beside group dummies, by least squares."""
    random = np.random.default_rng(1)
    groups = np.repeat([0, 1, 2], 6)
    x = random.standard_normal(18) + 5 * groups
    y = 0.5 * x - 9 * groups + random.standard_normal(18)
    design = np.column_stack([x, *(groups == g for g in range(3))])
    weights, residual, *_ = np.linalg.lstsq(design, y, rcond=None)
    df = 18 - 4
    error = np.sqrt(residual[0] / df * np.linalg.inv(design.T @ design)[0, 0])
    fit = regress(x, y, groups)
    assert fit["slope"] == pytest.approx(weights[0])
    assert fit["p"] == pytest.approx(2 * stats.t.sf(abs(weights[0] / error), df))
    assert regress(x, y)["slope"] < 0 < fit["slope"]  # Simpson's paradox is what the groups are for


@pytest.mark.parametrize("x, y", [([1.0, 2, 3], [1.0, 2, 4]), ([1.0] * 5, range(5)), (range(5), [2.0] * 5)])
def test_nothing_is_said_of_three_cells_or_without_spread(x, y):
    fit = regress(np.array(x, float), np.array(y, float))
    assert np.isnan([fit[name] for name in ("r", "r2", "slope", "p", "r2_low", "r2_high")]).all() and fit["n"] == len(x)


def test_interval_narrows_with_cells():
    random = np.random.default_rng(2)
    widths = []
    for n in (8, 200):
        x = random.standard_normal(n)
        fit = regress(x, x + random.standard_normal(n))
        widths.append(fit["r2_high"] - fit["r2_low"])
    assert widths[1] < 0.5 * widths[0]


def test_holm_by_its_definition():
    p = np.random.default_rng(3).random(20) ** 4
    order = np.argsort(p)
    for alpha in np.linspace(0.001, 0.6, 97):
        rejected = np.zeros(20, bool)
        for i, j in enumerate(order):
            if p[j] > alpha / (20 - i):
                break
            rejected[j] = True
        np.testing.assert_array_equal(holm(p) <= alpha, rejected)


def test_the_planted_relation_is_found_and_nothing_else():
    table = correlations(planted())
    assert len(table) == (8 + 1) * len(MEASURES) * 3 * len(PAIRS)
    found = table[table.p_holm < 0.05]
    assert set(zip(found.measure, found.k, found.pairs, strict=True)) == {tuple(AT.values())}
    assert len(found) == 9 and (found.r > 0.99).all()


def test_tables_figures_and_page(tmp_path):
    grid = planted()
    page = write_analysis(grid, correlations(grid), AT, tmp_path / "out", "a <grid>").read_text()
    with open(tmp_path / "out" / "cells.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 64
    first = grid.isel(cell=0, step=-1)
    assert float(rows[0]["accuracy"]) == float(first.accuracy)
    assert float(rows[0]["offdiag_normalized/k10/mean_offdiag"]) == float(first.miscoupling.sel(AT))
    assert len(pd.read_csv(tmp_path / "out" / "correlations.csv")) == 324
    assert len(list((tmp_path / "out").glob("*.png"))) == 5 == page.count("data:image/png")
    for said in ("a &lt;grid&gt;", "64 vision transformers", "&lt;diverged&gt;", "324 correlations"):
        assert said in page
    assert cell_table(grid).shape == (64, 5 + 4 * 3 * 3)


def test_command_line_says_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "give a grid's --out directory" in capsys.readouterr().err
    cell = tmp_path / "wd0_sd0_seed0"
    cell.mkdir()
    (cell / "recipe.json").write_text("{}")
    (cell / "result.json").write_text(json.dumps({"status": "diverged", "reason": "nan"}))
    assert main([str(tmp_path)]) == 2
    assert "no finished cell" in capsys.readouterr().err
