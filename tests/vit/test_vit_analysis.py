"""Tests of the analysis on a synthetic grid with a known relation of accuracy to coupling."""

import csv
import json

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.statistics import PAIRS
from tracker.measures.registry import MISCOUPLINGS
from vit.analysis import main, write_analysis
from vit.grid import DROP_PATHS, WEIGHT_DECAYS
from vit.statistics import cell_table, correlations

AT = {"measure": "offdiag_normalized", "k": 10, "pairs": "mean_offdiag"}


def synthetic_grid(seed: int = 0) -> xr.Dataset:
    """Return values for the paper's grid: at AT, accuracy follows coupling at a fixed rate, and coupling rises with the rate."""
    random = np.random.default_rng(seed)
    decays, rates = (np.array([float(v) for v in text.split(",")]) for text in (WEIGHT_DECAYS, DROP_PATHS))
    decay, rate = (v.ravel() for v in np.meshgrid(decays, rates, indexing="ij"))
    steps, ks = [0, 1, 2, 4, 8, 1000], [10, 30, 50]
    shape = (len(decay), len(steps), len(MISCOUPLINGS), len(ks), len(PAIRS))
    miscoupling = 0.9 + 0.01 * random.standard_normal(shape)
    accuracy = 0.9 - 0.05 * rate + 0.01 * random.standard_normal(len(decay))
    i, j = list(MISCOUPLINGS).index(AT["measure"]), PAIRS.index(AT["pairs"])
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
            "measure": list(MISCOUPLINGS),
            "k": ks,
            "pairs": list(PAIRS),
        },
        attrs={"unfinished": ["wd1_sd0_seed0: <diverged>"], "images": 10_000, "data": "cifar10"},
    )


def test_only_the_known_relation_is_significant():
    table = correlations(synthetic_grid())
    assert len(table) == (8 + 1) * len(MISCOUPLINGS) * 3 * len(PAIRS)
    found = table[table.p_holm < 0.05]
    assert set(zip(found.measure, found.k, found.pairs, strict=True)) == {tuple(AT.values())}
    assert len(found) == 9 and (found.r > 0.99).all()


def test_second_fit_averages_over_seeds(tmp_path):
    """Each cell exists twice, as two seeds: the first fit counts 16 cells per rate, the second averages them to 8."""
    alone = correlations(synthetic_grid())
    grid = xr.concat([synthetic_grid(), synthetic_grid().assign_coords(seed=("cell", np.ones(64, int)))], "cell")
    grid.attrs = synthetic_grid().attrs
    table = correlations(grid)
    assert "cluster_p" not in alone and (table.n == 2 * alone.n).all() and (table.cluster_n == alone.n).all()
    for name in ("r", "r2", "p"):
        np.testing.assert_allclose(table[f"cluster_{name}"], alone[name], rtol=1e-6, atol=1e-12)
    inexact = alone.r2 < 0.99  # elsewhere p is rounding error
    assert (table.p <= alone.p)[inexact].all() and inexact.sum() > 300
    page = write_analysis(grid, table, AT, tmp_path, "seeds").read_text()
    assert "<th>cluster_p</th>" in page and "2 seeds" in page
    once = write_analysis(synthetic_grid(), alone, AT, tmp_path, "once").read_text()
    heading = "against stochastic depth: "
    assert page.split(heading)[1].split("</p>")[0] == once.split(heading)[1].split("</p>")[0]


def test_analysis_writes_tables_figures_and_page(tmp_path):
    grid = synthetic_grid()
    page = write_analysis(grid, correlations(grid), AT, tmp_path / "out", "a <grid>").read_text()
    with open(tmp_path / "out" / "cells.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 64
    first = grid.isel(cell=0, step=-1)
    assert float(rows[0]["accuracy"]) == float(first.accuracy)
    assert float(rows[0]["offdiag_normalized/k10/mean_offdiag"]) == float(first.miscoupling.sel(AT))
    assert len(pd.read_csv(tmp_path / "out" / "correlations.csv")) == 405
    assert len(list((tmp_path / "out").glob("*.png"))) == 5 == page.count("data:image/png")
    for text in ("a &lt;grid&gt;", "64 vision transformers", "&lt;diverged&gt;", "405 correlations"):
        assert text in page
    assert cell_table(grid).shape == (64, 5 + len(MISCOUPLINGS) * 3 * 3)


def test_command_line_reports_missing_cells(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "give a grid's --out directory" in capsys.readouterr().err
    cell = tmp_path / "wd0_sd0_seed0"
    cell.mkdir()
    (cell / "recipe.json").write_text("{}")
    (cell / "result.json").write_text(json.dumps({"status": "diverged", "reason": "nan"}))
    assert main([str(tmp_path)]) == 2
    assert "no finished cell" in capsys.readouterr().err


def test_page_states_the_trends_with_stochastic_depth(tmp_path):
    """In the synthetic grid, coupling rises by 0.4 per unit of the rate, with noise."""
    grid = synthetic_grid()
    page = write_analysis(grid, correlations(grid), AT, tmp_path, "planted").read_text()
    trend = page.split("against stochastic depth: coupling has r = ")[1]
    assert float(trend.split(" ")[0]) > 0.9 and "accuracy has r = -" in trend
