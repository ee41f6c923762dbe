"""Tests of the analysis on a synthetic grid with a known relation of accuracy to coupling."""

import csv
import json
import shutil
import time

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from tests.stores import generated
from tracker.analysis.regression import linear_fit
from tracker.analysis.statistics import PAIRS
from tracker.measures.registry import MISCOUPLINGS
from tracker.results import Store
from vit import statistics
from vit.analysis import main, write_analysis
from vit.grid import DROP_PATHS, WEIGHT_DECAYS
from vit.results import read_grid, write_grid
from vit.statistics import (
    cell_table,
    correlations,
    coupling_at_equal_loss,
    final_coupling,
    named_tests,
    primary,
    setting_means,
)

TOKENS = ["class token", "last patch"]
AT = {"token": "last patch", "measure": "offdiag_normalized", "k": 10, "pairs": "mean_offdiag"}


def synthetic_grid(seed: int = 0) -> xr.Dataset:
    """Return values for the paper's grid: at AT, accuracy follows coupling at a fixed rate, and coupling rises with the rate."""
    random = np.random.default_rng(seed)
    decays, rates = (np.array([float(v) for v in text.split(",")]) for text in (WEIGHT_DECAYS, DROP_PATHS))
    decay, rate = (v.ravel() for v in np.meshgrid(decays, rates, indexing="ij"))
    steps, ks = [0, 1, 2, 4, 8, 1000], [10, 30, 50]
    shape = (len(decay), len(steps), 2, len(MISCOUPLINGS), len(ks), len(PAIRS))
    miscoupling = 0.9 + 0.01 * random.standard_normal(shape)
    accuracy = 0.9 - 0.05 * rate + 0.01 * random.standard_normal(len(decay))
    i, j = list(MISCOUPLINGS).index(AT["measure"]), PAIRS.index(AT["pairs"])
    miscoupling[:, -1, 1, i, 0, j] = 0.8 - 0.4 * rate - 2 * (accuracy + 0.05 * rate - 0.9)
    dims = ("cell", "step", "token", "measure", "k", "pairs")
    return xr.Dataset(
        {
            "miscoupling": (dims, miscoupling),
            "null": (dims, np.full(shape, 0.95)),
            "accuracy": ("cell", accuracy),
            "loss": ("cell", 1 - accuracy),
            "training_loss": (("cell", "step"), np.linspace(2.3, 0.1, 6) + rate[:, None]),
        },
        coords={
            "weight_decay": ("cell", decay),
            "drop_path": ("cell", rate),
            "seed": ("cell", np.zeros(len(decay), int)),
            "step": steps,
            "token": TOKENS,
            "measure": list(MISCOUPLINGS),
            "k": ks,
            "pairs": list(PAIRS),
        },
        attrs={"unfinished": ["wd1_sd0_seed0: <diverged>"], "images": 10_000, "data": "cifar10"},
    )


def with_seeds(count: int, effect: float) -> xr.Dataset:
    """Return the synthetic grid `count` times, as seeds whose accuracy and coupling differ by an effect of the seed."""
    grids = []
    for seed in range(count):
        grid = synthetic_grid().assign_coords(seed=("cell", np.full(64, seed)))
        grids.append(grid.assign(accuracy=grid.accuracy + effect * seed, miscoupling=grid.miscoupling + effect * seed))
    return xr.concat(grids, "cell").assign_attrs(synthetic_grid().attrs)


def test_only_the_known_relation_is_significant():
    table = correlations(synthetic_grid())
    assert len(table) == 2 * (8 + 1) * 2 * len(MISCOUPLINGS) * 3 * len(PAIRS)
    found = table[table.p_holm < 0.05]
    assert set(zip(found.token, found.measure, found.k, found.pairs, strict=True)) == {tuple(AT.values())}
    assert len(found) == 18 and (found.r[found.outcome == "accuracy"] > 0.99).all() and (abs(found.r) > 0.99).all()


def test_named_questions_are_answered_with_one_uncorrected_test():
    grid = synthetic_grid()
    tests = named_tests(grid)
    assert primary(grid) == AT and len(tests) == 8
    first = tests.iloc[0]
    assert (first.question, first.token, first.role) == ("accuracy rises with coupling", "last patch", "primary")
    expected = linear_fit(final_coupling(grid, AT), grid.accuracy.values, grid.drop_path.values)
    assert (first.r, first.p, first.df) == pytest.approx((expected["r"], expected["p"], 64 - 8 - 1), abs=1e-12)
    assert (tests.role == "primary").sum() == 1 and np.isnan(first.p_holm)
    planted = tests[(tests.token == "last patch") & (tests.question != statistics.QUESTIONS[3].name)]
    assert (planted.p < 1e-9).all() and (tests[tests.token == "class token"].p_holm > 0.05).all()
    assert (tests.p_holm[1:] >= tests.p[1:]).all()


def test_seeds_are_blocks_and_do_not_count_as_settings():
    """A common effect of the seed on coupling and accuracy, opposite to their relation, changes nothing."""
    alone, blocked = named_tests(synthetic_grid()), named_tests(with_seeds(3, effect=0.5))
    np.testing.assert_allclose(alone[["n", "df", "r", "p"]], blocked[["n", "df", "r", "p"]], rtol=1e-6, atol=1e-12)
    uneven = with_seeds(3, effect=0.5).isel(cell=[*range(64), *range(70, 110), *range(130, 192)])
    columns = np.stack([uneven.accuracy.values, final_coupling(uneven, AT)], 1)
    whole = setting_means(with_seeds(3, effect=0.5), np.stack([with_seeds(3, 0.5).accuracy.values], 1))
    np.testing.assert_allclose(setting_means(uneven, columns)[:, 0], whole[:, 0], atol=1e-9)


def test_coupling_at_equal_loss_is_read_off_the_curve():
    """Coupling falls as the loss does, equally in all cells; the rates differ only in how far they come."""
    grid = synthetic_grid()
    level = 2.3 - grid.training_loss  # a function of the loss alone
    broadcast = (0 * grid.miscoupling).transpose("cell", "step", ...) + level
    grid = grid.assign(miscoupling=broadcast.transpose(*grid.miscoupling.dims))
    at_equal_loss = coupling_at_equal_loss(grid, AT)
    slowest = grid.training_loss.isel(step=-1).max()
    np.testing.assert_allclose(at_equal_loss, slowest - 2.3)
    assert np.ptp(final_coupling(grid, AT)) > 0.3
    partly = grid.copy(deep=True)
    partly.training_loss[0, -1] = np.nan  # as where it could not be evaluated
    found = coupling_at_equal_loss(partly, AT)
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], at_equal_loss[1:])
    missing = grid.assign(training_loss=grid.training_loss * np.nan)
    assert np.isnan(coupling_at_equal_loss(missing, AT)).all()
    tests = named_tests(missing)
    assert np.isnan(tests.p[tests.question == statistics.QUESTIONS[3].name]).all()


@pytest.mark.slow
def test_analysis_writes_tables_figures_and_page(tmp_path):
    grid = synthetic_grid()
    page = write_analysis(grid, correlations(grid), AT, tmp_path / "out", "a <grid>").read_text()
    with open(tmp_path / "out" / "cells.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 64
    first = grid.isel(cell=0, step=-1)
    assert float(rows[0]["accuracy"]) == float(first.accuracy)
    assert float(rows[0]["last patch/offdiag_normalized/k10/mean_offdiag"]) == float(first.miscoupling.sel(AT))
    assert len(pd.read_csv(tmp_path / "out" / "correlations.csv")) == 1620
    assert len(pd.read_csv(tmp_path / "out" / "tests.csv")) == 8
    assert len(list((tmp_path / "out").glob("*.png"))) == 6 == page.count("data:image/png")
    for text in ("a &lt;grid&gt;", "64 vision transformers", "&lt;diverged&gt;", "1,620 fits", "<h2>Does accuracy"):
        assert text in page
    assert "Accuracy rises with coupling: yes, r = 1.00 [1.00, 1.00], p &lt; 0.0001 (primary test, last patch)" in page
    assert "64 settings find |r| ≥ 0.36 with 80 % power" in page
    assert cell_table(grid).shape == (64, 8 + 2 * len(MISCOUPLINGS) * 3 * 3)


@pytest.mark.slow
def test_grid_of_one_cell_is_analysed(tmp_path):
    grid = synthetic_grid().isel(cell=[3])
    page = write_analysis(grid, correlations(grid), AT, tmp_path, "one").read_text()
    assert "Too few settings to answer." in page and "1 vision transformer on" in page


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return a directory of 64 cells with 17 units each."""
    directory = tmp_path_factory.mktemp("grid")
    store = generated(
        directory / "store", [0, *(2**i for i in range(15)), 20_000], layers=12, ks=(10, 30, 50), prompts=32
    )
    for cell in range(64):
        name = directory / f"cell{cell}"
        (name / "coupling").mkdir(parents=True)
        (name / "coupling" / "units").symlink_to(store / "units")
        recipe = {"weight_decay": cell // 8 / 10, "drop_path": cell % 8 / 10, "seed": 0, "tokens": "-1", "data": "x"}
        result = {"status": "finished", "accuracy": 0.5 + cell / 1000, "loss": 1.0, "images": {"test": 100}}
        (name / "recipe.json").write_text("{}")
        (name / "result.json").write_text(json.dumps({**result, "recipe": recipe}))
    return directory


@pytest.mark.slow
def test_a_cell_that_lacks_a_step_is_left_out_and_listed(measured, tmp_path):
    for cell in ("cell0", "cell1"):
        shutil.copytree(measured / cell, tmp_path / cell)
    store = Store(tmp_path / "cell1" / "coupling")
    store.write_skipped({4: "OutOfMemoryError: CUDA out of memory"})
    assert read_grid(tmp_path).sizes["cell"] == 2  # measured after all
    store.file(4).unlink()
    grid = read_grid(tmp_path)
    assert grid.sizes["cell"] == 1 and grid.sizes["step"] == 17
    assert grid.attrs["unfinished"] == ["cell1: not measured at step 4: OutOfMemoryError: CUDA out of memory"]


@pytest.mark.slow
def test_64_cells_of_17_units_are_analysed_in_20_seconds(measured):
    """Of CPU time, which other processes on the machine change less."""
    started = time.process_time()
    assert main([str(measured), "--out", str(measured / "analysis")]) == 0
    assert time.process_time() - started < 20
    grid = read_grid(measured)
    assert grid.sizes["cell"] == 64 and grid.sizes["step"] == 17 and grid["token"].values.tolist() == ["last patch"]


def test_command_line_reports_missing_cells(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "give a grid's --out directory" in capsys.readouterr().err
    cell = tmp_path / "wd0_sd0_seed0"
    cell.mkdir()
    (cell / "recipe.json").write_text("{}")
    (cell / "result.json").write_text(json.dumps({"status": "diverged", "reason": "nan"}))
    assert main([str(tmp_path)]) == 2
    assert "no finished cell" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_not_measured_is_refused(measured, capsys):
    assert main([str(measured), "--token", "class token"]) == 2
    assert "--token class token was not measured; choose from last patch" in capsys.readouterr().err


@pytest.mark.slow
def test_an_analysis_is_repeated_from_its_file_and_joined_with_other_cells(measured, tmp_path, capsys):
    whole = read_grid(measured)
    halves = [tmp_path / "first", tmp_path / "second"]
    for i, half in enumerate(halves):
        half.mkdir()
        for cell in sorted(measured.glob("cell*"))[i::2]:
            (half / cell.name).symlink_to(cell)
    write_grid(read_grid(halves[0]), tmp_path / "grid.nc")
    joined = read_grid(tmp_path / "grid.nc", halves[1])
    order = ["weight_decay", "drop_path", "seed"]
    xr.testing.assert_identical(joined.sortby(order), whole.sortby(order))
    assert main([str(tmp_path / "grid.nc")]) == 0
    assert read_grid(tmp_path / "analysis" / "grid.nc").equals(read_grid(halves[0]))
    assert main([str(tmp_path / "grid.nc"), str(halves[0])]) == 2
    assert "is given twice" in capsys.readouterr().err
    (tmp_path / "other.nc").write_text("text")
    assert main([str(tmp_path / "other.nc")]) == 2
    assert "is no grid.nc that vit.analysis wrote" in capsys.readouterr().err


@pytest.mark.slow
def test_cells_of_two_recipes_are_refused(measured, tmp_path, capsys):
    write_grid(read_grid(measured).assign_attrs(recipe=json.dumps({"data": "y", "tokens": "-1"})), tmp_path / "grid.nc")
    assert main([str(measured), str(tmp_path / "grid.nc")]) == 2
    assert "differ in data; analyse cells of one recipe" in capsys.readouterr().err


def test_tokens_that_the_measurement_chose_have_its_name(tmp_path):
    store = generated(tmp_path / "cell" / "coupling", [0, 8], ks=(10,), tokens="cls")
    recipe = {"weight_decay": 0.1, "drop_path": 0.1, "seed": 0, "tokens": None, "data": "x"}
    result = {"status": "finished", "accuracy": 0.5, "loss": 1.0, "images": {"test": 100}, "recipe": recipe}
    (tmp_path / "cell" / "recipe.json").write_text("{}")
    (tmp_path / "cell" / "result.json").write_text(json.dumps(result))
    assert read_grid(tmp_path).token.values.tolist() == ["class token"]
    for step in (0, 8):
        file = Store(store).file(step)
        Store(store).write(step, xr.load_dataset(file, engine="h5netcdf").drop_vars(MISCOUPLINGS))
    with pytest.raises(ValueError, match="holds no mis-coupling; measure `coupling`"):
        read_grid(tmp_path)
