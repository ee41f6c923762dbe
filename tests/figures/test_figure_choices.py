"""What is chosen of a figure: the paper's convention, blocks, and the axis of training steps."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import tracker
from tests.support.models import Size, neox, tokens
from tests.support.refused import refused
from tracker.analysis.null_levels import null_level
from tracker.common.values import INTEGERS
from tracker.figures.drawing import shades, training_axis
from tracker.figures.selection import draw

K, L = 4, 5


@pytest.fixture(scope="module")
def course():
    """Two steps of a model of five blocks, with every measure that a figure of one result needs."""
    units = [
        tracker.measure(
            neox(size=Size(32, L)), tokens(3), k=[2, K], measures="all,tokenwise", window=3
        ).assign_coords(step=step)
        for step in (0, 100)
    ]
    return xr.concat(units, "step", combine_attrs="override")


def of(name, ds, **chosen):
    figure, table = draw(name, {"toy": ds}, K, **chosen)
    return figure, table


PAIRS = ("token", "layer", "layer_other")


def over_pairs(ds, *dims):
    return ds.offdiag_normalized_normed.sel(k=K).astype(float).mean(dims)


def test_the_paper_s_coupling_is_minus_the_mis_coupling_over_all_pairs_with_the_final_norm(course):
    expected = -over_pairs(course, *PAIRS)
    figure, table = of("1b", course, convention="paper")
    np.testing.assert_allclose(table["minus mis-coupling"], expected.mean("prompt"), rtol=1e-6)
    level = null_level(course, "offdiag_normalized_normed").sel(k=K).mean(("prompt", *PAIRS))
    np.testing.assert_allclose(table.unrelated, -level, rtol=1e-6)
    label = figure.axes[0].get_ylabel().replace("\n", " ").replace("\u00a0", " ")
    assert label == "Minus mis-coupling, eq. 14, with the final norm, all pairs, K = 4"
    _, table = of("9", course, convention="paper")
    np.testing.assert_allclose(table["minus mis-coupling"], expected.isel(step=-1), rtol=1e-6)


def test_fig_15_of_the_paper_counts_pairs_of_one_module(course):
    looped = course.assign_attrs(equal_blocks="one module: 1 2")
    results = {"a": looped, "b": course}
    values = -over_pairs(course, "token").sel(step=100)
    expected = values.where(values.layer != values.layer_other).mean(("prompt", "layer_other"))
    _, paper = draw("15", results, K, convention="paper")
    np.testing.assert_allclose(paper["minus mis-coupling"], [*expected] * 2, rtol=1e-5)
    _, ours = draw("15", results, K)
    first = ours[ours.layer == 1].set_index("result").coupling
    assert abs(first["a"] - first["b"]) > 1e-4, "the package leaves the pair of blocks 1 and 2 out"


@pytest.mark.parametrize("name", ["5", "26", "27", "28", "30"])
def test_the_paper_s_paths_end_with_the_final_norm(course, name):
    """As the package's do of results whose variables count it."""
    counted = {of: course[f"{of}_normed"] for of in course.data_vars if f"{of}_normed" in course}
    figure, table = of(name, course, convention="paper")
    _, expected = of(name, course.assign(counted))
    np.testing.assert_array_equal(table["median"], expected["median"])
    assert any("with the final" in axes.get_ylabel().replace("\n", " ") for axes in figure.axes)


def test_results_without_the_final_norm_are_refused_with_the_remedy(course):
    alone = course.drop_vars("lss_normed")
    with refused("toy lacks lss_normed; measure again with final_norm='include'"):
        of("27", alone, convention="paper")


def test_blocks_are_chosen(course):
    _, table = of("3", course, layers=[2, 5])
    assert set(table.block) == set(table.block_other) == {2, 5}
    tile = table[(table.step == 100) & (table.block == 2) & (table.block_other == 5)].value
    stored = course.matrix.sel(step=100, layer=2, layer_other=5).isel(prompt=0, token=0)
    np.testing.assert_allclose(tile, abs(stored).values.ravel(), rtol=1e-6)
    _, table = of("28", course, layers=[3])
    assert set(table.layer) == {3}
    assert INTEGERS("9-11,3,-1") == [9, 10, 11, 3, -1]


@pytest.mark.parametrize(
    "name, chosen, said",
    [
        ("29", {"layers": [3, 5]}, "toy has no window at block 5; choose from 1 to 4"),
        ("3", {"layers": [9]}, "layer 9 was not measured in all .*; they share 1, 2, 3, 4, 5"),
        ("1b", {"layers": [3]}, "layers 3 is for the figures 3, 4, 18, 19, 28, 29"),
        ("27", {"measure": "offdiag"}, "measure offdiag is for the figures curves, heatmap, 1b"),
        ("3", {"layers": "12"}, "layer 12 was not measured in all results"),
        ("3", {"layers": "last"}, "^layers='last'; give whole numbers with commas"),
        ("27", {"axis": "logarithmic"}, "axis 'logarithmic'; choose from auto, linear, log"),
        ("34", {"axis": "log"}, "axis log is for the figures curves, 1b, 27, 28, 29"),
    ],
)
def test_what_can_not_be_chosen(course, name, chosen, said):
    with refused(said):
        tracker.plot({"toy": course}, name, **chosen)


def test_one_block_is_chosen_that_is_compared_with_another(course):
    assert set(of("4", course, layers=[4])[1].block) == {4}
    for layers in ([L], [2, 3]):  # the last block is compared with none
        with refused(f"{layers[-1]}: this figure shows one block .* choose from 1, 2, 3, 4$"):
            of("4", course, layers=layers)


UNEVEN = [0, 1, 2, 4, 8, 256]


@pytest.mark.parametrize(
    "runs, axis, linear",
    [
        ([range(0, 6000, 20)], "auto", True),
        ([[0, 20, 40, 55]], "auto", True),
        ([[0, 0.5, 1, 1.5]], "auto", True),
        ([UNEVEN], "auto", False),
        ([[0, 20, 40, 55]], "log", False),
        ([UNEVEN], "linear", True),
        ([[0, 20, 40], [0, 30, 60]], "auto", True),
        ([[0, 20, 40], [0, 30, 90]], "auto", False),
        ([[0]], "log", True),
    ],
)
def test_the_axis_is_linear_for_evenly_spaced_steps_and_says_where_it_is_not(runs, axis, linear):
    """Runs of different steps are even each by itself."""
    axes = Figure().subplots()
    axes.plot(runs[0], runs[0])
    training_axis(axes, *runs, scale=axis)
    assert axes.get_xlabel() == ("Training step" if linear else "Training step (log scale)")
    assert axes.get_xscale() == ("linear" if linear else "symlog")
    if runs == [[0]]:
        return
    ticks = axes.get_xticks()
    assert ticks[-1] == max(map(max, runs)) and 3 <= len(ticks) <= 8
    labels = [axes.xaxis.get_major_formatter()(tick) for tick in ticks]
    assert [float(label.replace(",", "")) for label in labels] == ticks.tolist()
    drawn = axes.transData.transform([(tick, 0) for tick in ticks])[:, 0]
    assert np.diff(drawn).min() > 0.1 * axes.bbox.width, "labels of ticks would run into each other"


def test_steps_that_are_parts_of_epochs_are_named_as_they_are(course):
    parts = course.assign_coords(step=[0.25, 0.5])
    assert "toy, step 0.25\n" in of("heatmap", parts, step=0.25)[0].axes[0].get_title()
    lines = of("26", parts)[0].axes[0].get_legend_handles_labels()[1]
    assert lines == ["step 0.25", "step 0.5"]
    with refused("toy starts at step 0.25, but .* the untrained model"):
        of("5", parts)


def test_no_legend_covers_data(course):
    """Of figures with lines in several colours."""
    for name in ("curves", "1b", "5", "27", "28", "30", "34"):
        figure, _ = of(name, course)
        figure.draw_without_rendering()
        for axes in figure.axes:
            if axes.get_legend():
                assert axes.get_legend().get_window_extent().y1 <= axes.bbox.y0, name


def test_ordered_lines_have_enough_contrast_with_paper():
    def luminance(colour):
        linear = [
            value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
            for value in colour[:3]
        ]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    for count in (1, 2, 4, 6):
        assert min(1.05 / (luminance(colour) + 0.05) for colour in shades(count)) >= 3


def test_1c_shows_the_steps_around_the_onset(course):
    """The last before it, the first at half of the largest coupling, and the last."""
    ds = course.isel(step=[0] * 8).assign_coords(step=2 ** np.arange(8))
    depth = xr.DataArray([0, 0, 0, 0.05, 0.15, 0.3, 0.4, 0.35], dims="step")
    level = null_level(ds, "offdiag_normalized")
    ds["offdiag_normalized"] = (level - depth.where(ds.layer != ds.layer_other, 0)).transpose(
        *level.dims
    )
    _, table = of("1c", ds)
    assert sorted(set(table.step)) == [4, 32, 128]
