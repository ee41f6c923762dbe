"""`tracker.plot`: what it draws is what the figures' command line draws."""

import numpy as np
import pytest

import tracker
from tests.models import neox, tokens
from tracker.analysis.statistics import curves


@pytest.fixture(scope="module")
def measured():
    return tracker.measure(neox(), tokens(3), k=[2, 4])


@pytest.fixture(scope="module")
def course(measured):
    """Two points of a training course."""
    import xarray as xr

    return xr.concat([measured.assign_coords(step=0), (measured * 1.5).assign_coords(step=100)], "step").assign_attrs(
        measured.attrs
    )


def test_a_measurement_is_a_heat_map(measured):
    axes = tracker.plot(measured, k=4).axes[0]
    expected = measured.miscoupling.sel(k=4).mean(("prompt", "token")).values
    np.testing.assert_allclose(axes.images[0].get_array(), expected)
    assert "K = 4" in axes.get_title()


def test_several_steps_are_curves(course):
    coupling, lss, _ = tracker.plot(course).axes
    points = curves(course)
    (line,) = [line for line in coupling.lines if line.get_label() == "miscoupling"]
    np.testing.assert_allclose(line.get_ydata(), points.miscoupling.sel(k=2, pairs="mean_offdiag"))
    np.testing.assert_allclose(lss.lines[0].get_ydata(), points.lss.sel(statistic="median"))


def test_a_figure_of_the_paper_of_several_results(course):
    axes = tracker.plot({"one": course, "other": course}, "27").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "other"]


def test_one_step_of_a_store(measured):
    """As `on_measure` hands it over."""
    figure = tracker.plot(measured.assign_coords(step=64), "1c")
    assert figure.axes[0].get_title() == "GPTNeoXForCausalLM, step 64"


@pytest.mark.parametrize(
    "name, message",
    [
        ("34", r"ds.assign_coords\(step=512\)"),
        ("99", "unknown figure '99'; choose from all, list, curves, heatmap, 1a"),
        ("6", "vit.analysis"),
        ("heatmap", "--k 3 was not measured"),
    ],
)
def test_what_can_not_be_drawn(measured, name, message):
    with pytest.raises(ValueError, match=message):
        tracker.plot(measured, name, k=3 if name == "heatmap" else None)


def test_what_is_no_result(measured, tmp_path):
    for other in ({}, None, [measured], measured.miscoupling, {"a": "b"}, measured.mean()):
        with pytest.raises(ValueError, match="give a Dataset as from tracker.measure"):
            tracker.plot(other)
    with pytest.raises(ValueError, match="selection K = 2; give the whole Dataset, and k=2"):
        tracker.plot(measured.sel(k=2))
    with pytest.raises(FileNotFoundError, match="no results in"):
        tracker.plot(tmp_path)
