"""Each figure is drawn, and the numbers that it plots are computed again by other means."""

import re
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from scipy import stats

import tracker
from tests.conftest import ROOT
from tests.support.draws import integers
from tests.support.models import VOCABULARY, neox
from tests.support.refused import refused
from tests.support.rounding import rounding
from tests.support.stores import stored, unit
from tracker.analysis.across_models import subset_fits
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import reduced
from tracker.figures import drawing, jacobians
from tracker.figures.__main__ import main
from tracker.figures.drawing import logarithmic_y
from tracker.figures.registry import ALIASES, FIGURES, NOT_DRAWN
from tracker.figures.selection import draw
from tracker.measures.registry import BY_NAME
from tracker.measures.settings import USUAL
from tracker.report.contents import contents
from tracker.store import open_results as read_results

K, STEPS, SCORED = 4, (0, 1, 8, 2000), "1a 7 8 31 35 36 table4".split()


@cache
def read(path):
    return read_results(path)


def open_results(path):
    """Open results, which are read once, as that takes longer than drawing."""
    return read(path).copy(deep=True)


def scored(unit, step, model=0):
    """A unit with scores and training tokens."""
    score = xr.DataArray([0.1 * model + 1e-5 * step, 0.3], {"task": ["arc", "wino"]}, "task")
    unit = unit.drop_dims("task", errors="ignore").assign(score=score)
    return unit.assign_coords(tokens_seen=1e6 * (step + model))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Every measure of a random model, a different one at each step."""
    inputs, units = integers(3, VOCABULARY, 5, 7), {}
    for step in STEPS:
        torch.manual_seed(step)
        unit = tracker.measure(
            neox(), inputs, k=[K, 8], measures="all,tokenwise", pair_tokens=[0, 2, 6]
        )
        units[step] = scored(unit, step)
    return stored(tmp_path_factory.mktemp("one") / "toy", units).path


SIZES = [(32, 3), (40, 4), (48, 3), (56, 5), (64, 4)]  # widths and blocks


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Models of different sizes."""
    place, paths = tmp_path_factory.mktemp("several"), []
    for i, (width, blocks) in enumerate(SIZES):
        sizes = {"width": width, "parameters": width**2, "model_class": "tests.GPTNeoX"}
        units = {
            step: scored(unit(step, blocks, (K, 8), 5, False, i, **sizes), step, i)
            for step in (0, 2000)
        }
        paths.append(stored(place / f"model{i}", units).path)
    return paths


def of_stores(*paths):
    """Results by their names."""
    return {path.name: open_results(path) for path in paths}


def figure_of(name, *paths):
    """A figure, and its table."""
    return draw(name, of_stores(*paths), None)


def with_scores(ds, **scores):
    """Results with other scores, the same at each step."""
    of_steps = np.outer(np.ones(ds.sizes["step"]), [*scores.values()])
    score = xr.DataArray(of_steps, {"step": ds.step, "task": [*scores]}, ("step", "task"))
    return ds.drop_dims("task").assign(score=score)


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


def below_null(ds):
    """Coupling (step, prompt, layer, layer_other) of the one token."""
    dims = ("step", "prompt", "token", "layer", "layer_other")
    return coupling(ds).transpose(*dims).values[:, :, 0]


def both_ways(ds, l, m):
    """Coupling of a pair of blocks at the last step."""
    last = below_null(ds)[-1]
    return (last[:, l - 1, m - 1] + last[:, m - 1, l - 1]).mean() / 2


def tile(variable):
    """|A| of tokens 0 and 6 in block 1, of the first prompt at the last step."""
    at = {"pair_token": 0, "pair_token_other": 2, "prompt": 0, "step": -1}
    return lambda ds: abs(ds[variable].sel(layer=1).isel(at))


def quantiles(variable, q=(0.25, 0.5, 0.75), **at):
    """Quantiles at each step, depth or block that is left of these, where there are values."""

    def of(ds):
        values = ds[variable].sel(at)
        axes = [dim for dim in values.dims if dim in ("step", "depth", "layer")]
        for axis in axes:
            values = values.dropna(axis, how="all")
        return values.quantile(q, [dim for dim in values.dims if dim not in axes])

    return of


median = partial(quantiles, q=[0.5])
QUARTILES = ["q25", "median", "q75"]
TOKENS = {"step": 2000, "block": 1, "block_other": 2, "token": 0, "token_other": 6}
# A figure, rows of its table, columns, and their values, of the results
NUMBERS = [
    ("1b", {}, "coupling", lambda ds: off_diagonal(below_null(ds)).mean(1)),
    (
        "1c",
        {"step": 2000, "layer": 1, "layer_other": 3},
        "coupling",
        lambda ds: both_ways(ds, 1, 3),
    ),
    (
        "3",
        {"step": 2000, "block": 1, "block_other": 3},
        "value",
        lambda ds: abs(ds.matrix.sel(layer=1, layer_other=3).isel(step=-1, prompt=0, token=0)),
    ),
    ("4", TOKENS, "value", tile("self_matrix")),
    ("18", TOKENS, "value", tile("fixed_input_matrix")),
    ("19", TOKENS, "value", tile("fixed_output_matrix")),
    ("5", {"step": 2000, "variable": "lss"}, QUARTILES, quantiles("lss", step=2000)),
    ("25", {}, "median", median("equidistance", step=0)),
    ("9", {}, "coupling", lambda ds: off_diagonal(below_null(ds)[-1])),
    ("9", {}, "tokens", lambda ds: [7] * 5),
    (
        "12",
        {"step": 0, "position": 3, "depth": 2},
        ["first", "second"],
        lambda ds: ds.pca.sel(step=0, position=3, depth=2).isel(prompt=0),
    ),
    ("27", {}, "median", median("lss")),
    ("28", {"layer": 2}, "median", lambda ds: -median("lss_window", layer=2)(ds)),
    ("29", {"layer": 2}, "median", median("expodistance_window", layer=2)),
    (
        "32",
        {"depth": 3, "noise": 0.1},
        "mean",
        lambda ds: ds.noise_similarity.sel(step=2000, depth=3, noise=0.1).mean(),
    ),
    ("33", {"rank": 1}, "value", median("singular_value", step=0, rank=1)),
    ("34", {"rank": 2}, "value", median("singular_value", step=2000, rank=2)),
    (
        "products",
        {"step": 2000, "rank": 2, "layer": 3},
        "value",
        median("from_first_singular_value", step=2000, rank=2, layer=3),
    ),
    *(
        (name, {"step": 8, "variable": variable}, QUARTILES, quantiles(variable, step=8))
        for name, variable in {
            "26": "entropy",
            "30": "norm",
            "effective_rank": "to_last_effective_rank",
            "normality": "mean_alignment",
            "depth_use": "linear_error",
        }.items()
    ),
]


@pytest.mark.parametrize("name, where, columns, expected", NUMBERS)
def test_numbers(name, where, columns, expected, one):
    table = table_of(name, one)
    rows = table[(table[list(where)] == list(where.values())).all(axis=1)]
    values = np.ravel(expected(open_results(one)))
    close(rows[columns].to_numpy().T.ravel(), values, rtol=1e-5, atol=1e-6)


def test_a_line_is_of_medians_within_its_band(one):
    figure, table = figure_of("27", one)
    (panel,) = figure.axes
    close(panel.lines[0].get_ydata(), table["median"])
    (band,) = panel.collections
    heights = band.get_paths()[0].vertices[:, 1]
    close([heights.min(), heights.max()], [table.q25.min(), table.q75.max()])


@cache
def table_of(name, path):
    return figure_of(name, path)[1]


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
    onset = [0, *steps][first : first + 2] if first else [0, steps[0]]
    ends = table[["onset_after", "onset_by", "onset_low", "onset_high"]].drop_duplicates()
    assert ends.values.tolist() == [onset * 2]
    bands = [patch.get_extents().intervalx for patch in panel.patches]
    places = panel.transData.transform([(step, 0) for step in onset])[:, 0]
    np.testing.assert_allclose(bands, [places] * 2, atol=1e-6)
    assert len(panel.lines) == 2, "no line at a point between the steps"
    left, right = panel.get_xlim()
    assert left < onset[0] and right > steps[-1]


@pytest.mark.slow
def test_1b_and_the_page_state_no_onset_where_pairs_of_blocks_do_not_agree(one):
    """All prompts depart alike, as they share the weights: pairs of blocks above and below the level are chance."""
    ds, measure = with_onset(open_results(one), STEPS, np.arange(4) >= 2), "offdiag_normalized"
    level, sign = null_level(ds, measure), xr.where(ds.layer + ds.layer_other == 3, -1.9, 1.0)
    ds[measure] = (level - sign * (level - ds[measure])).transpose(*ds[measure].dims)
    assert draw("1b", {"toy": ds})[1].onset_by.isna().all()
    assert (
        contents(reduced(ds))["onset"][measure][K]["words"] == "none beyond chance at 2.5 % / steps"
    )


def test_1c_without_an_onset_shows_evenly_spaced_steps(one):
    assert table_of("1c", one).step.unique().tolist() == [0, 8, 2000]


@pytest.mark.parametrize("name", ["3", "4", "18", "19"])
def test_matrices_state_their_layers_and_are_those_of_the_table(name, one):
    figure, table = figure_of(name, one)
    first, last, bar = figure.axes
    assert bar.get_ylabel() == "|A| relative to the largest\nsingular value of the row's Jacobian"
    layers = "J of token 6, blocks l and l'" if name == "3" else "l = 1, l' = 2"
    title = first.get_title()
    assert title.startswith("toy, step 0\n") and title.endswith(layers)
    # The second row of tiles and its first column
    at = {"block": 2, "block_other": 1} if name == "3" else {"token": 2, "token_other": 0}
    rows = table[(table[["step", *at]] == [2000, *at.values()]).all(axis=1)]
    variable = {"3": "", "4": "self_", "18": "fixed_input_", "19": "fixed_output_"}[name]
    s = open_results(one)[f"{variable}singular_value"].isel(step=-1, prompt=0, rank=0)
    s = s.isel(token=0, layer=1) if name == "3" else s.isel(pair_token=1, layer=0)
    tile = last.images[0].get_array()[K + 1 : 2 * K + 1, :K]
    close(tile.ravel() * float(s), rows.value, rtol=1e-5)


def test_9_shows_the_difficulty_of_prompts_that_have_one(one):
    figure, table = figure_of("9", one)
    assert figure.get_suptitle() == "Coupling of each prompt against its length"
    assert "difficulty" not in table
    rated = open_results(one).assign_coords(difficulty=("prompt", [3.0, 1, 4, 1, 5]))
    _, of_rated = draw("9", {"rated": rated})
    assert of_rated.difficulty.tolist() == [3, 1, 4, 1, 5]
    close(of_rated.coupling, table.coupling)


@pytest.fixture
def few_points(monkeypatch):
    """Let figures draw fits of four points."""
    for module in (drawing, jacobians):
        monkeypatch.setattr(module, "FEWEST_POINTS", 4)


@pytest.mark.slow
def test_34_has_the_line_of_1_over_s(one, several, few_points):
    _, inverse = figure_of("33", one)[0].axes  # three layers: no line
    assert "no line" in inverse.get_title() and len(inverse.lines) == 1
    figure, table = figure_of("34", several[3])
    s = table[table["rank"] == 1]
    fit = stats.linregress(s.layer, 1 / s.value)
    close([s.r2, s.slope, s.n], [[of] * 5 for of in (fit.rvalue**2, fit.slope, 5)])
    points, line = (drawn.get_xydata() for drawn in figure.axes[1].lines)
    close(points, np.stack([s.layer, 1 / s.value], 1))
    close(line, np.stack([s.layer, fit.intercept + fit.slope * s.layer], 1))
    assert f"R² = {fit.rvalue**2:.2f}, n = 5 blocks" in figure.axes[1].get_title()


COUPLING = f"coupling by eq. 14, K = {K}"


@pytest.mark.slow
def test_of_several_models(several):
    last = [open_results(path).sel(step=2000) for path in several]
    properties = {
        COUPLING: [off_diagonal(coupling(ds).values[:, 0]).mean() for ds in last],
        "score": [ds.score.mean() for ds in last],
        "blocks": [3, 4, 3, 5, 4],
        "width": [32, 40, 48, 56, 64],
        "training tokens": [1e6 * (2000 + i) for i in range(5)],
    }
    shown = {
        "1a": [COUPLING, "score"],
        "7": [COUPLING, "score"],
        "8": ["training tokens", COUPLING, "score"],
        "35": ["blocks", "width", COUPLING, "score"],
        "36": [COUPLING, "score"],
    }
    for name, columns in shown.items():
        table = figure_of(name, *several)[1]
        close(table[columns].T, [properties[column] for column in columns])
        assert (table[f"{COUPLING} low"] <= table[COUPLING]).all()
        assert ("coupling by eq. 14, K = 8" in table) == (name == "36")


def test_fits_of_few_points_are_not_drawn(several):
    said = "n = 5: fewer than 8 points, no fit"
    (panel,) = figure_of("7", *several)[0].axes
    assert panel.get_title() == said
    assert not [line for line in panel.lines if len(line.get_xdata())]
    figure, table = figure_of("table4", *several)
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == [f"all\n{said}"]
    assert table.r2.notnull().all() and np.isnan(panel.lines[0].get_xdata().astype(float)).all()


@pytest.mark.slow
def test_31(several, few_points):
    """A mean score that is not in proportion to that on GSM8K."""
    results = of_stores(*several)
    with refused("have arc, wino in common, but not gsm8k; join its scores: --scores FILE"):
        draw("31", results)
    for i, (name, ds) in enumerate(results.items()):
        results[name] = with_scores(ds, arc=0.1 * i, wino=0.3, gsm8k=0.05 * i**2)
    figure, table = draw("31", results)
    one = [0.05 * i**2 for i in range(5)]
    mean = [(0.1 * i + 0.3 + of) / 3 for i, of in enumerate(one)]
    close(table[["mean score", "gsm8k"]].T, [mean, one])
    fit = stats.linregress(mean, one)
    x, y = figure.axes[0].lines[0].get_xydata().T
    close(y, fit.intercept + fit.slope * x, rtol=1e-4)
    assert f"R² = {fit.rvalue**2:.2f}" in figure.axes[0].get_title()
    with refused("compares at least 4 results; 3 given"):
        figure_of("31", *several[:3])


@pytest.mark.slow
def test_table_1(several):
    results = of_stores(*several)
    unscored = results["model0"].drop_dims("task").drop_vars("tokens_seen")
    results["unscored"] = unscored.assign_attrs(final_norm="exclude")
    figure, table = draw("table1", results)
    (cells,) = figure.axes[0].tables
    drawn = [cells[row, column].get_text().get_text() for row in (1, 6) for column in range(7)]
    first = ["model0", "GPTNeoX", "3", "32", "1,024", "2,000,000,000", "0.1600"]
    assert drawn == [*first, "unscored", *first[1:5], "—", "—"]
    close(table.score, [(0.1 * i + 2e-2 + 0.3) / 2 for i in range(5)] + [np.nan])
    assert figure.get_supxlabel() == (
        "score: mean of arc, wino\ntraining tokens: read by a walk from the names of checkpoints, see docs/checkpoints.md"
    )


def test_the_tables_in_the_docs_are_those_of_the_registry():
    """Names, titles, and which results a figure needs."""
    head = "| figure | shows | results | drawn |\n|---|---|---|---|\n"
    _, *tables = (ROOT / "docs" / "figures.md").read_text().split(head)
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    listed = {names: (title, results) for names, title, results, _ in rows if title}
    drawn = {", ".join((name, *figure.also)): figure for name, figure in FIGURES.items()}
    assert listed.keys() == drawn.keys()
    assert {one for names, title, *_ in rows if not title for one in names.split(", ")} == {
        *NOT_DRAWN
    }
    for names, figure in drawn.items():
        title, results = listed[names]
        assert title == figure.title
        assert (figure.results < 4) == ("4 models or more with scores" not in results), names
        of_option = {BY_NAME[need].option for need in figure.needs if need in BY_NAME} - set(USUAL)
        assert all(option in results or results == "as for 4" for option in of_option), names


def test_the_models_that_the_authors_code_names_are_listed():
    models = pd.read_csv(ROOT / "checkpoints" / "data" / "paper_models.csv")
    assert len(models) == 45 and models.nunique().to_dict() == {"model": 45, "repository": 45}
    assert models.repository.str.fullmatch(r"[\w-]+/[\w.-]+").all()


def test_subsets_of_models():
    made = pd.DataFrame(np.random.default_rng(0).normal(size=(12, 2)), columns=["c", "score"])
    made = made.assign(architecture=[*"aaaaaabbbbbc"], parameters=range(12), cluster=range(12))
    table = subset_fits(made, "c")
    names = ["all", "a only", "without a", "b only", "without b", "without c"]
    assert table.subset.tolist()[:6] == names and table.n.tolist() == [12, 6, 6, 5, 7, 11, 6, 6]
    assert (table.p_holm >= table.p).all()
    fit = stats.linregress(made.c[6:11], made.score[6:11])
    close(table.loc[3, ["r2", "p"]], [fit.rvalue**2, fit.pvalue])


@pytest.mark.parametrize(
    "unknown, message",
    [
        ("score", "have no benchmark in common"),
        ("offdiag_normalized", "3 of 5 results have coupling by eq. 14, K = 4, score"),
    ],
)
def test_too_few_results_with_scores(unknown, message, several):
    results = of_stores(*several)
    for name in ("model0", "model1"):
        results[name][unknown] = results[name][unknown] * np.nan
    with refused(message):
        draw("table4", results)


@pytest.mark.slow
def test_all_that_can_be_drawn_and_why_the_others_can_not(one, tmp_path, capsys):
    assert main(["all", str(one), "--out", str(tmp_path / "all")]) == 0
    printed = capsys.readouterr().out
    # One line for one cause.
    scored = ", ".join(name for name in FIGURES if name in SCORED)
    assert f"not drawn: {scored}: it compares at least 4 results; 1 given" in printed.splitlines()
    assert printed.count("not drawn") == 2
    for suffix in ("pdf", "png", "csv"):
        files = [file for file in (tmp_path / "all").glob(f"*.{suffix}") if file.stat().st_size]
        assert {file.stem for file in files} == {*FIGURES} - {*SCORED, "15"}
    for file in files:
        columns = pd.read_csv(file).columns
        assert not columns.str.startswith("Unnamed").any(), "all columns have names"


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
    texts = [*axes.get_yticklabels(), *axes.get_yticklabels(minor=True)]
    shown = {text.get_position()[1]: text.get_text() for text in texts if text.get_text()}
    assert {float(text) for place, text in shown.items() if low <= place <= high} == labels


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


@pytest.mark.parametrize(
    "name, said",
    [
        ("6", "error: figure 6 is not drawn here: .*python -m vit.analysis GRID"),
        ("6a", "did you mean '6'"),
        ("Table 2", "did you mean 'table2'"),
    ],
)
def test_names_are_checked_before_results_are_opened(name, said, monkeypatch, capsys):
    monkeypatch.setattr("tracker.store.open_results", lambda _: pytest.fail("opened"))
    assert main([name, "results"]) == 2
    error = capsys.readouterr().err
    assert re.match(f".*{said}", error) and error.count("\n") == 1


def test_a_measure_k_and_step_are_chosen_on_the_command_line(one, tmp_path):
    options = ["--measure", "miscoupling_normed", "--k", "8", "--step", "8"]
    assert main(["heatmap", str(one), "--out", str(tmp_path), *options]) == 0
    table = pd.read_csv(tmp_path / "heatmap.csv")
    drawn = table[table.layer != table.layer_other].miscoupling_normed
    stored = open_results(one).miscoupling_normed.sel(k=8, step=8)
    close(drawn.mean(), stored.where(stored.layer != stored.layer_other).astype(float).mean())


def test_scores_are_of_the_benchmarks_that_all_have(several):
    results = of_stores(*several)
    other = with_scores(results["model0"], wino=0.7)
    _, table = draw("1a", results | {"other": other})
    close(table.score, [0.3] * 5 + [0.7])


def test_results_that_share_no_k(one):
    results = {f"K = {k}": open_results(one).sel(k=[k]) for k in (K, 8)}
    with refused("the results share no k; measure them with a common one"):
        draw("1b", results)


def test_no_results(capsys):
    assert main(["1b"]) == 2
    assert "give a directory of results" in capsys.readouterr().err
    assert main(["1b", "nowhere"]) == 2
