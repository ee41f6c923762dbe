"""Parts of results that a user selected: their analyses are those of the part with all its dimensions, or a sentence."""

import re
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import tracker
from tests.support.models import Size, neox, tokens
from tests.support.refused import refused
from tests.support.stores import stored
from tracker.analysis.selections import opened
from tracker.common.errors import UsageError
from tracker.measures.settings import EVERYTHING
from tracker.store import open_results


@pytest.fixture(scope="module")
def ds():
    model = neox(size=Size(depth=4))
    return tracker.measure(model, tokens(3), k=[2, 3], measures=EVERYTHING, pair_tokens=3)


@pytest.fixture(scope="module")
def results(tmp_path_factory, ds):
    """Opened results of two steps, the second more coupled."""
    later = ds.assign(miscoupling=ds.miscoupling * 0.8)
    return open_results(
        stored(tmp_path_factory.mktemp("selections") / "toy", {0: ds, 8: later}).path
    )


ANALYSES = {
    "summary": tracker.summary,
    "curves": tracker.curves,
    "null_level": lambda results: tracker.null_level(results, "miscoupling"),
    "null_level of the trace": lambda results: tracker.null_level(
        results, "miscoupling_release_trace"
    ),
    "null_level of tokens": lambda results: tracker.null_level(results, "self_miscoupling"),
    "scalars": tracker.scalars,
    "plot": tracker.plot,
    "plot 9": lambda results: tracker.plot(results, 9),
}


def assert_same(one, other):
    """Compare two results of an analysis; dimensions may differ in order and length 1, figures by the rounding of float32."""
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one[sorted(one)], other[sorted(other)], check_dtype=False)
        assert one.attrs == other.attrs
    elif isinstance(one, xr.Dataset | xr.DataArray):
        plain, expected = (values.squeeze().reset_coords(drop=True) for values in (one, other))
        xr.testing.assert_equal(plain.transpose(*expected.dims), expected)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(list(one.values()), list(other.values()))
    else:
        for axes, others in zip(one.axes, other.axes, strict=True):
            assert axes.get_title() == others.get_title()
            for kind, of in (("lines", "get_xydata"), ("images", "get_array")):
                for both in zip(getattr(axes, kind), getattr(others, kind), strict=True):
                    drawn, expected = (getattr(one, of)() for one in both)
                    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
        plt.close("all")


KEPT = {
    "K": {"k": [1]},
    "prompt": {"prompt": [1]},
    "all": {"prompt": [0], "k": [0]},
    "blocks": {"layer": [0, 1], "layer_other": [0, 1]},
    "own coordinate": {"prompt": [2]},
}
SELECTIONS = {
    "K": lambda ds: ds.sel(k=3),
    "prompt": lambda ds: ds.isel(prompt=1),
    "token": lambda ds: ds.isel(token=0),
    "all": lambda ds: ds.isel(prompt=0).sel(k=2).squeeze(),
    "blocks": lambda ds: ds.sel(layer=[1, 2], layer_other=[1, 2]),
    "transposed": lambda ds: ds.transpose(*reversed(list(ds.dims))),
    "own coordinate": lambda ds: ds.assign_coords(topic=("prompt", [*"abc"])).isel(prompt=2),
}


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_selected_label_is_a_dimension_of_length_1(ds, analysis, selection):
    """Equal to the part that keeps its dimensions, which `isel` with lists gives."""
    analyse, part = ANALYSES[analysis], SELECTIONS[selection](ds)
    try:
        expected = analyse(ds.isel(KEPT.get(selection, {})))
    except UsageError as error:  # what needs all blocks
        with pytest.raises(UsageError, match=f"^{re.escape(str(error))}$"):
            analyse(part)
        return
    assert_same(analyse(part), expected)


def test_a_selected_step_and_a_directory(results, ds, tmp_path):
    assert tracker.scalars(results.isel(step=0)) == tracker.scalars(ds)
    last = results.isel(step=-1)
    assert_same(tracker.summary(last), tracker.summary(results.isel(step=[-1])))
    assert "step 8" in tracker.plot(last).axes[0].get_title()
    path = stored(tmp_path / "toy", {8: ds}).path
    assert_same(tracker.curves(path), tracker.curves(open_results(path)))
    with refused(r"scalars are of one step, and these are 2; select one"):
        tracker.scalars(results)


@pytest.mark.parametrize("selected", SELECTIONS.values(), ids=SELECTIONS)
def test_null_levels_have_the_dimensions_of_what_was_given(ds, selected):
    part = selected(ds)
    assert tracker.null_level(part, "miscoupling").dims == part.miscoupling.dims


def test_neighbours_are_blocks_that_follow_each_other(ds):
    kept, neighbours = ({"layer": at, "layer_other": at} for at in ([1, 3, 4], [3, 4]))
    points = tracker.curves(ds.sel(kept)).sel(k=2, pairs="mean_adjacent")
    expected = 2 * ds.miscoupling.sel(k=2).sel(neighbours).mean()  # 0 on the diagonal
    assert float(points.miscoupling) == pytest.approx(float(expected), rel=1e-6)


def test_a_curve_of_the_last_state_needs_the_last_state(ds):
    parts = [ds, ds.isel(depth=[-1]), ds.isel(depth=slice(0, 3)), ds.isel(depth=0)]
    found = ["entropy" in tracker.curves(part, ["entropy"]) for part in parts]
    assert found == [True, True, False, False]


@pytest.mark.parametrize("kind", ["netcdf", "float64"])
@pytest.mark.parametrize("analysis", ANALYSES)
def test_a_dataset_of_another_type_or_file(ds, analysis, kind, tmp_path):
    ds = ds.drop_vars([name for name in ds.data_vars if ds[name].dtype == object])
    if kind == "netcdf":
        ds.to_netcdf(tmp_path / "own.nc")
    other = xr.load_dataset(tmp_path / "own.nc") if kind == "netcdf" else ds.astype("float64")
    assert_same(ANALYSES[analysis](other), ANALYSES[analysis](ds))


REFUSED = {
    "a mean": (
        lambda ds: ds.mean("prompt"),
        "lacks the dimension prompt: leave means to the analysis",
    ),
    "where": (
        lambda ds: ds.where(ds.prompt == 0),
        "has the dimension prompt, on which no measurement of it depends",
    ),
    "no attributes": (
        lambda ds: ds.drop_attrs(),
        "without the attribute model_class lost its attributes",
    ),
    "no labels": (
        lambda ds: ds.drop_vars("layer"),
        "has a dimension layer without the coordinate layer",
    ),
    "no texts": (
        lambda ds: ds.drop_vars("prompt_text"),
        "has a dimension prompt without the coordinate prompt_text",
    ),
    "none": (lambda ds: ds.isel(prompt=[]), "this selection has no prompt; select one at least"),
    "twice": (
        lambda ds: ds.isel(layer=[0, 1, 1]),
        "this selection has layer 2 more than once; select it once",
    ),
    "a step in words": (
        lambda ds: ds.assign_coords(step="last"),
        r"has step last; steps are numbers: results.assign_coords\(step=",
    ),
    "an array": (lambda ds: ds.miscoupling, "DataArray is no result; give a Dataset"),
}


@pytest.mark.parametrize(
    "analysis, case", [*product(ANALYSES, ["a mean"]), *product(["summary", "scalars"], REFUSED)]
)
def test_what_is_refused_at_the_door(ds, analysis, case):
    selected, message = REFUSED[case]
    with refused(message):
        ANALYSES[analysis](selected(ds))


def test_what_a_part_lacks_is_named(ds):
    alone = ds[["miscoupling"]]
    for analyse in (tracker.summary, tracker.plot, tracker.curves, ANALYSES["null_level"]):
        with refused(
            "the null level of miscoupling needs miscoupling_level, which this part .* lacks"
        ):
            analyse(alone)
    with_level = ds[["miscoupling", "miscoupling_level"]]
    rows, expected = (tracker.summary(of).loc["miscoupling"] for of in (with_level, ds))
    pd.testing.assert_frame_equal(rows, expected, check_categorical=False)
    assert_same(tracker.plot(with_level), tracker.plot(ds))
    assert "diagnostics/undefined" not in tracker.scalars(with_level)
    with refused(r"same blocks along layer \[1, 2\] and layer_other \[1, 2, 3, 4\]; select both"):
        tracker.summary(ds.sel(layer=[1, 2]))
    with refused("a null level needs rank 1 to 3, and this part of the results has 2, 3"):
        tracker.null_level(ds.isel(rank=[1, 2]), "miscoupling_release_trace")
    with refused("the response to noise needs depth 0 to 1"):
        tracker.plot(ds.isel(depth=-1), 32)


def test_what_is_whole_is_returned_as_it_is(ds, results):
    assert opened(ds) is ds and opened(results) is results
