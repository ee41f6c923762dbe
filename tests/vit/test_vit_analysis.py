"""Tests of the analysis on a synthetic grid with a known relation of accuracy to coupling."""

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from tests.support.browser import browser_test
from tests.support.stores import generated
from tracker.analysis.regression import holm, linear_fit
from tracker.measures.registry import MISCOUPLINGS
from tracker.store import Store
from vit import statistics
from vit.analysis import SHOWN, main, write_analysis
from vit.answers import answers, cautions, correlation, unanswerable
from vit.figures import outcome_against_coupling
from vit.grid import DROP_PATHS, WEIGHT_DECAYS
from vit.recipe import SETTINGS
from vit.results import read_grid, write_grid
from vit.statistics import (
    cell_table,
    column,
    coupling_at_equal_loss,
    final_coupling,
    fit_units,
    named_tests,
    primary,
    unit_means,
)

PAIRS = ["mean_offdiag", "mean_adjacent"]  # as `read_grid` returns them
AT = {"token": "last patch", "measure": "offdiag_normalized", "k": 10, "pairs": "mean_offdiag"}


def synthetic_grid(seed: int = 0) -> xr.Dataset:
    """Return values for the paper's grid: at AT, accuracy follows coupling at a fixed rate, and coupling rises with the rate."""
    random = np.random.default_rng(seed)
    settings = ([float(of) for of in text.split(",")] for text in (WEIGHT_DECAYS, DROP_PATHS))
    decay, rate = np.array([*product(*settings)]).T
    shape = (64, 6, 2, len(MISCOUPLINGS), 3, 2)
    miscoupling = 0.9 + 0.01 * random.standard_normal(shape)
    accuracy = 0.9 - 0.05 * rate + 0.01 * random.standard_normal(len(decay))
    i, j = MISCOUPLINGS.index(AT["measure"]), PAIRS.index(AT["pairs"])
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
            "step": [0, 1, 2, 4, 8, 1000],
            "token": ["class token", "last patch"],
            "measure": list(MISCOUPLINGS),
            "k": [10, 30, 50],
            "pairs": PAIRS,
        },
        attrs={"unfinished": ["wd1_sd0_seed0: <diverged>"], "images": 10_000, "data": "cifar10"},
    )


def with_seeds(count: int, effect: float) -> xr.Dataset:
    """Return the synthetic grid `count` times, as seeds whose accuracy and coupling differ by an effect of the seed."""
    grids, grid = [], synthetic_grid()
    for seed in range(count):
        added = {name: grid[name] + effect * seed for name in ("accuracy", "miscoupling")}
        grids.append(grid.assign(added).assign_coords(seed=("cell", np.full(64, seed))))
    return xr.concat(grids, "cell").assign_attrs(grid.attrs)


def test_coupling_is_null_level_minus_miscoupling_and_named_otherwise_without_a_level():
    grid = synthetic_grid()
    np.testing.assert_allclose(
        final_coupling(grid, AT), 0.95 - grid.miscoupling.isel(step=-1).sel(AT)
    )
    assert named_tests(grid).question[0] == "accuracy rises with coupling"
    assert column(grid, AT).startswith("coupling/")
    one_unknown = grid.copy(deep=True)
    one_unknown.null[3, 2, :, :, 0] = np.nan  # of one K, in one cell at one step
    np.testing.assert_array_equal(
        final_coupling(one_unknown, AT), -grid.miscoupling.isel(step=-1).sel(AT)
    )
    first = named_tests(one_unknown).iloc[0]
    words = "minus mis-coupling"
    assert first.question == f"accuracy rises with {words}" and first.x == words
    assert column(one_unknown, AT).startswith("minus mis-coupling/")
    assert column(one_unknown, AT | {"k": 30}).startswith("coupling/")


def test_the_page_names_what_a_grid_without_levels_holds(tmp_path):
    grid = with_seeds(3, effect=0.5)
    page = write_analysis(grid.assign(null=grid.null * np.nan), AT, tmp_path).read_text()
    for text in (
        "<figcaption>Minus mis-coupling against stochastic depth",
        "<th>minus mis-coupling by eq. 14, K = 10, l ≠ l', last patch</th>",
        "<li>Accuracy rises with minus mis-coupling: yes",
    ):
        assert text in page
    assert "against coupling " not in page


def test_a_value_that_rounds_to_zero_has_no_sign():
    row = {"r": -0.001, "r_low": -0.7, "r_high": 0.5}
    assert correlation(row) == "r = 0.00 [−0.70, 0.50]"


def test_named_questions_are_answered_with_one_uncorrected_test():
    grid = with_seeds(2, effect=0.5)
    tests = named_tests(grid)
    assert primary(grid) == AT
    first = tests.iloc[0]
    assert first.question == "accuracy rises with coupling" and first.token == "last patch"
    means = [
        values.reshape(2, 8, 8).mean((0, 2))
        for values in (final_coupling(grid, AT), grid.accuracy.values)
    ]
    expected = linear_fit(*means)  # of the weight decays
    assert (first.r, first.p, first.df) == pytest.approx(
        (expected["r"], expected["p"], 8 - 2), abs=1e-12
    )
    assert tests.role.tolist() == ["primary", *["secondary"] * 7] and np.isnan(first.p_holm)
    np.testing.assert_array_equal(tests.p_holm[1:], holm(tests.p[1:].to_numpy()))
    of_class_token = tests.token == "class token"
    assert (tests.p[of_class_token] > 0.05).all() and (tests.p[~of_class_token][:3] < 1e-4).all()


def test_across_rates_a_unit_is_a_rate_with_a_seed():
    grid = with_seeds(3, effect=0.5)
    # Of seeds and rates
    noise = np.random.default_rng(2).standard_normal((3, 1, 8)) * np.ones((3, 8, 1))
    grid = grid.assign(miscoupling=grid.miscoupling + xr.DataArray(noise.ravel(), dims="cell"))
    row = named_tests(grid).iloc[4]
    rate, coupling = (
        values.reshape(3, 8, 8).mean(1).ravel()  # of the weight decays
        for values in (grid.drop_path.values, final_coupling(grid, AT))
    )
    expected = linear_fit(rate, coupling, np.repeat(np.arange(3), 8))
    assert (row.question, row.token) == ("coupling rises with stochastic depth", "last patch")
    assert (row.n, row.df, row.unit) == (24, 24 - 3 - 1, "rate-seed pair")
    assert (row.r, row.p) == pytest.approx((expected["r"], expected["p"]), abs=1e-12)
    assert 0.001 < row.p < 0.999


@pytest.mark.parametrize("cells", [range(192), [*range(64), *range(70, 110), *range(130, 192)]])
def test_an_effect_of_the_seed_changes_no_mean_of_units(cells):
    """Also where cells are missing."""
    random = np.random.default_rng(3)
    of_decay, of_others = random.standard_normal(8), random.standard_normal((3, 8))
    values = (of_others[:, None] + of_decay[:, None]).reshape(-1, 1)  # seed, decay, rate
    grid = with_seeds(3, effect=0.5).isel(cell=cells)
    means = unit_means(grid, values[cells], "drop_path")[:, 0]
    np.testing.assert_allclose(means - means.mean(), of_decay - of_decay.mean(), atol=1e-9)


def test_weight_decays_that_no_seed_and_rate_has_in_common_are_not_compared():
    grid = with_seeds(2, effect=0.5)
    lower = grid.weight_decay.values < 0.05
    apart = grid.isel(cell=np.flatnonzero(lower == (grid.seed.values == 0)))
    tests = named_tests(apart)
    assert tests.r.isna().all() and set(tests.why) == {"values are missing"}
    assert answers(tests)[0] == (
        "Accuracy rises with coupling: not answered, because values are missing (primary test, last patch)."
    )


def test_coupling_at_equal_loss_is_read_off_the_curve():
    """Of a weight decay and seed, at the largest loss at the end; a cell may begin below it, or reach it at once.

    Here coupling falls as the loss does, equally in all cells: it is a function of the loss.
    """
    grid = synthetic_grid()
    loss = (grid.training_loss + 2 * grid.weight_decay).transpose("cell", "step").copy()
    loss[0], loss[1] = 0.05, [9, 0.01, 0.01, 0.01, 0.01, 0.01]
    values = (0 * grid.miscoupling).transpose("cell", "step", ...) + (2.3 - loss)
    values = values.transpose(*grid.miscoupling.dims)
    grid = grid.assign(training_loss=loss, miscoupling=0.95 + values)
    last = loss.isel(step=-1)
    expected = np.array([last[grid.weight_decay == decay].max() for decay in grid.weight_decay])
    assert len(np.unique(expected)) == 8
    expected[0] = 0.05
    np.testing.assert_allclose(coupling_at_equal_loss(grid, AT), expected - 2.3)
    grid.training_loss[2, -1] = expected[2] = np.nan  # as where it could not be evaluated
    np.testing.assert_allclose(coupling_at_equal_loss(grid, AT), expected - 2.3)
    tests = named_tests(grid.assign(training_loss=loss * np.nan))[6:]
    assert tests.p.isna().all() and set(tests.why) == {"the values were not recorded"}


def test_the_table_of_cells_is_in_the_order_of_their_settings():
    grid = synthetic_grid()
    table = cell_table(grid.isel(cell=np.random.default_rng(0).permutation(64)))
    assert table.index.tolist() == list(range(64)) and table.weight_decay.is_monotonic_increasing


def test_the_primary_token_is_the_last_patch_where_it_was_measured():
    grid = synthetic_grid()
    chosen = [primary(grid.isel(token=tokens))["token"] for tokens in ([0, 1], [1, 0], [0])]
    assert chosen == ["last patch", "last patch", "class token"]


def of_size(decays: int, rates: int, seeds: int) -> xr.Dataset:
    """Return the first weight decays and rates of several seeds, with noise."""
    grid = with_seeds(seeds, effect=0.01)
    noise = 0.01 * np.random.default_rng(7).standard_normal(grid.sizes["cell"])
    grid = grid.assign(miscoupling=grid.miscoupling + xr.DataArray(noise, dims="cell"))
    kept = np.isin(grid.weight_decay, np.unique(grid.weight_decay)[:decays])
    kept &= np.isin(grid.drop_path, np.unique(grid.drop_path)[:rates])
    return grid.isel(cell=np.flatnonzero(kept))


@pytest.mark.parametrize(
    "size, within, across",
    [
        ((2, 2, 1), "it takes 8 weight decays, and the grid has 2", "one seed does not tell"),
        (
            (2, 2, 3),
            "it takes 8 weight decays, and the grid has 2",
            "it takes 8 rate-seed pairs, and the grid has 6",
        ),
        ((8, 8, 1), "", "one seed does not tell"),
        ((7, 4, 2), "it takes 8 weight decays, and the grid has 7", ""),
        ((8, 1, 3), "", "there is one stochastic depth rate"),
        ((8, 4, 2), "", ""),
    ],
)
def test_one_rule_of_what_is_too_few(size, within, across):
    """In answers, tables and figures, and beforehand; there is a line for every question."""
    grid = of_size(*size)
    tests = named_tests(grid)
    texts = answers(tests)
    assert "nan" not in " ".join(texts)
    foreseen = " ".join(unanswerable(*size))
    for why, rows, lines in ((within, tests[:4], texts[:4]), (across, tests[4:], texts[4:])):
        assert rows.why.str.startswith(why).all() and (rows.why == "").all() == (why == "")
        assert {*rows[["r", "p", "detectable"]].isna().all()} == {bool(why)}
        assert all(("not answered, because " + why in line) == bool(why) for line in lines)
        assert (why in foreseen) or not why
    assert bool(foreseen) == bool(within or across)
    panels = outcome_against_coupling(grid, AT, "accuracy").axes[:-1]
    assert [("r = " in panel.get_title(), len(panel.lines)) for panel in panels] == [
        (not within, int(not within))
    ] * size[1]


def test_the_axis_of_an_outcome_spans_more_than_noise():
    """Of 64 equal models tested on 10,000 images, where the standard error of an accuracy is 0.005."""
    for outcome, least in (("accuracy", 16 * 0.005), ("loss", 0.1 * 0.5)):
        grid = synthetic_grid().assign({outcome: ("cell", np.linspace(0.5, 0.501, 64))})
        low, high = outcome_against_coupling(grid, AT, outcome).axes[0].get_ylim()
        assert high - low == pytest.approx(least, rel=0.1)


def test_an_answer_says_what_remains_given_the_weight_decay():
    first = named_tests(with_seeds(3, effect=0.5)).iloc[0]
    line = answer_to(first, r_decay=0.9, r_given_decay=-0.1, p_given_decay=0.8)
    assert "accuracy has r = 0.90 with the logarithm of the weight decay" in line
    assert "r = −0.10 remains (p = 0.8)" in line and "both follow the weight decay" in line
    unknown = answer_to(first, r_given_decay=np.nan)
    assert "remains" not in unknown


z = stats.zscore(np.log(np.unique(synthetic_grid().weight_decay)))
# How coupling and accuracy follow the weight decay, and how much accuracy follows what coupling has of its own; shares of grids
# in which the primary test and the one given the decay have p < 0.05.
CAUSES = {
    "nothing": (0 * z, 0 * z, 0, (0.03, 0.07), (0.03, 0.07)),
    "the decay alone": (z, z, 0, (0.85, 1), (0.03, 0.08)),
    "the decay alone, in one case up to a limit": (z, np.tanh(z), 0, (0.5, 1), (0.02, 0.07)),
    "the decay and coupling": (z, z, 2, (0.85, 1), (0.65, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_given_the_weight_decay_a_common_cause_is_seen_as_often_as_chance(cause):
    """The numbers in docs/vit.md: 1,000 grids of the paper's size, with noise of decays and of cells."""
    of_coupling, of_accuracy, own, by_decay, given_decay = CAUSES[cause]
    grid, random = synthetic_grid(), np.random.default_rng(0)
    _, unit = np.unique(grid.weight_decay, return_inverse=True)
    found = []
    for _ in range(1000):
        of_units, others = random.standard_normal((2, 8)) / 2
        coupling, accuracy = random.standard_normal((2, 64)) * 0.3
        coupling += (of_coupling + of_units)[unit]
        accuracy += (of_accuracy + own * of_units + others)[unit]
        fit = fit_units(grid, coupling, accuracy, "drop_path")
        found.append((fit["p"] < 0.05, fit["p_given_decay"] < 0.05))
    primary, given = np.mean(found, 0)
    print(f"{cause}: {primary:.3f}, given the decay {given:.3f}")
    assert by_decay[0] <= primary <= by_decay[1] and given_decay[0] <= given <= given_decay[1]


def answer_to(row: pd.Series, **changes) -> str:
    """Return the answer to a question that can be tested."""
    (line,) = answers(pd.DataFrame([row.to_dict() | {"why": ""} | changes]))
    return line


@pytest.mark.parametrize(
    "r, p, expected, said",
    [
        (0.9, 1.2e-4, "+", "yes, r = 0.90 [0.80, 0.95], p = 0.00012 (primary test"),
        (0.9, 1.2e-4, "-", "the opposite, r = 0.90"),
        (-0.9, 9e-5, "+", "the opposite, r = −0.90 [0.80, 0.95], p < 0.0001 (primary test"),
        (-0.9, 9e-5, "-", "yes, r = −0.90"),
        (0.5, 0.049, "+", "yes, r = 0.50"),
        (0.5, 0.051, "+", "not significantly, r = 0.50"),
        (-0.001, 0.9, "+", "not significantly, r = 0.00 ["),
    ],
)
def test_an_answer_compares_p_with_5_percent_and_the_sign_with_the_expected_one(
    r, p, expected, said
):
    first = named_tests(with_seeds(3, effect=0.5)).iloc[0]
    given = {"r": r, "r_low": 0.8, "r_high": 0.95, "p": p, "expected": expected}
    assert f": {said}" in answer_to(first, **given)
    secondary = answer_to(first, **given | {"p": 0.5, "p_holm": p, "role": "secondary"})
    assert f": {said.partition(' [')[0]}" in secondary and ", corrected (" in secondary


def test_accuracy_at_chance_has_a_line_and_a_constant_one_has_no_r():
    grid = with_seeds(2, effect=0)
    assert cautions(grid) == []
    # Of 10 classes, 10,000 images
    random = np.random.default_rng(0).uniform(0.095, 0.105, grid.sizes["cell"])
    lost = grid.assign(accuracy=("cell", random))
    assert cautions(lost) == [
        "Accuracy is not above chance in 128 of 128 models. No question on accuracy or test loss is answered."
    ]
    tests = named_tests(lost)
    assert set(tests.why[:4]) == {"no model is above chance"}
    assert tests.p.isna().tolist() == [True] * 4 + [False] * 4
    limit = 0.1 + 0.003 * np.resize([1.95, 1.97], grid.sizes["cell"])  # 0.003: standard error
    at_limit = statistics.at_chance(grid.assign(accuracy=("cell", limit)))
    assert at_limit.tolist() == [True, False] * 64
    partly = grid.assign(accuracy=("cell", np.where(np.arange(128) < 3, random, grid.accuracy)))
    assert cautions(partly) == [
        "Accuracy is not above chance in 3 of 128 models. They count as others."
    ]
    assert named_tests(partly).p.notna().all()
    for chance in ({"chance": 0.05}, {}):  # of unbalanced classes, or unknown
        assert cautions(lost.assign_attrs(chance, data="folder:x")) == []
    constant = grid.assign(accuracy=0 * grid.accuracy + 0.5)
    assert named_tests(constant).why[0] == "the values are equal"


# Variances (1e-5) of the effects found in the grid on CIFAR10, by what they vary along: weight decay, rate, seed
OF_COUPLING = {
    "drs": 4.4,
    "ds": 0.9,
    "rs": 1.8,
    "s": 1.4,
}  # of seeds alone: it depends on no setting
OF_OUTCOMES = {
    "accuracy": {"drs": 4.1, "dr": 0.2, "ds": 0.7, "rs": 1.7, "d": 1.1, "s": 0.9},
    "loss": {"drs": 30, "dr": 14, "ds": 4.6, "rs": 23, "d": 80, "r": 52},
}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 4])
def test_false_positives_are_rare(seeds):
    """Of 200 grids of the paper's size whose coupling depends on no setting; docs/vit.md has the shares of 1,000."""
    random, shape = np.random.default_rng(seeds), (8, 8, seeds)
    at = zip(SETTINGS, np.indices(shape), strict=True)
    cells = xr.Dataset(coords={name: ("cell", of.ravel()) for name, of in at})

    def drawn(variances: dict[str, float]) -> np.ndarray:
        values = np.zeros(shape)
        for along, variance in variances.items():
            sizes = [n if axis in along else 1 for axis, n in zip("drs", shape, strict=True)]
            values += variance**0.5 * random.standard_normal(sizes)
        return values.ravel()

    p = []
    for _ in range(200):
        coupling, *outcomes = map(drawn, (OF_COUPLING, *OF_OUTCOMES.values()))
        fits = [fit_units(cells, coupling, outcome, "drop_path") for outcome in outcomes]
        fits.append(fit_units(cells, cells.drop_path.values, coupling, "weight_decay"))
        p.append([fit["p"] for fit in fits])
    assert (np.mean(np.array(p) < 0.05, 0) <= 0.1).all()  # standard error 0.015
    assert np.isnan(p).all(0).tolist() == [False, False, seeds == 1]


@pytest.mark.slow
def test_analysis_writes_tables_figures_and_page(tmp_path):
    grid = synthetic_grid().assign_attrs(data="folder:<images>")
    page = write_analysis(grid, AT, tmp_path / "out").read_text()
    rows = pd.read_csv(tmp_path / "out" / "cells.csv")
    assert len(rows) == 64
    first = grid.isel(cell=0, step=-1)
    assert rows.accuracy[0] == pytest.approx(float(first.accuracy))
    coupling = float(first.null.sel(AT) - first.miscoupling.sel(AT))
    column = "coupling/last patch/offdiag_normalized/k10/mean_offdiag"
    assert rows[column][0] == pytest.approx(coupling)
    assert len(pd.read_csv(tmp_path / "out" / "tests.csv")) == 8
    assert len(list((tmp_path / "out").glob("*.png"))) == 3 == page.count("data:image/png")
    for text in (
        "<h1>Coupling and accuracy: folder:&lt;images&gt;</h1>",
        "64 vision transformers",
        "&lt;diverged&gt;",
        f"<td>{coupling:.4g}</td>",
        "<th>coupling by eq. 14, K = 10, l ≠ l', last patch</th>",
        "with coupling: yes, r = 1.00 [1.00, 1.00], p &lt; 0.0001 (primary test, last patch)",
        "8 weight decays find a measured |r| ≥ 0.83 with 80 % power",
        "because one seed does not tell an effect of the rate",
    ):
        assert text in page, text
    for name in ("drop_path", "weight_decay", "offdiag"):
        assert name not in page.partition("<body>")[2]
    assert cell_table(grid).shape == (64, 8 + 2 * len(MISCOUPLINGS) * 3 * 2)


class TestInABrowser:
    pytestmark = browser_test

    @pytest.mark.parametrize("scheme, paper", [("light", "255, 255, 255"), ("dark", "20, 23, 27")])
    def test_page_has_the_reader_s_colours_and_fits_400_pixels(
        self, browser, tmp_path, scheme, paper
    ):
        page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)
        page.goto(write_analysis(of_size(2, 2, 1), AT, tmp_path).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == f"rgb({paper})"


def write_cell(directory: Path, accuracy: float, more=(), **recipe):
    result = {"status": "finished", "accuracy": accuracy, "loss": 1.0, "images": {"test": 100}}
    (directory / "recipe.json").write_text("{}")
    (directory / "result.json").write_text(
        json.dumps(result | dict(more, recipe={"seed": 0, "data": "x"} | recipe))
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Cells with the units of one store."""
    directory = tmp_path_factory.mktemp("grid")
    store = generated(directory / "store", [0, 4, 8], layers=12, ks=(10, 30, 50), prompts=32)
    for rate in (0.0, 0.1, 0.2, 0.3):
        cell = directory / f"cell{rate}"
        (cell / "coupling").mkdir(parents=True)
        (cell / "coupling" / "units").symlink_to(store / "units")
        write_cell(cell, 0.5 + rate, weight_decay=0.1, drop_path=rate, tokens="-1")
    return directory


@pytest.mark.slow
def test_a_cell_that_lacks_a_step_is_left_out_and_listed(measured, tmp_path):
    for cell in ("cell0.0", "cell0.1"):
        shutil.copytree(measured / cell, tmp_path / cell)
    store = Store(tmp_path / "cell0.1" / "coupling")
    store.write_skipped({4: "OutOfMemoryError: CUDA out of memory"})
    assert read_grid(tmp_path).sizes["cell"] == 2  # measured after all
    store.file(4).unlink()
    grid = read_grid(tmp_path)
    assert grid.sizes["cell"] == 1 and grid.sizes["step"] == 3
    assert grid.attrs["unfinished"] == [
        "cell0.1: no results of step 4: OutOfMemoryError: CUDA out of memory"
    ]


def test_what_figures_show_is_chosen_by_the_words_of_the_help(monkeypatch, capsys):
    monkeypatch.setattr("vit.analysis.write_analysis", lambda grid, at, out: at["token"])
    monkeypatch.setattr("vit.results.read_grid", lambda *_: synthetic_grid())
    words = ("cls", "-1", "last patch", "5")
    assert [main(["grid", "--token", word]) for word in words] == [0, 0, 0, 2]
    out, err = capsys.readouterr()
    assert out.splitlines() == ["class token", "last patch", "last patch"]
    assert "--token 5 was not measured; choose from cls, last\n" in err
    assert {*MISCOUPLINGS} < {*SHOWN["measure"].replace(",", "").split()}


def test_command_line_reports_missing_cells(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    (tmp_path / "cell").mkdir()
    write_cell(tmp_path / "cell", 0.5, {"status": "diverged", "reason": "nan"})
    assert main([str(tmp_path)]) == 2
    said = "no finished cell with coupling measured; give a grid's --out directory"
    assert capsys.readouterr().err.count(said) == 2


@pytest.mark.slow
def test_an_analysis_is_repeated_from_its_file_and_joined_with_other_cells(
    measured, tmp_path, capsys
):
    whole = read_grid(measured)
    halves = [tmp_path / "first", tmp_path / "second"]
    for i, half in enumerate(halves):
        half.mkdir()
        for cell in sorted(measured.glob("cell*"))[i::2]:
            (half / cell.name).symlink_to(cell)
    write_grid(read_grid(halves[0]), tmp_path / "grid.nc")
    joined = read_grid(tmp_path / "grid.nc", halves[1])
    xr.testing.assert_identical(*(of.sortby([*SETTINGS]) for of in (joined, whole)))
    assert "mean" not in whole["pairs"]
    assert main([str(tmp_path / "grid.nc")]) == 0
    assert read_grid(tmp_path / "analysis" / "grid.nc").equals(read_grid(halves[0]))
    assert main([str(tmp_path / "grid.nc"), str(halves[0])]) == 2
    assert "is given twice" in capsys.readouterr().err
    (tmp_path / "other.nc").write_text("text")
    assert main([str(tmp_path / "other.nc")]) == 2
    assert "is no grid.nc that vit.analysis wrote" in capsys.readouterr().err


@pytest.mark.slow
def test_cells_of_two_recipes_are_refused(measured, tmp_path, capsys):
    write_grid(
        read_grid(measured).assign_attrs(recipe=json.dumps({"data": "y", "tokens": "-1"})),
        tmp_path / "grid.nc",
    )
    assert main([str(measured), str(tmp_path / "grid.nc")]) == 2
    assert "differ in data; analyse cells of one recipe" in capsys.readouterr().err


def test_chance_is_that_of_any_cell_that_recorded_it(tmp_path):
    """Cells of an earlier version did not."""
    for cell, recorded in (("a", {"chance": 0.25}), ("b", {})):
        generated(tmp_path / cell / "coupling", [0], ks=(10,), tokens="cls")
        settings = {"weight_decay": 0.1, "drop_path": float(cell == "b"), "tokens": "cls"}
        write_cell(tmp_path / cell, 0.5, recorded, **settings)
    assert read_grid(tmp_path).attrs["chance"] == 0.25


def test_tokens_that_the_measurement_chose_have_its_name(tmp_path):
    store = generated(tmp_path / "cell" / "coupling", [0, 8], ks=(10,), tokens="cls")
    write_cell(tmp_path / "cell", 0.5, weight_decay=0.1, drop_path=0.1, tokens=None)
    assert read_grid(tmp_path).token.values.tolist() == ["class token"]
    for step in (0, 8):
        file = Store(store).file(step)
        Store(store).write(step, xr.load_dataset(file, engine="netcdf4").drop_vars(MISCOUPLINGS))
    with pytest.raises(ValueError, match="holds no mis-coupling; measure `coupling`"):
        read_grid(tmp_path)
