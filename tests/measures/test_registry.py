"""The registry of measures: complete, and everything that is derived from it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import neox, tokens
from tests.support.stores import stored
from tracker.analysis.curves import CURVES, scalars
from tracker.analysis.reduction import reduced
from tracker.measures.registry import (
    BY_NAME,
    KINDS,
    MEASURES,
    UNDEFINED_COUNT,
    VARIANTS,
    headline_names,
)
from tracker.measures.settings import CHOICE_NAMES, CHOICES, EVERYTHING
from tracker.report.contents import contents
from tracker.report.texts import texts
from tracker.report.write import write_report
from tracker.store import join, open_results

ASSETS = Path(tracker.__file__).parent / "report" / "assets"


@pytest.fixture(scope="module")
def ds():
    torch.manual_seed(0)
    return tracker.measure(
        neox(),
        tokens(3),
        k=[2, 4],
        measures=EVERYTHING,
        pair_tokens=3,
        keep=("jacobian", "singular_vectors"),
    )


def test_each_variable_and_coordinate_has_a_label_and_a_unit(ds):
    for name in ds.variables:
        assert all(
            ds[name].attrs[said] for said in ("long_name", "units", "formula", "reference")
        ), name
    assert ds["entropy"].attrs["units"] == "nats" and ds["lss"].attrs["units"] == "1"


@pytest.mark.slow
def test_each_option_enables_its_variables_and_those_of_no_other():
    for option in CHOICES:
        measured = tracker.measure(
            neox(), tokens(1), k=2, measures=[*filter(None, [option.needs]), option.name]
        )
        names = {
            m.name for m in MEASURES if m.option in ("", option.name, option.needs or option.name)
        }
        names -= {f"{kind}_matrix" for kind in KINDS}  # these need "matrices" too
        assert set(measured.data_vars) - {"diagnostics_undefined"} == names, option.name


def test_entries_refer_to_entries():
    options = {"", "keep", *CHOICE_NAMES}
    for measure in MEASURES:
        assert measure.option in options and (measure.counted or not measure.null), measure.name
        assert not measure.base or measure.base in BY_NAME, measure.name
        assert bool(measure.logged) <= bool(measure.curve and measure.metric), measure.name
    metrics = [measure.metric for measure in MEASURES if measure.logged]
    assert len(metrics) == len(set(metrics))


def test_what_is_declared_as_logged_is_logged_and_nothing_else(ds):
    parts = r"(/k\d+)?/(mean\w*|q25|median|q75|\d+pct)$|/k\d+$"
    logged = {measure.point(part) for measure in MEASURES for part in measure.logged}
    assert {re.sub(parts, "", name) for name in scalars(ds)} == logged | {"miscoupling"}


def test_the_headline_numbers_are_metrics(ds):
    assert set(headline_names(k=2)) - {UNDEFINED_COUNT} <= set(scalars(ds))
    ds = ds.copy(deep=True)
    ds["diagnostics_undefined"][2:4] = 5
    assert scalars(ds)[UNDEFINED_COUNT] == 10


@pytest.mark.slow
def test_old_units_and_new_ones_join(ds, tmp_path):
    """A store that was begun before variables had attributes, and before `update_ratio`."""
    old = ds.copy().drop_vars("update_ratio").sel(quantity=ds.quantity != "update_ratio")
    for variable in old.variables.values():
        variable.attrs = {}
    store = stored(tmp_path / "toy", {0: old, 1: ds, 2: old, 3: ds}, model="toy")
    joined = open_results(store.path)
    assert (
        joined.update_ratio.isel(step=[0, 2]).isnull().all()
        and joined.update_ratio.isel(step=[1, 3]).notnull().all()
    )
    for name in set(old.data_vars) - {"diagnostics_undefined"}:
        for i, unit in enumerate((old, ds, old, ds)):
            np.testing.assert_array_equal(joined[name].isel(step=i).values, unit[name].values)
    assert old.equals(ds.drop_vars("update_ratio").sel(quantity=old.quantity))
    data = contents(join([reduced(store.curve([step])) for step in store.steps()], store.path))
    assert data["curves"] == contents(reduced(joined))["curves"]
    write_report(store.path, tmp_path / "page.html")


def test_no_measure_is_named_in_the_page_s_scripts():
    names = {*CURVES, *(m.name for m in MEASURES if m.by_depth), *(f"{k}_" for k in KINDS)}
    for file in sorted(ASSETS.glob("*.js")):
        code = file.read_text(encoding="utf-8")
        named = [name for name in names if re.search(rf"[\"'`.]{name}\b", code)]
        assert not named, f"{file.name}: {named}"
        assert not re.search(r"#[0-9a-fA-F]{6}\b", code), f"{file.name} has a colour"
    template = (ASSETS / "template.html").read_text(encoding="utf-8")
    assert not [name for name in names if re.search(rf'id="{name}', template)]


def test_each_chart_of_the_page_has_an_id_of_its_own():
    ids = [chart["id"] for chart in texts()["charts"]]
    assert len(ids) == len(set(ids))
    assert set(texts()["measures"]) == set(VARIANTS)
