"""Stores and Datasets with older names of variables: every reader gives the present ones."""

import json

import numpy as np
import pytest
import torch
import xarray as xr

import tracker
from tests.models import neox, tokens
from tracker import replay
from tracker.analysis.statistics import scalars
from tracker.figures.write import main as draw
from tracker.loggers import LOGGERS
from tracker.measures import names
from tracker.measures.registry import UNDEFINED
from tracker.report.contents import contents
from tracker.report.reader import Reader
from tracker.report.summary import summary
from tracker.results import Store

OLDER = {  # present name -> name in version 1
    "expodistance": "expodistance_raw",
    "expodistance_normed": "expodistance",
    "alpha_mean": "alpha_mean_raw",
    "alpha_mean_normed": "alpha_mean",
    "equidistance": "equidistance_raw",
    "equidistance_normed": "equidistance",
    "expodistance_window": "expodistance_raw_window",
    "expodistance_window_normed": "expodistance_window",
    "equidistance_window": "equidistance_raw_window",
    "equidistance_window_normed": "equidistance_window",
    "norm": "norm_raw",
    "norm_normed": "norm",
}


def older(unit: xr.Dataset) -> xr.Dataset:
    """Return a unit as version 1 of the names had it."""
    unit = unit.drop_attrs(deep=False).assign_attrs({k: v for k, v in unit.attrs.items() if k != names.ATTRIBUTE})
    if unit.attrs["final_norm"] != "include":  # both were there, and equal
        twice = {f"{name}_normed": unit[name] for name in OLDER if name in unit and not name.endswith("_normed")}
        counted = [name for name in unit["quantity"].values if f"{name}_normed" in twice]
        undefined = unit[UNDEFINED].sel(quantity=counted)
        both = xr.concat(
            [unit[UNDEFINED], undefined.assign_coords(quantity=[f"{name}_normed" for name in counted])], "quantity"
        )
        unit = unit.drop_dims("quantity").assign(twice).assign({UNDEFINED: both})
    quantities = [OLDER.get(str(name), str(name)) for name in unit["quantity"].values]
    prefix = "diagnostics_"
    renamed = OLDER | {name: name.removeprefix(prefix) for name in map(str, unit.data_vars) if name.startswith(prefix)}
    return unit.rename(renamed).assign_coords(quantity=quantities)


@pytest.fixture(scope="module", params=["include", "exclude"])
def units(request):
    """Units at the steps 0, 4, 8, and the older form of each."""
    found = {}
    for step in (0, 4, 8):
        torch.manual_seed(step)
        unit = tracker.measure(neox(), tokens(2), k=[2, 4], final_norm=request.param)
        found[step] = unit.assign_coords(step=step, suspect="")
    return found, {step: older(unit) for step, unit in found.items()}


def stored(path, units):
    store = Store(path)
    store.check_settings({"model": "toy"})
    for step, unit in units.items():
        store.write(step, unit)
    return store


def same(a: xr.Dataset, b: xr.Dataset) -> None:
    assert set(a.variables) == set(b.variables)
    order = {"quantity": sorted(b["quantity"].values)}
    xr.testing.assert_equal(a.sel(order), b.sel(order))


@pytest.mark.slow
def test_older_units_have_other_values_under_the_plain_name(units):
    """The test can fail: reading an older unit as it is gives other numbers."""
    present, before = units
    if present[4].attrs["final_norm"] == "include":
        assert (abs(before[4].expodistance - present[4].expodistance) > 1e-3).any()
    np.testing.assert_array_equal(before[4].expodistance_raw, present[4].expodistance)


@pytest.mark.slow
@pytest.mark.parametrize("steps_of_older", [(0, 4, 8), (0,), (4, 8)])
def test_every_reader_renames(units, steps_of_older, tmp_path):
    present, before = units
    new = stored(tmp_path / "new", present)
    mixed = stored(tmp_path / "mixed", present | {step: before[step] for step in steps_of_older})
    for step in present:
        same(mixed.read(step), new.read(step))
        assert scalars(mixed.read(step)) == scalars(new.read(step))
    opened, expected = (tracker.open_results(store.path) for store in (mixed, new))
    same(opened, expected)
    assert opened.attrs[names.ATTRIBUTE] == names.VERSION and names.ATTRIBUTE not in opened.coords
    assert set(opened.quantity.values) == set(expected.quantity.values)
    assert contents(Reader().read(mixed.path)) == contents(summary(expected))


@pytest.mark.slow
def test_a_replayed_older_store_is_logged_under_the_present_names(units, tmp_path, monkeypatch):
    present, before = units
    stored(tmp_path / "older", before)
    stored(tmp_path / "new", present)
    monkeypatch.setitem(LOGGERS, "jsonl", "tests.jsonl_logger")
    logged = []
    for name in ("older", "new"):
        assert replay.main([str(tmp_path / name), "--loggers", "jsonl", "--name", "run"]) == 0
        logged.append([json.loads(line) for line in (tmp_path / name / "curves.jsonl").read_text().splitlines()])
    assert logged[0][1:] == logged[1][1:]
    assert ("trajectory/alpha_mean_normed/median" in str(logged)) == ("norm_normed" in present[0])


@pytest.mark.slow
def test_figures_of_older_results(units, tmp_path):
    present, before = units
    for name, of in (("older", before), ("new", present)):
        stored(tmp_path / name, of)
        assert draw(["5", str(tmp_path / name), "--out", str(tmp_path / f"{name}-figures")]) == 0
    tables = [(tmp_path / f"{name}-figures" / "5.csv").read_text() for name in ("older", "new")]
    assert tables[0].replace("older", "new") == tables[1]


@pytest.mark.slow
def test_plot_of_an_older_dataset(units):
    present, before = units

    def heights(by_step):
        figure = tracker.plot(xr.concat([by_step[0], by_step[4]], "step"), "5")
        return [line.get_ydata().tolist() for axes in figure.axes for line in axes.lines]

    assert heights(present) and heights(before) == heights(present)


@pytest.mark.slow
def test_a_unit_is_stored_with_the_version_of_its_names(units, tmp_path):
    store = stored(tmp_path / "older", units[1])
    store.write(4, store.read(4))
    with xr.open_dataset(store.file(4)) as rewritten, xr.open_dataset(store.file(0)) as untouched:
        assert rewritten.attrs[names.ATTRIBUTE] == names.VERSION and "expodistance_raw" not in rewritten
        assert names.ATTRIBUTE not in untouched.attrs and "expodistance_raw" in untouched
    same(store.read(4), units[0][4])
    assert json.loads(store.settings.read_text()) == {"model": "toy"}
