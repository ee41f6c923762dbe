"""`tracker.plot`: what it draws is what the figures' command line draws."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

import tracker
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tests.support.stores import stored
from tracker.analysis.curves import curves
from tracker.analysis.null_levels import null_level
from tracker.figures.drawing import colour_map, definition
from tracker.figures.matrices import coupling_pictures
from tracker.figures.registry import FIGURES
from tracker.figures.selection import lack
from tracker.measures.registry import VARIANTS


@pytest.fixture(scope="module")
def measured():
    return tracker.measure(neox(), tokens(3), k=[2, 4], measures=["coupling", "trajectory", "vju"])


@pytest.fixture(scope="module")
def course(measured):
    """Two points of a training course."""
    import xarray as xr

    return xr.concat(
        [measured.assign_coords(step=0), (measured * 1.5).assign_coords(step=100)], "step"
    ).assign_attrs(measured.attrs)


def entries_beside_the_diagonal(image, expected, left_out=True):
    """Check that these are drawn; the diagonal, which is 0, is left out."""
    drawn, others = image.get_array(), ~np.eye(len(expected), dtype=bool)
    np.testing.assert_allclose(drawn[others], expected[others])
    assert np.ma.getmaskarray(drawn).diagonal().all() == left_out
    return expected[others]


def test_a_measurement_is_a_heat_map(measured):
    axes, bar = tracker.plot(measured, k=4).axes
    expected = measured.miscoupling.sel(k=4).mean(("prompt", "token")).values
    (image,) = axes.images
    others = entries_beside_the_diagonal(image, expected)
    level = null_level(measured, "miscoupling").sel(k=4)
    null = level.where(level.layer != level.layer_other).mean().item()
    low, high = image.get_clim()
    assert low == pytest.approx(min(others.min(), null)) and low > 0
    assert high == pytest.approx(max(others.max(), null))
    assert "K = 4" in axes.get_title() and bar.get_ylabel() == "Mis-coupling (0: coupled)"
    assert bar.lines[0].get_ydata() == pytest.approx([null, null])
    explained = [text.get_text() for text in axes.get_legend().get_texts()]
    assert explained == ["l = l': 0 by definition", f"null level {null:.2f}"]


def test_a_logger_s_pictures_have_the_colours_of_the_matrix(measured):
    """Each K has its own range, which the entries and their null level span, and no picture contains another's parts."""
    matrices, nulls = measured["miscoupling"].mean(("prompt", "token")), {2: 1.2, 4: 0.3}
    pictures = coupling_pictures(matrices, nulls)
    for k, null in nulls.items():
        matrix = matrices.sel(k=k).values
        others = matrix[~np.eye(len(matrix), dtype=bool)]
        low, high = min(*others, null), max(*others, null)
        colours = colour_map().reversed()((others - low) / (high - low), bytes=True)
        seen = set(map(tuple, pictures[k].reshape(-1, 4)))
        assert {*map(tuple, colours), (211, 211, 211, 255)} <= seen  # light grey on the diagonal
        np.testing.assert_array_equal(pictures[k], coupling_pictures(matrices, {k: null})[k])


def test_a_measurement_allows_the_figures_that_need_one_step(measured):
    one_step = {"model": measured.expand_dims(step=[float("nan")])}
    allowed = [name for name, figure in FIGURES.items() if not lack(figure, one_step)]
    assert allowed == ["heatmap", "1c", "9", "34", "table1"]  # as docs/notebook.md lists them
    for name in allowed:
        for axes in tracker.plot(measured, name).axes:
            assert not axes.axison or (
                axes.get_ylabel() and (axes.get_xlabel() or not axes.get_xticks().size)
            ), name
            assert "nan" not in axes.get_title(), name


def test_a_figure_is_drawn_into_given_axes(measured, course):
    figure, (left, right) = plt.subplots(1, 2)
    assert tracker.plot(measured, ax=left) is figure and left.images and not right.has_data()
    assert tracker.plot(course, "1b", ax=right) is figure and right.get_ylabel().startswith(
        "Coupling: "
    )
    assert figure.get_suptitle() == ""
    with refused("ax is a Figure; give matplotlib axes"):
        tracker.plot(measured, ax=figure)
    with refused("takes a figure of one panel, and this one has 3; leave ax out"):
        tracker.plot(course, "curves", ax=left)
    plt.close(figure)


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_nothing_of_a_heat_map_overlaps_the_axes_beside_it(measured, layout):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout=layout)
    tracker.plot(measured, ax=left)
    figure.draw_without_rendering()
    shown = (left.get_legend(), left.title, figure.axes[-1].yaxis.label, *right.get_yticklabels())
    legend, title, label, *ticks = (artist.get_window_extent() for artist in shown)
    assert label.x1 < min(tick.x0 for tick in ticks)
    assert left.bbox.y1 <= legend.y0 and legend.y1 <= title.y0
    plt.close(figure)


def test_several_results_stand_beside_each_other_with_a_warning_of_what_differs(measured, course):
    other = tracker.measure(neox(), tokens(3), k=[2, 4], final_norm="exclude")
    differing = r"differ in final norm \(a: include; b: exclude\)"
    with pytest.warns(UserWarning, match=f"not measured alike: they {differing}"):
        figure = tracker.plot({"a": measured, "b": other})
    panels = [axes for axes in figure.axes if axes.images]
    titles = [f"{name}\nmis-coupling m_K, K = 2" for name in "ab"]
    assert [axes.get_title() for axes in panels] == titles
    assert panels[0].images[0].get_clim() == panels[1].images[0].get_clim()
    with refused(f"{differing}; give"):
        tracker.plot({"a": measured, "b": other}, "34")
    half = (course * 0.5).assign_attrs(course.attrs, inputs_sha256="other prompts")
    with pytest.warns(UserWarning, match=r"differ in inputs \("):
        coupling, lss, _ = tracker.plot([course, half]).axes
    names = [f"GPTNeoXForCausalLM ({i})" for i in (1, 2)]
    lines = {line.get_label(): line for line in coupling.lines}
    first, second = (lines[name] for name in names)
    np.testing.assert_allclose(second.get_ydata(), first.get_ydata() / 2, rtol=1e-6)
    assert first.get_color() != second.get_color() == lss.lines[1].get_color()


def test_runs_of_a_recipe_have_one_colour_and_one_label(course):
    recipes = {"a": [course, course], "b": course}
    coupling, *_ = tracker.plot(recipes).axes
    first, second, third = (line.get_color() for line in coupling.lines[:3])
    assert first == second != third
    labels = [text.get_text() for text in coupling.get_legend().texts]
    assert labels == ["a", "b", "unrelated blocks"]
    with refused("recipes a,b is for the figures curves"):
        tracker.plot(recipes, "heatmap")


@pytest.mark.parametrize("measure", VARIANTS)
def test_every_measure_of_pairs_of_blocks_is_drawn(course, measure):
    """Of another step and K."""
    figure = tracker.plot(course, "heatmap", measure=measure, k=4, step=0)
    expected = course[measure].sel(k=4, step=0).mean(("prompt", "token")).values
    left_out = not measure.endswith("_vju")
    entries_beside_the_diagonal(figure.axes[0].images[0], expected, left_out)
    assert figure.axes[0].get_title().endswith(f"{course[measure].attrs['long_name']}, K = 4")
    lines = tracker.plot(course, measure=measure, k=4, step=100).axes[0].lines
    drawn = {line.get_label(): line.get_ydata() for line in lines}[f"by {definition(measure)}"]
    points = curves(course, measure)[f"{measure}_coupling"].sel(k=4, pairs="mean_offdiag")
    np.testing.assert_allclose(drawn, points, rtol=1e-6, atol=1e-9)


def test_a_step_is_marked_in_curves(course):
    for name, panels in (("curves", 3), ("1b", 1)):
        marked = [axes.lines[-1] for axes in tracker.plot(course, name, step=100).axes]
        assert [list(line.get_xdata()) for line in marked[:panels]] == [[100, 100]] * panels


def test_stores_and_their_directories(measured, tmp_path):
    stores = [stored(tmp_path / name, {0: measured}) for name in ("a", "b")]
    for results in (stores, [stores[0], str(stores[1].path)], {"a": stores[0], "b": stores[1]}):
        panels = [axes for axes in tracker.plot(results).axes if axes.images]
        titles = [axes.get_title().split("\n")[0] for axes in panels]
        assert titles == ["a, step 0", "b, step 0"]
    assert tracker.plot(stores[0]).axes[0].images


NOT_MEASURED = "step 7 was not measured in all results; they share "
NO_MEASURE = "'lss' is no measure of pairs of blocks; choose from miscoupling, miscoupling_normed, "


@pytest.mark.parametrize(
    "name, chosen, said",
    [
        (
            "27",
            {},
            "needs 2 training steps or more, and GPTNeoXForCausalLM has one .* xarray.concat",
        ),
        ("33", {}, "does not state its training step, but the figure shows the untrained model"),
        ("3", {}, "lacks matrix; measure again with measures='coupling,trajectory,matrices'"),
        ("1a", {}, "no scores; give results of several models with scores"),
        (
            "nothing",
            {},
            "unknown .* 'nothing'; choose from curves, heatmap, 1a, .*, table4, .*, 1d, 1e, ",
        ),
        ("heatmp", {}, "unknown figure 'heatmp'; did you mean 'heatmap'\\? Choose from curves"),
        ("Fig. 1b", {}, "unknown figure 'Fig. 1b'; did you mean '1b'\\?"),
        (2, {}, "figure 2 is not drawn here: a diagram"),
        ("heatmap", {"k": 3}, "k 3 was not measured in all results; they share 2, 4"),
        ("heatmap", {"step": 7}, f"{NOT_MEASURED}none"),
    ],
)
def test_what_can_not_be_drawn(measured, name, chosen, said):
    with refused(said):
        tracker.plot(measured, name, **chosen)


@pytest.mark.parametrize("name", ["heatmap", "curves", "1b"])
def test_values_that_were_not_measured(course, name):
    without = course.drop_vars("offdiag_vju")
    for results, chosen, said in (
        (course, {"measure": "lss"}, NO_MEASURE),
        (course, {"step": 7}, f"{NOT_MEASURED}0, 100"),
        (without, {"measure": "offdiag_vju"}, "lacks offdiag_vju; measure again with measures="),
    ):
        with refused(said):
            tracker.plot(results, name, **chosen)


def test_what_is_no_result(measured, tmp_path):
    for other in ({}, None, [], [None], measured.miscoupling, {"a": 1}, measured.drop_attrs()):
        with refused("no results?; give a Dataset as from tracker.measure"):
            tracker.plot(other)
    with pytest.raises(FileNotFoundError, match="no results in"):
        tracker.plot(tmp_path)
