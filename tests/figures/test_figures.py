"""Each figure is drawn, and the numbers that it plots are computed again by other means."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from scipy import stats

import tracker
from tests.conftest import ROOT
from tests.models import VOCABULARY, Size, neox
from tests.rounding import rounding
from tests.stores import stored
from tracker.analysis.across_models import subset_fits
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import reduced
from tracker.common.errors import UsageError
from tracker.figures import drawing, jacobians
from tracker.figures.__main__ import main
from tracker.figures.coupling import MEASURE
from tracker.figures.drawing import logarithmic_y
from tracker.figures.registry import ALIASES, FIGURES, NOT_DRAWN
from tracker.figures.selection import draw
from tracker.measures.registry import BY_NAME, MISCOUPLINGS
from tracker.measures.settings import USUAL
from tracker.report.contents import contents
from tracker.store import Store
from tracker.store import open_results as read_results

K, STEPS, SCORED = 4, (0, 1, 8, 2000), ("1a", "7", "8", "31", "35", "36", "table4", "definitions")


@cache
def read(path):
    return read_results(path)


def open_results(path):
    """Open results, which are read once, as that takes longer than drawing."""
    return read(path).copy(deep=True)


@pytest.fixture(autouse=True)
def results_are_read_once(monkeypatch):
    monkeypatch.setattr("tracker.store.open_results", open_results)


def store(path, seed=0, size=None, measures=("coupling", "trajectory"), steps=STEPS, **options):
    """Write results of random models, a different one at each step, with scores."""
    made = Store(path)
    made.check_settings({"model": path.name})
    inputs = torch.randint(3, VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(1))
    for step in steps:
        torch.manual_seed(1000 * seed + step)
        unit = tracker.measure(
            neox(size=size), inputs, k=[K, 8], measures=measures, pair_tokens=[0, 2, 6], **options
        )
        unit["score"] = xr.DataArray(
            [0.1 * seed + 1e-5 * step, 0.3], {"task": ["arc", "wino"]}, "task"
        )
        made.write(step, unit.assign_coords(step=step, tokens_seen=1e6 * (step + seed)))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return store(tmp_path_factory.mktemp("one") / "toy", measures="all,tokenwise,halves")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Models of different sizes."""
    place = tmp_path_factory.mktemp("several")
    sizes = [Size(32, 3), Size(40, 4), Size(48, 3), Size(56, 5), Size(64, 4)]
    return [store(place / f"model{i}", i, size, steps=(0, 2000)) for i, size in enumerate(sizes)]


def drawn(name, results, out):
    assert (
        main(
            [
                name,
                *map(str, results if isinstance(results, list) else [results]),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    for suffix in ("pdf", "png", "csv"):
        assert (out / f"{ALIASES.get(name, name)}.{suffix}").stat().st_size > 0
    table = pd.read_csv(out / f"{ALIASES.get(name, name)}.csv")
    assert not [column for column in table if column.startswith("Unnamed")], (
        "all columns have names"
    )
    return table


def figure_of(name, *paths):
    """A figure, and its table."""
    return draw(name, {path.name: open_results(path) for path in paths}, None)


def close(seen, expected, **options):
    """Compare with what NumPy makes of the stored float32 numbers: means, medians and their differences."""
    options = {"rtol": rounding(torch.float32, operations=10), **options}
    np.testing.assert_allclose(np.asarray(seen, float), np.asarray(expected, float), **options)


def coupling(ds):
    """Null level less mis-coupling by eq. 14."""
    return (null_level(ds, "offdiag_normalized") - ds.offdiag_normalized).sel(k=K)


def off_diagonal(matrices):
    """Mean over l != l' of (..., L, L)."""
    L = matrices.shape[-1]
    return np.stack([matrices[..., l, m] for l in range(L) for m in range(L) if l != m]).mean(0)


@pytest.mark.slow
def test_1b(one, tmp_path):
    table, ds = drawn("1b", one, tmp_path), open_results(one)
    by_prompt = coupling(ds).transpose("step", "prompt", "token", "layer", "layer_other")
    close(table.coupling, off_diagonal(by_prompt.values[:, :, 0]).mean(1), atol=1e-6)
    assert (table.unrelated == 0).all()
    assert (table.low <= table.coupling).all() and (table.coupling <= table.high).all()


def with_onset(ds, steps, departed, by=0.2):
    """The results with other steps and offdiag_normalized at its null level, or so far below it where it has departed."""
    departure = xr.DataArray(np.where(departed, by, 0.0), dims="step") * xr.DataArray(
        [0.9, 1, 1.1, 1, 1], dims="prompt"
    )
    level = null_level(ds, "offdiag_normalized") - departure
    coupled = level.where(ds.layer != ds.layer_other, 0).transpose(*ds.offdiag_normalized.dims)
    return ds.assign(offdiag_normalized=coupled).assign_coords(step=list(steps))


@pytest.mark.parametrize("steps", [(0, 1, 8, 2000), (0, 64, 128, 192), (64, 128, 256, 512)])
@pytest.mark.parametrize("first", [0, 1])
def test_1b_draws_the_onset_between_steps_on_the_axis(one, steps, first):
    ds = with_onset(open_results(one), steps, np.arange(4) >= first)
    figure, table = draw("1b", {"toy": ds}, None)
    (panel,) = figure.axes
    earlier, later = 0 if first == 0 else steps[first - 1], steps[first]
    assert set(table.onset_after) == set(table.onset_low) == {earlier}
    assert set(table.onset_by) == set(table.onset_high) == {later}
    bands = [patch.get_extents().intervalx for patch in panel.patches]
    np.testing.assert_allclose(
        bands, [panel.transData.transform([(earlier, 0), (later, 0)])[:, 0]] * 2, atol=1e-6
    )
    assert len(panel.lines) == 2, "no line at a point between the steps"
    left, right = panel.get_xlim()
    assert left < earlier and right > steps[-1]
    place = panel.transData.transform([(step, 0) for step in (left, steps[1], right)])[:, 0]
    if 0 in steps and steps[1] == 64:
        assert place[1] - place[0] < 0.45 * (place[2] - place[0]), "half of the axis holds no step"


def test_1b_states_that_there_is_no_onset(one):
    figure, table = draw(
        "1b", {"toy": with_onset(open_results(one), STEPS, np.zeros(4, bool))}, None
    )
    assert figure.axes[0].get_legend().get_texts()[-1].get_text() == "onset: none beyond chance"
    assert table.onset_by.isna().all()


@pytest.mark.slow
def test_1b_and_the_page_state_no_onset_where_pairs_of_blocks_do_not_agree(one):
    """All prompts depart alike, as they share the weights: pairs of blocks above and below the level are chance."""
    ds, measure = with_onset(open_results(one), STEPS, np.arange(4) >= 2), "offdiag_normalized"
    level, sign = null_level(ds, measure), xr.where(ds.layer + ds.layer_other == 3, -1.9, 1.0)
    ds[measure] = (level - sign * (level - ds[measure])).transpose(*ds[measure].dims)
    figure, table = draw("1b", {"toy": ds}, None)
    assert figure.axes[0].get_legend().get_texts()[-1].get_text() == "onset: none beyond chance"
    assert table.onset_by.isna().all()
    assert contents(reduced(ds))["onset"][measure][K]["words"] == "none beyond chance"


def test_1c(one, tmp_path):
    table, ds = drawn("1c", one, tmp_path), open_results(one)
    assert sorted(set(table.step)) == [0, 8, 2000] and len(table) == 3 * 3, (
        "without an onset: evenly spaced"
    )
    row = table[(table.step == 2000) & (table.layer == 1) & (table.layer_other == 3)]
    last = coupling(ds).sel(step=2000)
    both = last.sel(layer=1, layer_other=3) + last.sel(layer=3, layer_other=1)
    close(row.coupling, both.mean() / 2, rtol=1e-5)


@pytest.mark.parametrize(
    "name, variable",
    [
        ("3", "matrix"),
        ("4", "self_matrix"),
        ("17", "self_matrix"),
        ("22", "fixed_input_matrix"),
        ("19", "fixed_output_matrix"),
    ],
)
def test_matrices(name, variable, one, tmp_path):
    table, ds = drawn(name, one, tmp_path), open_results(one)
    at = ds[variable].sel(step=2000).isel(prompt=0)
    if name == "3":
        part = table[(table.step == 2000) & (table.block == 1) & (table.block_other == 3)]
        expected = at.isel(token=0).sel(layer=1, layer_other=3)
    else:
        part = table[(table.step == 2000) & (table.token == 0) & (table.token_other == 6)]
        assert set(part.block) == {1} and set(part.block_other) == {2}
        expected = at.sel(layer=1).isel(pair_token=0, pair_token_other=2)
    assert len(part) == K * K and set(table.step) == {0, 2000}
    for _, entry in part.iterrows():
        close(entry.value, abs(expected.sel(row=entry.row, column=entry.column)))


@pytest.mark.parametrize("name", ["3", "4", "18", "19"])
def test_matrices_have_a_colour_bar_and_state_their_layers(name, one):
    figure, table = figure_of(name, one)
    first, last, bar = figure.axes
    assert bar.get_ylabel() == "|A| relative to the largest\nsingular value of the row's Jacobian"
    assert [panel.get_title().split("\n")[0] for panel in (first, last)] == [
        "toy, step 0",
        "toy, step 2,000",
    ]
    title = "J of token 6, blocks l and l'" if name == "3" else "l = 1, l' = 2"
    assert first.get_title().endswith(title) and (name == "3" or "block 2" in first.get_xlabel())
    picture, ds = last.images[0].get_array(), open_results(one).sel(step=2000).isel(prompt=0)
    if name == "3":
        A, s = ds.matrix.isel(token=0), ds.singular_value.isel(token=0).sel(rank=1)
        expected = abs(A.sel(layer=2, layer_other=1)) / s.sel(layer=2)
    else:
        variant = {"4": "self", "18": "fixed_input", "19": "fixed_output"}[name]
        A = ds[f"{variant}_matrix"].sel(layer=1)
        s = ds[f"{variant}_singular_value"].sel(layer=1, rank=1)
        expected = abs(A.isel(pair_token=1, pair_token_other=0)) / s.isel(pair_token=1)
    close(picture[K + 1 : 2 * K + 1, :K], expected, rtol=1e-5)


def test_5_and_25(one, tmp_path):
    table, ds = drawn("5", one, tmp_path), open_results(one)
    row = table[(table.variable == "lss") & (table.step == 2000)]
    close(
        row[["q25", "median", "q75"]].values[0],
        np.quantile(ds.lss.sel(step=2000), [0.25, 0.5, 0.75]),
    )
    close(drawn("25", one, tmp_path)["median"], np.median(ds.equidistance.sel(step=0)))


@pytest.mark.slow
def test_9(one, tmp_path):
    table, ds = drawn("9", one, tmp_path), open_results(one)
    below = coupling(ds).sel(step=2000).values[:, 0]
    close(table.coupling, off_diagonal(below), atol=1e-6)
    assert (table.tokens == 7).all() and "difficulty" not in table
    figure, _ = figure_of("9", one)
    assert figure.get_suptitle() == "Coupling of each prompt against its length"
    rated = ds.assign_coords(difficulty=("prompt", [3.0, 1, 4, 1, 5]))
    _, table = draw("9", {"rated": rated}, None)
    assert table.difficulty.tolist() == [3, 1, 4, 1, 5]
    close(table.coupling, off_diagonal(below), atol=1e-6)


def test_12(one, tmp_path):
    table, ds = drawn("13", one, tmp_path), open_results(one)
    row = table[(table.step == 0) & (table.position == 3) & (table.depth == 2)]
    close(
        row[["first", "second"]].values[0], ds.pca.sel(step=0, position=3, depth=2).isel(prompt=0)
    )
    first, *_ = figure_of("12", one)[0].axes
    shown = {text.get_text() for text in first.get_legend().get_texts()}
    drawn_as = {line.get_label(): line.get_xydata() for line in first.lines}
    assert shown == {"first token", "last token"}
    at = ds.pca.isel(step=0, prompt=0)
    close(drawn_as["last token"], at.isel(position=-1).transpose("depth", "component"))


@pytest.mark.slow
def test_15(one, tmp_path):
    other = store(tmp_path / "other", seed=3, steps=(0, 2000))
    table = drawn("15", [one, other], tmp_path)
    ds = open_results(other)
    below = coupling(ds).sel(step=2000).values[:, 0]
    close(
        table[table.result == "other"].coupling,
        [below[:, l].sum(-1).mean() / 2 for l in range(3)],
        atol=1e-6,
    )


def test_27_to_29(one, tmp_path):
    ds = open_results(one)
    close(
        drawn("27", one, tmp_path)["median"], [np.median(ds.lss.sel(step=step)) for step in STEPS]
    )
    for name, variable, sign in (("28", "lss_window", -1), ("29", "expodistance_window", 1)):
        table = drawn(name, one, tmp_path)
        layer = table.layer.iloc[0]
        expected = [np.median(sign * ds[variable].sel(layer=layer, step=step)) for step in STEPS]
        close(table[table.layer == layer]["median"], expected)


def test_32(one, tmp_path):
    table, ds = drawn("32", one, tmp_path), open_results(one)
    row = table[(table.depth == 3) & (table.noise == 0.1)]
    close(row["mean"], ds.noise_similarity.sel(step=2000, depth=3, noise=0.1).mean())


@pytest.fixture
def few_points(monkeypatch):
    """Let figures draw fits of four points."""
    for module in (drawing, jacobians):
        monkeypatch.setattr(module, "FEWEST_POINTS", 4)


@pytest.mark.slow
def test_33_and_34(one, tmp_path, few_points):
    ds = open_results(one)
    for name, step in (("33", 0), ("34", 2000)):
        table = drawn(name, one, tmp_path)
        s = np.median(ds.singular_value.sel(step=step, rank=1).values[:, 0], 0)
        close(table[table["rank"] == 1].value, s)
        assert table[table["rank"] == 1].r2.isna().all()  # three layers: no line
        _, inverse = figure_of(name, one)[0].axes
        assert "no line" in inverse.get_title() and len(inverse.lines) == 1
    deep = store(tmp_path / "deep", size=Size(32, 5), steps=(0, 1))
    table = drawn("34", deep, tmp_path)
    s = table[table["rank"] == 1]
    fit = stats.linregress(s.layer, 1 / s.value)
    close(s.r2, fit.rvalue**2)
    close(s.slope, fit.slope)
    assert (s.n == 5).all()
    _, inverse = figure_of("34", deep)[0].axes
    points, line = inverse.lines
    close(
        points.get_ydata(),
        1 / np.median(open_results(deep).singular_value.sel(step=1, rank=1).values[:, 0], 0),
    )
    close(line.get_xdata(), points.get_xdata())
    close(line.get_ydata(), fit.intercept + fit.slope * np.arange(1, 6))
    assert f"R² = {fit.rvalue**2:.2f}, n = 5 blocks" in inverse.get_title()


@pytest.mark.slow
def test_products(one, tmp_path):
    table, ds = drawn("products", one, tmp_path), open_results(one)
    s = ds.from_first_singular_value.isel(step=-1).median(("prompt", "token"))
    last = table[(table.step == 2000) & table["rank"].notna()].set_index(["rank", "layer"]).value
    assert last[2, 3] == pytest.approx(float(s.sel(rank=2, layer=3)))
    exponents = table[(table.step == 0) & table["exponent"].notna()].value
    np.testing.assert_allclose(
        exponents, ds.lyapunov_exponent.isel(step=0).median(("prompt", "token")), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, variable",
    [
        ("26", "entropy"),
        ("30", "expodistance_window"),
        ("effective_rank", "to_last_effective_rank"),
        ("normality", "mean_alignment"),
        ("depth_use", "linear_error"),
        ("halves", "mlp_share"),
    ],
)
def test_quartiles_by_depth(name, variable, one, tmp_path):
    table, values = drawn(name, one, tmp_path), open_results(one)[variable].sel(step=8)
    axis = "depth" if "depth" in values.dims else "layer"
    there = values.dropna(axis, how="all")
    row = table[(table.step == 8) & (table.variable == variable)]
    assert row.depth.tolist() == there[axis].values.tolist()
    expected = there.quantile([0.25, 0.5, 0.75], [dim for dim in there.dims if dim != axis])
    np.testing.assert_allclose(row[["q25", "median", "q75"]].T, expected, rtol=1e-5)


@pytest.mark.slow
def test_residual_alignment(one, tmp_path):
    table, ds = drawn("residual_alignment", one, tmp_path), open_results(one)
    A = abs(ds.mlp_matrix.isel(step=-1, prompt=0, token=0).sel(layer=2))
    found = table[(table.half == "mlp") & (table.layer == 2)].value.values.reshape(K, K)
    np.testing.assert_allclose(found, A, rtol=1e-5)


def test_residual_alignment_is_relative_to_the_block_without_the_final_norm(one):
    figure, _ = figure_of("residual_alignment", one)
    panels = [panel for panel in figure.axes if panel.get_title()]
    titles = [panel.get_title().splitlines()[1] for panel in panels]
    last = open_results(one).isel(step=-1, prompt=0, token=0, layer=-1)
    assert titles == [f"{half} of block {l}" for half in ("attention", "MLP") for l in (1, 2, 3)]
    np.testing.assert_allclose(
        panels[-1].images[0].get_array(),
        abs(last.mlp_matrix) / float(last.singular_value.sel(rank=1)),
        rtol=1e-5,
    )
    assert [panel.get_subplotspec().is_first_row() for panel in panels] == 3 * [True] + 3 * [
        False
    ]  # a row for each half


def test_null_levels_are_drawn_by_depth(one):
    figure, table = figure_of("halves", one)
    null = open_results(one).mlp_miscoupling_null.sel(step=8).median(("prompt", "token"))
    np.testing.assert_allclose(
        table[(table.step == 8) & (table.variable == "mlp_miscoupling")]["null"], null, rtol=1e-5
    )
    assert table[table.variable == "mlp_gain"]["null"].isna().all()
    legends = [
        [text.get_text() for text in panel.get_legend().get_texts()]
        for panel in figure.axes
        if panel.get_legend()
    ]
    assert ["null level" in legend for legend in legends] == [False, True, True]


def couplings_and_scores(paths):
    """Mean coupling and score of each model at the last step."""
    last = [open_results(path).sel(step=2000) for path in paths]
    couplings = [off_diagonal(coupling(ds).values[:, 0]).mean() for ds in last]
    return couplings, [float(ds.score.mean()) for ds in last]


@pytest.mark.slow
def test_of_several_models(several, tmp_path):
    couplings, scores = couplings_and_scores(several)
    for name in ("1a", "7"):
        table = drawn(name, several, tmp_path)
        close(table[f"coupling by eq. 14, K = {K}"], couplings)
        close(table.score, scores)
        assert (
            table[f"coupling by eq. 14, K = {K} low"] <= table[f"coupling by eq. 14, K = {K}"]
        ).all()
    table = drawn("35", several, tmp_path)
    assert table.blocks.tolist() == [3, 4, 3, 5, 4] and table.width.tolist() == [32, 40, 48, 56, 64]
    table = drawn("8", several, tmp_path)
    assert table["training tokens"].tolist() == [1e6 * (2000 + i) for i in range(5)]
    close(table.score, scores)
    assert {f"coupling by eq. 14, K = {K}", "coupling by eq. 14, K = 8"} < set(
        drawn("36", several, tmp_path)
    )


def with_gsm8k(paths, place, task="gsm8k"):
    """The last steps of these stores, with a score on GSM8K and on two others; the mean is not in proportion to it."""
    copies = []
    for i, path in enumerate(paths):
        unit = Store(path).read(2000).drop_dims("task")
        unit["score"] = xr.DataArray(
            [0.1 * i, 0.3, 0.05 * i**2], {"task": ["arc", "wino", task]}, "task"
        )
        copies.append(stored(place / path.name, {2000: unit}).path)
    return copies


def test_fits_of_few_points_are_not_drawn(several, tmp_path):
    for name in ("1a", "7"):
        figure, table = figure_of(name, *several)
        assert (
            figure.axes[0].get_title() == "n = 5: fewer than 8 points, no fit" and len(table) == 5
        )
        assert not figure.axes[0].lines or not any(
            len(line.get_xdata()) for line in figure.axes[0].lines
        )
    figure, table = figure_of("table4", *several)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "all\nn = 5: fewer than 8 points, no fit"
    ]
    assert (
        table.r2.notnull().all()
        and not np.isfinite(np.asarray(figure.axes[0].lines[0].get_xdata(), float)).any()
    )
    figure, table = figure_of("definitions", *several)
    assert table.r.notnull().all() and {text.get_text() for text in figure.axes[0].texts} == {
        "n = 5"
    }


@pytest.mark.slow
def test_31(several, tmp_path, capsys, few_points):
    paths = with_gsm8k(several, tmp_path)
    table = drawn("31", paths, tmp_path)
    one = [0.05 * i**2 for i in range(5)]
    mean = [(0.1 * i + 0.3 + 0.05 * i**2) / 3 for i in range(5)]
    close(table.gsm8k, one)
    close(table["mean score"], mean)
    figure, _ = figure_of("31", *paths)
    fit = stats.linregress(mean, one)
    close(
        figure.axes[0].lines[0].get_ydata(),
        fit.intercept + fit.slope * np.array([min(mean), max(mean)]),
        rtol=1e-4,
    )
    assert f"R² = {fit.rvalue**2:.2f}" in figure.axes[0].get_title()
    assert main(["31", *map(str, several)]) == 2
    error = capsys.readouterr().err
    assert "have arc, wino in common, but not gsm8k; join its scores: --scores FILE" in error
    assert main(["31", *map(str, paths[:3])]) == 2
    assert "compares at least 4 results; 3 given" in capsys.readouterr().err


@pytest.mark.slow
def test_table_1(several, tmp_path):
    unit = Store(several[0]).read(0).drop_dims("task").drop_vars("tokens_seen")
    unscored = stored(tmp_path / "unscored", {0: unit.assign_attrs(final_norm="exclude")})
    table = drawn("table1", [*several, unscored.path], tmp_path)
    widths, blocks = [32, 40, 48, 56, 64, 32], [3, 4, 3, 5, 4, 3]
    sizes = [neox(size=Size(width, layers)) for width, layers in zip(widths, blocks, strict=True)]
    assert table.parameters.tolist() == [
        sum(p.numel() for p in model.parameters()) for model in sizes
    ]
    assert table.blocks.tolist() == blocks and table.width.tolist() == widths
    assert set(table.architecture) == {"GPTNeoXForCausalLM"}
    close(table["training tokens"], [1e6 * (2000 + i) for i in range(5)] + [np.nan])
    close(table.score, [(0.1 * i + 2e-2 + 0.3) / 2 for i in range(5)] + [np.nan])
    figure, _ = figure_of("table1", *several, unscored.path)
    (cells,) = figure.axes[0].tables
    assert cells[1, 5].get_text().get_text() == "2,000,000,000"
    assert [cells[6, column].get_text().get_text() for column in (0, 3, 5, 6)] == [
        "unscored",
        "32",
        "—",
        "—",
    ]
    assert figure.get_supxlabel() == (
        "score: mean of arc, wino\ntraining tokens: read by a walk from the names of checkpoints, see docs/checkpoints.md"
    )


def rows_of_the_docs():
    """Title, results and what is drawn of each figure in the tables of docs/figures.md, by the figure's names."""
    tables = (
        (ROOT / "docs" / "figures.md")
        .read_text()
        .split("| figure | shows | results | drawn |\n|---|---|---|---|\n")[1:]
    )
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {names: rest for names, *rest in cells}


def test_the_tables_in_the_docs_are_those_of_the_registry():
    listed = rows_of_the_docs()
    drawn = {", ".join((name, *figure.also)): figure.title for name, figure in FIGURES.items()}
    assert {names: title for names, (title, *_) in listed.items() if title} == drawn
    assert {
        name for names, (title, *_) in listed.items() if not title for name in names.split(", ")
    } == {*NOT_DRAWN}


def test_the_docs_state_how_every_figure_is_drawn():
    """The statistic is stated wherever there is a choice, and what a figure needs."""
    listed = {names.split(", ")[0]: rest for names, rest in rows_of_the_docs().items()}
    for name, figure in FIGURES.items():
        _, results, drawn = listed[name]
        states = [
            need
            for need in figure.needs
            if need.startswith(("lss", "expodistance", "equidistance"))
        ]
        if states or "singular_value" in figure.needs:
            assert "median" in drawn or drawn.startswith("as 33"), name
        if {"pca", "noise_similarity"} & set(figure.needs):
            assert "without the final norm" in drawn, "which is not stored"
        if MEASURE in figure.needs and name not in ("curves", "definitions"):
            assert "coupling as in the paper" in drawn or name == "1c", name
        assert (figure.results < 4) == ("4 models or more with scores" not in results), name
        of_option = {BY_NAME[need].option for need in figure.needs if need in BY_NAME} - set(USUAL)
        assert all(option in results or results == "as for 4" for option in of_option), name
    for name, why in NOT_DRAWN.items():
        (drawn,) = [
            rest[-1] for names, rest in rows_of_the_docs().items() if name in names.split(", ")
        ]
        assert drawn.startswith("by `python -m vit.analysis" if "vit.analysis" in why else "not: ")


def test_the_models_that_the_authors_code_names_are_listed():
    models = pd.read_csv(ROOT / "checkpoints" / "data" / "paper_models.csv")
    assert models.columns.tolist() == ["model", "repository"] and len(models) == 45
    assert models.model.is_unique and models.repository.is_unique
    assert models.repository.str.fullmatch(r"[\w-]+/[\w.-]+").all()


def test_subsets_of_models(several, tmp_path):
    couplings, scores = couplings_and_scores(several)
    table = drawn("table4", several, tmp_path)
    assert table.subset.tolist() == ["all"], "one family, and halves of three and two, are too few"
    fit = stats.linregress(couplings, scores)
    close(
        table[["n", "r2", "slope", "p"]].values[0],
        [5, fit.rvalue**2, fit.slope, fit.pvalue],
        rtol=1e-3,
    )

    rng = np.random.default_rng(0)
    made = pd.DataFrame(
        {
            "c": rng.normal(size=12),
            "architecture": ["a"] * 6 + ["b"] * 5 + ["c"],
            "parameters": np.arange(12),
            "cluster": range(12),
        }
    )
    made["score"] = made["c"] + rng.normal(size=12)
    table = subset_fits(made, "c")
    names = ["all", "a only", "without a", "b only", "without b", "without c"]
    assert table.subset.tolist()[:6] == names and table.n.tolist() == [12, 6, 6, 5, 7, 11, 6, 6]
    assert (table.p_holm >= table.p).all()
    fit = stats.linregress(made.c[made.architecture == "b"], made.score[made.architecture == "b"])
    only = table[table.subset == "b only"].iloc[0]
    close([only.r2, only.p], [fit.rvalue**2, fit.pvalue])


@pytest.mark.slow
def test_definitions(several, tmp_path):
    table = drawn("definitions", several, tmp_path)
    assert len(table) == 2 * len(MISCOUPLINGS) * 2 * 3  # each before the final norm too
    row = table[
        (table.measure == "miscoupling_release") & (table.k == 8) & (table.pairs == "mean")
    ].iloc[0]
    last = [open_results(path).sel(step=2000) for path in several]
    over = ("prompt", "token", "layer", "layer_other")
    # A block's own basis is exact: its null level is 0
    apart = [ds.layer != ds.layer_other for ds in last]
    couplings = [
        float((null_level(ds, "miscoupling_release") - ds.miscoupling_release).sel(k=8).mean(over))
        for ds, other in zip(last, apart, strict=True)
    ]
    fit = stats.linregress(couplings, [float(ds.score.mean()) for ds in last])
    close([row.r, row.p], [fit.rvalue, fit.pvalue], rtol=1e-5)


def scored(count=4, steps=(0,)):
    """Return results of models of different widths, with scores."""
    inputs = torch.randint(3, VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(1))
    results = {}
    for i in range(count):
        torch.manual_seed(i)
        ds = tracker.measure(neox(size=Size(32 + 8 * i, 3)), inputs, k=K)
        ds["score"] = xr.DataArray([0.1 * i, 0.3], {"task": ["arc", "wino"]}, "task")
        results[f"model{i}"] = xr.concat([ds.assign_coords(step=step) for step in steps], "step")
    return results


def test_definitions_by_the_paper_s_convention_are_minus_the_mis_coupling():
    results = scored()
    figure, table = draw("definitions", results, K, convention="paper")
    (row,) = table[(table.measure == "miscoupling_release") & (table.pairs == "mean")].itertuples()
    negative = [-float(ds.miscoupling_release.mean()) for ds in results.values()]
    scores = [float(ds.score.mean()) for ds in results.values()]
    close(row.r, stats.linregress(negative, scores).rvalue, rtol=1e-5)
    assert "r of minus mis-coupling and score" in figure.axes[-1].get_ylabel()
    figure.draw_without_rendering()
    cells = figure.axes[0].get_window_extent()
    labels = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert cells.width > 50 and min(label.x0 for label in labels) >= 0, "one K leaves room for both"
    figure, ours = draw("definitions", results, K)
    assert (
        abs(ours.r[row.Index] - row.r) > 1e-3
        and "r of coupling and score" in figure.axes[-1].get_ylabel()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "unknown, message",
    [
        ("score", "have no benchmark in common"),
        ("offdiag_normalized", "3 of 5 results have coupling by eq. 14, K = 4, score"),
    ],
)
def test_too_few_results_with_scores(unknown, message, several, tmp_path, capsys):
    known = {path: Store(path).read(2000) for path in several[:2]}
    units = {
        path.name: unit.assign({unknown: unit[unknown] * np.nan}) for path, unit in known.items()
    }
    others = [stored(tmp_path / name, {2000: unit}).path for name, unit in units.items()]
    assert main(["table4", *map(str, [*others, *several[2:]])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_all_that_can_be_drawn_and_why_the_others_can_not(one, tmp_path, capsys):
    assert main(["all", str(one), "--out", str(tmp_path / "all")]) == 0
    printed = capsys.readouterr().out
    # One line for one cause.
    scored = ", ".join(name for name in FIGURES if name in SCORED)
    assert f"not drawn: {scored}: it compares at least 4 results; 1 given" in printed.splitlines()
    assert len([line for line in printed.splitlines() if line.startswith("not drawn")]) == 2
    made = {path.stem for path in (tmp_path / "all").glob("*.pdf")}
    assert made == {*FIGURES} - {*SCORED, "15"}


@pytest.mark.parametrize(
    "low, high, labels",
    [(10, 18, set(range(10, 19))), (0.4, 3.5, {0.5, 1, 2, 3}), (0.002, 50, {0.01, 0.1, 1, 10})],
)
def test_logarithmic_axes_have_plain_numbers(low, high, labels):
    axes = Figure(figsize=(3, 3)).subplots()
    axes.plot([low, high])
    logarithmic_y(axes)
    axes.set_ylim(low, high)
    axes.figure.draw_without_rendering()
    texts = axes.get_yticklabels() + axes.get_yticklabels(minor=True)
    assert {
        float(text.get_text())
        for text in texts
        if text.get_text() and low <= text.get_position()[1] <= high
    } == labels


def test_the_notes_of_the_table_are_within_the_figure(one):
    results = {"toy": open_results(one).drop_vars("tokens_seen")}
    figure, _ = draw("table1", results, None)
    figure.draw_without_rendering()
    note = figure._supxlabel.get_window_extent()
    assert (
        0 <= note.x0 and note.x1 <= figure.bbox.x1 and "training tokens" in figure.get_supxlabel()
    )


def test_list(one, capsys):
    assert main(["list", str(one)]) == 0
    lines = capsys.readouterr().out
    assert "12, 13" in lines and "can be drawn" in lines and "table2      not drawn here: " in lines
    assert main(["list"]) == 0
    assert "needs pca" in capsys.readouterr().out


def test_every_figure_and_table_of_the_paper_is_drawn_or_has_a_reason():
    names = {*FIGURES, *ALIASES}
    assert not names & {*NOT_DRAWN}
    numbers = {name.rstrip("abcde") for name in names | {*NOT_DRAWN}}
    assert {*map(str, range(1, 37)), *(f"table{i}" for i in range(1, 5))} <= numbers


@pytest.mark.parametrize("name", NOT_DRAWN)
def test_what_is_not_drawn_is_refused_before_results_are_opened(name, monkeypatch, capsys):
    monkeypatch.setattr("tracker.store.open_results", lambda _: pytest.fail("opened"))
    assert main([name, "results"]) == 2
    error = capsys.readouterr().err
    assert f"figure {name} is not drawn here: " in error and len(error.strip().splitlines()) == 1
    assert ("python -m vit.analysis GRID" in error) == (name in ("6", "10", "11"))


def test_names_are_checked_before_results_are_opened(monkeypatch, capsys):
    monkeypatch.setattr("tracker.store.open_results", lambda _: pytest.fail("opened"))
    for given, meant in (("heatmp", "heatmap"), ("Table 2", "table2"), ("6a", "6")):
        assert main([given, "results"]) == 2
        assert f"did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", "unknown figure 'nothing'; choose from curves, heatmap, 1a"),
        (
            "3",
            "lacks matrix; measure again with measures='coupling,trajectory,matrices' (a walk: --measures, another --out)",
        ),
        ("1a", "compares at least 4 results; 1 given"),
    ],
)
def test_what_can_not_be_drawn(name, message, several, tmp_path, capsys):
    assert main([name, str(several[0]), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_measure_k_and_step_are_chosen_on_the_command_line(one, tmp_path):
    options = ["--measure", "miscoupling_normed", "--k", "8", "--step", "8"]
    assert main(["heatmap", str(one), "--out", str(tmp_path), *options]) == 0
    table = pd.read_csv(tmp_path / "heatmap.csv")
    drawn = table[table.layer != table.layer_other].miscoupling_normed
    stored = open_results(one).miscoupling_normed.sel(k=8, step=8)
    close(drawn.mean(), stored.where(stored.layer != stored.layer_other).astype(float).mean())


def test_a_step_that_was_not_measured(one, capsys):
    assert main(["1b", str(one), "--step", "7"]) == 2
    assert (
        "step 7 was not measured in all results; they share 0, 1, 8, 2000"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_scores_are_of_the_benchmarks_that_all_have(several, tmp_path, capsys):
    other = store(tmp_path / "other", seed=9, steps=(0, 2000))
    made = Store(other)
    for step in (0, 2000):
        unit = made.read(step).drop_dims("task")
        unit["score"] = xr.DataArray([0.7], {"task": ["wino"]}, "task")
        made.write(step, unit)
    table = drawn("1a", [*several, other], tmp_path)
    close(table.score, [0.3] * 5 + [0.7])


def test_untrained_is_step_0(one):
    with pytest.raises(
        UsageError, match="late starts at step 8, but the figure shows the untrained model"
    ):
        draw("33", {"late": open_results(one).sel(step=[8, 2000])}, None)


def test_results_that_share_no_k(one):
    results = {f"K = {k}": open_results(one).sel(k=[k]) for k in (K, 8)}
    with pytest.raises(UsageError, match="the results share no k; measure them with a common one"):
        draw("1b", results, None)


def test_no_results(capsys):
    assert main(["1b"]) == 2
    assert "give a directory of results" in capsys.readouterr().err
    assert main(["1b", "nowhere"]) == 2
