"""The page: its data against the store, what its scripts make of them, and its behaviour in a real headless Chromium."""

import json
import re
import shutil
from base64 import b64decode
from functools import cache
from html import unescape
from io import StringIO
from itertools import product
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import tracker
from tests.support.browser import browser_test
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tests.support.stores import generated, stored, unit
from tracker.analysis.across_models import compare_models
from tracker.analysis.curves import curves
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import read_reduced
from tracker.analysis.regression import FEWEST_POINTS
from tracker.measures.registry import VARIANTS
from tracker.report.contents import contents, unpack_parts
from tracker.report.texts import worded
from tracker.report.write import main, write_page, write_report
from tracker.store import Store, distinct_names

STEPS = [0, 1, 8, 2000]
LAST = {"k": 4, "step": 2000}
TO_16_BITS = {"rtol": 1e-4}  # what the page promises of its matrices
VISIBLE = "[...document.querySelectorAll('.chart')].filter((c) => c.offsetParent)"
PATIENCE = 300_000  # milliseconds


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A store of every measure, at four steps of a random model, one with a Jacobian of zero."""
    store = Store(tmp_path_factory.mktemp("store") / "toy")
    store.check_settings({"model": "toy"})
    for step in STEPS:
        torch.manual_seed(step)
        model = neox()
        if step == 8:
            with torch.no_grad():
                for name, parameter in model.gpt_neox.layers[1].named_parameters():
                    if "dense." in name or "dense_4h_to_h" in name:
                        parameter.zero_()
        unit = tracker.measure(model, tokens(2), k=[4, 8], measures="all,tokenwise", pair_tokens=3)
        unit["score"] = ("task", [0.1 + step / 4000])
        unit = unit.assign_coords(
            task=["piqa"], step=step, commit=f"{step:040x}", revision=f"step{step}"
        )
        store.write(
            step, unit.assign_coords(suspect="another shard's weights" if step == 1 else "")
        )
    return store.path


@pytest.fixture(scope="module")
def ds(results):
    return tracker.open_results(results)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A store of another model, of the same name, by another convention."""
    options = {"layers": 8, "ks": (4,), "matrices": True, "final_norm": "exclude"}
    return generated(tmp_path_factory.mktemp("other") / "toy", (1, 4, 16, 64), **options)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Stores of six models, of two architectures, measured alike."""
    place, paths = tmp_path_factory.mktemp("several"), []
    for i in range(6):
        store = Store(place / f"model{i}")
        store.check_settings({"model": store.path.name})
        sizes = {"width": 64 + 16 * (i % 4), "parameters": 1000 * (i + 1) ** 2}
        for step in (0, 64):
            made = unit(
                step, 3 + i % 3, (4, 8), 3, False, i, model_class=f"tests.{'AB'[i > 3]}", **sizes
            )
            rated = ("prompt", [3.0, 1, 4])
            store.write(step, made.assign_coords(tokens_seen=step * 2**i, difficulty=rated))
        paths.append(store.path)
    return paths


@pytest.fixture(scope="module")
def read():
    """Reads what a page needs of a store, once."""
    return cache(read_reduced)


@pytest.fixture(scope="module")
def data(read, results):
    return contents(read(results))


@pytest.fixture(scope="module")
def written(read, results, other, several, tmp_path_factory):
    """A function that writes the page of one store, of two, or of enough to compare models, once each.

    Of the other's matrices |A| there is room for three steps.
    """
    directory = tmp_path_factory.mktemp("pages")
    stores = {"one": [results], "two": [results, other], "six": several}

    def written(which):
        curves = {path: read(path) for path in stores[which]}
        return write_page(curves, directory / f"{which}.html")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracker.report.contents.ABSOLUTE", 3 * 8**2 * 4**2)
        yield cache(written)


def numbers(values):
    return np.array(values, dtype=float)


def matrices(ds, name, of=lambda ds, name: ds[name].astype(float)):
    """Means over prompts and tokens, without a diagonal that is 0 by definition."""
    values = of(ds, name).mean(("prompt", "token"))
    return values if name.endswith("_vju") else values.where(values.layer != values.layer_other)


class TestData:
    """What the page carries is what the store holds."""

    pytestmark = pytest.mark.slow

    def test_matrices_and_levels(self, data, ds):
        assert [*data["matrices"]] == [*VARIANTS]
        for name, k in product(VARIANTS, (4, 8)):
            for part, of in {
                "matrices": matrices(ds, name),
                "levels": matrices(ds, name, null_level),
            }.items():
                stored, packed = of.sel(k=k).values, data[part][name][k]
                if name.endswith("_normed"):  # the rest is that of the blocks alone
                    assert packed["of"] == name.removesuffix("_normed")
                    packed, stored = packed["edge"], np.stack([stored[:, -1], stored[:, :, -1]], 1)
                np.testing.assert_allclose(unpacked(packed), stored, **TO_16_BITS)
        last, of_tokens = ds.isel(step=-1), data["tokens"]["fixed_output"]
        of_tokens_A = abs(last.fixed_output_matrix) / last.fixed_output_singular_value.sel(rank=1)
        for packed, A in (
            (of_tokens["absolute"], of_tokens_A.sel(layer=1).mean("prompt")),
            (data["absolute"], abs(last.matrix).mean(("prompt", "token"))),
        ):
            np.testing.assert_allclose(unpacked(packed)[-1], A, atol=np.ptp(A.values) / 500)


def unpacked(packed):
    """The values of an array that the page carries."""
    kinds = {"codes": {8: "u1", 16: "<u2", 32: "<f4"}[packed["bits"]], "low": "<f4", "span": "<f4"}
    parts = {
        part: np.frombuffer(b64decode(packed[part]), kind)
        for part, kind in kinds.items()
        if part in packed
    }
    values = parts["codes"]
    if packed["bits"] != 32:
        values = unpack_parts(
            values.reshape(len(parts["low"]), -1), parts["low"], parts["span"], packed["bits"]
        )
    return values.reshape(packed["shape"])


class TestText:
    """What the page says before any script runs."""

    def test_settings_and_attributes_are_words(self):
        shown = [worded(value) for value in (["all", "noise"], "", "{}", np.int64(1714176), "sdpa")]
        assert shown == ["all, noise", "none", "none", "1,714,176", "sdpa"]

    def test_doubts_and_how_it_was_measured(self, written, data):
        said = unescape(written("one").read_text())
        onset = data["onset"]["miscoupling"][4]["words"]
        for text in (
            f"Onset of coupling (mis-coupling m_K, K = 4, mean over pairs of different blocks): {onset}.",
            "Step 1 is suspect: another shard's weights.",
            "Undefined values, left out of means and quartiles: ",
            "<th scope=row>final norm</th><td>include</td>",
            "miscoupling: ",
            "lss: ",
            "certified by Cholesky",
            "sdpa",
            "relative error",
            "<th scope=row>layers compared across tokens</th><td>l' = l + 1</td>",
        ):
            assert text in said
        assert "at 3 or more of 4 steps" in written("two").read_text()

    def test_fallbacks_and_certificates(self, tmp_path):
        store = Store(generated(tmp_path / "run", (0, 5), layers=3))
        for step in (0, 5):
            unit = store.read(step)
            for name in ("diagnostics_sliced", "diagnostics_complete"):
                unit[name][0, 0, 2] = 0
            unit.attrs["fallbacks"] = '{"3": "value differs by 0.1"}'
            unit.attrs["model_class"] = "tests.</script><!--<script>"
            store.write(step, unit)
        said = write_report(store.path, tmp_path / "page.html").read_text()
        assert "Fallback: 2 of 18 Jacobians, of block 3, were taken over the full sequence" in said
        assert "(value differs by 0.1)" in said
        assert "Incomplete: 2 of 18 sets" in said
        found = re.findall('<script type="application/json" id="data">(.*?)</script>', said, re.S)
        (model,) = json.loads(found[0])["models"]
        assert model["name"] == "</script><!--<script>", "names can not end the data of the page"

    def test_where_nothing_can_be_fitted(self, several, read, tmp_path):
        *scored, bare = ((path, read(path)) for path in several[:4])
        curves = dict(scored) | {bare[0]: bare[1].drop_vars("score")}
        page = write_page(curves, tmp_path / "few.html")
        said = "Fits between results: 3 of 4 results have scores and layer pairs; a fit needs 4"
        assert said in page.read_text()


@pytest.fixture(scope="module")
def open_page(browser):
    """Opens a page; gives it, and a list of what it says on the console and asks of the network."""

    def open_page(file, fragment=""):
        page, said = browser.new_page(viewport={"width": 1280, "height": 900}), []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(f"{file.as_uri()}{fragment}")
        return page, said

    return open_page


def assert_silent(said):
    """Assert that a page logged nothing to the console and asked nothing of the network."""
    assert [line for line in said if not line.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def opened(open_page, written):
    """Pages that tests share, for Plotly takes seconds to load."""
    return cache(lambda which: open_page(written(which)))


CLEAR = 'for (const name of Object.keys(state)) state[name] = typeof state[name] === "string" ? "" : null;'


@pytest.fixture
def shared(opened):
    """Gives a page as it is when it is opened, but for the time that takes."""
    looked_at = []

    def shared(which, viewport=(1280, 900), color_scheme="light"):
        page, said = opened(which)
        page.set_viewport_size(dict(zip(("width", "height"), viewport, strict=True)))
        page.emulate_media(color_scheme=color_scheme)
        page.evaluate(
            f"() => {{ {CLEAR} settle(); paint(); offer(); show(); scrollTo(0, 0); document.activeElement.blur(); }}"
        )
        looked_at.append(said)
        return page

    yield shared
    for said in looked_at:
        assert_silent(said)


@pytest.fixture
def page(shared):
    return shared("one")


@pytest.fixture(scope="module")
def told(opened):
    """What a page's scripts make of its data under some choices, without drawing it: by chart, its title, lines and numbers.

    `fewest` points have a fit.
    """
    script = f"""([fewest, chosen]) => {{
      const before = {{ ...state }};
      {CLEAR}
      data.texts.fewest = fewest;
      Object.assign(state, chosen);
      settle();
      const found = Object.keys(figures).filter((id) => figures[id].has()).map((id) => {{
        const {{ traces, layout, table }} = figures[id].draw(), rows = table(), title = figures[id].title();
        const said = document.querySelector(`#${{id}}-figure figcaption`)?.textContent;
        return [id, {{ title, traces, layout, said, file: fileName(id, rows), csv: csv(rows) }}];
      }});
      data.texts.fewest = {FEWEST_POINTS};
      Object.assign(state, before);
      settle();
      return Object.fromEntries(found);
    }}"""

    @cache
    def told(which, fewest=FEWEST_POINTS, **chosen):
        page, _ = opened(which)
        charts = page.evaluate(script, [fewest, chosen])
        return {
            chart: SimpleNamespace(**found, table=pandas.read_csv(StringIO(found["csv"])))
            for chart, found in charts.items()
        }

    return told


def named(traces, name):
    (trace,) = [trace for trace in traces if trace.get("name") == name]
    return trace


def by_distance(matrix):
    rings = ([*np.diagonal(matrix, r), *np.diagonal(matrix, -r)] for r in range(1, len(matrix)))
    return [np.mean(ring) for ring in rings]


# The lines of charts, and the columns that they show
LINES = {
    "coupling": {"mean over samples": "mean", "null level": "null_level"},
    "scatter": {"a point a step": "coupling"},
    "lss": {"median": "median"},
    "matrix": {"miscoupling": "mean"},
    "history": {"mean over samples": "mean", "null level": "null_level"},
    "absolute": {"|A|": "absolute"},
    "distance": {"step 2,000": "mean", "null level": "null_level"},
    "layers": {"its Jacobian in the others' bases": "in_bases_of_others"},
    "singular": {"s1": "s1", "s5": "s5"},
    "norm": {"step 2,000": "median"},
    "prompts": {"prompts": "coupling"},
    "token_curves": {"mean over samples": "mean", "null level": "null_level"},
    "token_matrix": {"fixed_output": "mean"},
}


class TestNumbers:
    """What the charts show is what the page carries."""

    pytestmark = browser_test

    def test_tables_and_lines(self, told, data, read, results):
        at = read(results)
        last = at.isel(step=-1)
        of_pairs = at.sel(k=4, pairs="mean_offdiag")
        M, levels = (unpacked(data[part]["miscoupling"][4]) for part in ("matrices", "levels"))
        both = levels[-1] - M[-1] + (levels[-1] - M[-1]).T
        of_tokens = data["tokens"]["fixed_output"]
        windows = last.equidistance_window_by_depth.sel(statistic="median")
        assert windows.isnull().any(), "at some depths no window fits"
        expected = {
            ("coupling", "mean"): of_pairs.miscoupling,
            ("coupling", "null_level"): of_pairs.miscoupling_null,
            ("coupling", "q25"): of_pairs.miscoupling_q25,
            ("coupling", "q75"): of_pairs.miscoupling_q75,
            ("coupling", "coupling"): of_pairs.miscoupling_coupling,
            ("coupling", "piqa"): at.score,
            ("scatter", "coupling"): of_pairs.miscoupling_coupling,
            ("lss", "median"): at.lss.sel(statistic="median"),
            ("matrix", "mean"): M[-1],
            ("matrix", "null_level"): levels[-1],
            ("history", "mean"): M[:, 2, 0],
            ("history", "null_level"): levels[:, 2, 0],
            ("absolute", "absolute"): unpacked(data["absolute"])[-1, 2, 0],
            ("distance", "mean"): by_distance(M[-1]),
            ("distance", "null_level"): by_distance(levels[-1]),
            ("layers", "in_bases_of_others"): np.nanmean(M[-1], 1),
            ("layers", "others_in_its_basis"): np.nanmean(M[-1], 0),
            ("graph", "coupling"): both[np.triu_indices(3, 1)] / 2,
            ("singular", "s1"): last.singular_value_median.sel(rank=1),
            ("norm", "q25"): last.norm_by_depth.sel(statistic="q25"),
            ("norm", "depth"): range(4),
            ("equidistance_window", "median"): windows.dropna("layer"),
            ("prompts", "coupling"): of_pairs.miscoupling_coupling_by_prompt.isel(step=-1),
            ("noise", "cosine_similarity"): last.noise_similarity_ends.transpose("end", "noise"),
            ("token_curves", "mean"): at.fixed_output_miscoupling.sel(k=4),
            ("token_matrix", "mean"): unpacked(of_tokens["matrices"]["miscoupling"][4])[-1, 0],
            ("token_matrix", "token_other"): [0, 3, 6] * 3,
            ("token_absolute", "absolute"): unpacked(of_tokens["absolute"])[-1],
        }
        charts = told("one", l=3, m=1, score="piqa", kind="fixed_output", block=1)
        for (chart, column), values in expected.items():
            values = np.ravel(numbers(values))
            np.testing.assert_allclose(charts[chart].table[column], values, rtol=1e-6, atol=1e-7)
        for chart, lines in LINES.items():
            for line, column in lines.items():
                drawn = named(charts[chart].traces, line)
                drawn = np.ravel(numbers(drawn.get("z", drawn.get("y"))))
                np.testing.assert_array_equal(drawn, charts[chart].table[column], err_msg=chart)
        assert set(told("one", l=2, m=2)["history"].table["mean"]) == {0}
        for name in ("miscoupling_normed", "offdiag_vju"):
            charts = told("one", measure=name, k="8", step=8)
            points = at[name].sel(k=8, pairs="mean_offdiag")
            np.testing.assert_allclose(charts["coupling"].table["mean"], points, rtol=1e-6)
            stored = matrices(tracker.open_results(results), name).sel(k=8, step=8)
            found = charts["matrix"].table["mean"]
            np.testing.assert_allclose(found, stored.values.ravel(), **TO_16_BITS)

    def test_tokens(self, told, data, page):
        charts = told("one", kind="fixed_output", block=1)
        matrix, curve, absolute = (charts[f"token_{of}"] for of in ("matrix", "curves", "absolute"))
        said = matrix.traces[0]["text"][0][2]
        assert said == "token 0 in block 1, in the basis of token 6 in block 2"
        assert [matrix.title, curve.title, absolute.title] == [
            "Mis-coupling of pairs of tokens: block 1, in bases of block 2, step 2,000",
            "Coupling across tokens over training, fixed output: mis-coupling m_K, K = 4, l′ = l + 1",
            "Coupling matrices |A| of pairs of tokens, l = 1, l′ = 2, step 2,000",
        ]
        assert page.locator("#block option").all_inner_texts() == ["1", "2"], (
            "no block lends its basis to the last"
        )
        drawn = numbers(absolute.traces[0]["z"])
        A = unpacked(data["tokens"]["fixed_output"]["absolute"])[-1]
        for t, u in np.ndindex(3, 3):
            tile = drawn[5 * t : 5 * t + 4, 5 * u : 5 * u + 4]
            np.testing.assert_allclose(tile, A[t, u], rtol=1e-6)

    def test_gaps_doubts_and_fits(self, told):
        charts = told("one")
        (band,) = [line for line in charts["lss"].traces if line.get("fill") == "toself"]
        # A piece of two steps before the gap, and one of one step after it
        assert band["x"].count(None) == 2 and len(band["x"]) == 8
        drawn = named(charts["coupling"].traces, "mean over samples")
        assert drawn["marker"]["symbol"] == ["circle", "x-open", "circle", "circle"]
        assert not [line for line in charts["singular"].traces if line["name"] == "fit of 1 / s₁"]
        assert (
            "1 / s₁ against depth: n = 3: fewer than 8 points, no fit." in charts["singular"].said
        )

    def test_a_straight_line_through_1_over_s_over_depth(self, told):
        chart = told("six", fewest=4, model="2")["singular"]
        layer, inverse = chart.table.layer, 1 / chart.table.s1
        fit, drawn = stats.linregress(layer, inverse), named(chart.traces, "fit of 1 / s₁")
        expected = 1 / (fit.intercept + fit.slope * layer)
        np.testing.assert_allclose(drawn["y"], expected, rtol=1e-5)
        assert f"R² = {fit.rvalue**2:.2f} over 5 blocks" in chart.said

    @pytest.mark.parametrize("which", ["one", "six"])
    def test_every_chart_has_one_table_with_named_columns(self, told, which):
        charts = told(which)
        assert len({chart.file for chart in charts.values()}) == len(charts)
        if which == "one":
            coupling = charts["coupling"]
            assert coupling.file == "coupling_GPTNeoXForCausalLM_miscoupling_K4_steps0-2000"
            columns = "model measure k pairs step mean q25 q75 null_level coupling"
            assert [*coupling.table] == columns.split()
        words = set("model measure pairs subset prompt out_words in_words".split())
        for name, chart in charts.items():
            table = chart.table
            assert len(table) and table.shape[1] > 2, name
            assert table.notna().any().all(), name
            assert set(table.select_dtypes(exclude="number")) <= words, name
            for column, part in (("model", ""), ("measure", ""), ("k", "K"), ("step", "step")):
                values = table[column].unique() if column in table else []
                assert len(values) != 1 or f"_{part}{values[0]}".replace("/", "-") in chart.file

    def test_the_axis_of_steps_says_where_it_is_logarithmic_and_ends_with_a_tick(self, told):
        def axis(which, **chosen):
            found = told(which, **chosen)["coupling"].layout["xaxis"]
            return found.get("type"), found["title"]["text"], " ".join(found["ticktext"])

        linear = "training step"
        assert axis("one") == ("log", "training step (log scale)", "0 8 2,000")
        assert axis("one", axis="linear") == (None, linear, "0 500 1,000 1,500 2,000")
        assert axis("six") == (None, linear, "0 10 20 30 40 50 64"), "steps are evenly spaced"


class TestSeveral:
    """Results side by side."""

    pytestmark = browser_test

    def test_curves_stand_together(self, told, results, other):
        names, charts = distinct_names([results, other]), told("two")
        looks = []
        for name, path in zip(names, (results, other), strict=True):
            points = curves(tracker.open_results(path)).sel(k=4, pairs="mean_offdiag")
            drawn = named(charts["coupling"].traces, name)
            assert drawn["y"] == points.miscoupling.values.tolist()
            level = named(charts["coupling"].traces, f"{name}, null level")
            assert level["y"] == points.miscoupling_null.values.tolist()
            looks.append((drawn["line"]["color"], drawn["line"]["dash"]))
        assert looks[0][0] != looks[1][0] and looks[0][1] != looks[1][1]
        history = told("two", model="1")["history"].traces
        (line,) = [line["name"] for line in history if "null" not in line["name"]]
        assert line == names[1], "the other has another number of blocks"

    def test_large_arrays_are_thinned_and_the_page_says_so(self, told, other):
        found = told("two", model="1", step=4, l=1, m=2)["absolute"]
        assert found.title.endswith("step 1, the last carried before 4")
        A = abs(tracker.open_results(other).matrix).mean(("prompt", "token"))
        A = A.sel(step=1, layer=1, layer_other=2).values
        np.testing.assert_allclose(numbers(found.traces[0]["z"]), A, atol=np.ptp(A) / 500)

    def test_score_against_coupling_and_sizes(self, told, several, read):
        across = compare_models({path.name: read(path) for path in several})
        chosen, sizes = {"measure": "offdiag_normalized", "k": "8"}, across["sizes"]
        assert [*sizes] == ["blocks", "width", "parameters", "training tokens"]
        few = told("six", **chosen)
        assert [line["name"] for line in few["fit"].traces] == [path.name for path in several]
        said = few["fit"].said
        assert said.startswith("n = 6: fewer than 8 points, no fit.") and "R²" not in said
        assert not any(any(line["x"]) for line in few["subsets"].traces)
        assert not any(few["definitions"].traces[0]["text"][0])
        for pairs in ("mean", "mean_offdiag"):
            at = across["coupling"]["offdiag_normalized"][8][pairs]
            charts = told("six", fewest=4, **chosen, pairs=pairs)
            assert_line(charts["fit"], at["values"], across["score"], at["fit"])
            assert "Blocks, width and parameters controlled for: R² = " in charts["fit"].said
        title = "Score against coupling: mis-coupling, eq. 14, K = 8, pairs of different blocks"
        assert charts["fit"].title == title
        for name, x in sizes.items():
            charts = told("six", fewest=4, **chosen, against=name)
            assert_line(charts["fit"], x, across["score"], across["size_fits"][name])
            assert_line(charts["sizes"], x, at["values"], at["size_fits"][name])


def assert_line(chart, x, y, fit):
    """A point for each result, a straight line, and its R²."""
    dots = [(*line["x"], *line["y"]) for line in chart.traces if line["mode"] == "markers"]
    assert dots == [*zip(x, y, strict=True)]
    drawn = named(chart.traces, "linear fit")
    expected = fit["intercept"] + fit["slope"] * numbers(drawn["x"])
    np.testing.assert_allclose(drawn["y"], expected, rtol=1e-6)
    assert f"R² = {fit['r2']:.2f} " in chart.said and f"p = {fit['p']:.2g}" in chart.said


def draw(page, chart):
    """Scroll a chart into sight and wait until it is drawn as chosen."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    page.wait_for_function("(id) => seen.has(id) && !stale.has(id)", arg=chart)


def shown(page, chart):
    """The traces that a chart shows."""
    draw(page, chart)
    return page.evaluate("(id) => document.getElementById(id).data", chart)


def steps_through(page):
    """Scroll through the whole page, so that every chart is drawn."""
    for chart in page.evaluate(f"{VISIBLE}.map((c) => c.id)"):
        draw(page, chart)


class TestBrowser:
    pytestmark = browser_test

    @pytest.mark.parametrize(
        "which, width, theme",
        [
            ("one", 1280, "light"),
            ("two", 400, "dark"),
            ("six", 1280, "dark"),
        ],
    )
    def test_no_serious_fault_and_nothing_cut_off(self, shared, which, width, theme):
        from axe_playwright_python.sync_playwright import Axe

        page = shared(which, viewport=(width, 900), color_scheme=theme)
        page.select_option("#score", "piqa")
        steps_through(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for box in page.evaluate(f"{VISIBLE}.map((c) => c.getBoundingClientRect().toJSON())"):
            assert box["width"] > 250 and box["left"] >= 0 and box["right"] <= width
        found = Axe().run(page).response["violations"]
        serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
        assert [(fault["id"], fault["nodes"]) for fault in serious] == []

    def test_a_choice_changes_the_charts(self, told, shared):
        chosen = {"measure": "offdiag", "k": "8", "pairs": "mean", "kind": "self", "last": "normed"}
        expected = told("one", **chosen, axis="linear", step=8)
        page = shared("one")
        for control, value in {**chosen, "axis": "linear"}.items():
            page.select_option(f"#{control}", value)
        page.locator("#step").press("ArrowLeft")
        assert page.inner_text("#step-shown") == "8"
        for chart in ("coupling", "lss", "norm", "token_curves", "matrix"):
            drawn, traces = shown(page, chart), expected[chart].traces
            for part in ("y", "z"):
                assert [line.get(part) for line in drawn] == [line.get(part) for line in traces]
            assert page.inner_text(f"#{chart}-title") == expected[chart].title

    def test_a_pair_is_picked_by_click_by_keyboard_and_by_number(self, page, told):
        L = 3

        def assert_picked(l, m, said):
            expected = told("one", l=l, m=m)
            for chart in ("history", "absolute"):
                assert shown(page, chart) == expected[chart].traces
            assert page.inner_text("#picked").startswith(said)

        shown(page, "matrix")
        box = page.locator("#matrix .nsewdrag").bounding_box()
        page.mouse.click(
            box["x"] + box["width"] * 0.5 / L, box["y"] + box["height"] * (L - 0.5) / L
        )
        assert_picked(L, 1, "Block 3 in the basis of block 1")
        page.locator("#matrix").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        assert_picked(L - 1, 2, "Block 2 in its own basis")
        for _ in range(L):
            page.keyboard.press("ArrowUp")
        assert_picked(1, 2, "Block 1 in the basis of block 2")
        page.select_option("#l", "3")
        assert_picked(3, 2, "Block 3 in the basis of block 2")

    def test_a_link_keeps_the_choices_and_tab_goes_through_everything_in_order(
        self, open_page, written
    ):
        page, said = open_page(written("one"), "#step=8&l=1&m=2&k=8")
        assert page.evaluate("[state.step, state.l, state.m, state.k]") == [8, 1, 2, "8"]
        page.select_option("#measure", "offdiag")
        assert "measure=offdiag" in page.url and "step=8" in page.url
        page.evaluate("document.activeElement.blur()")
        page.locator("body").click(position={"x": 1, "y": 1})
        reached = []
        active = "document.activeElement"
        for _ in range(60):
            page.keyboard.press("Tab")
            names = f"{active}.id || {active}.className || {active}.tagName"
            reached.append(page.evaluate(names))
        links, controls = ["A"] * 6, "measure k pairs score axis last step".split()
        first = ["skip", "theme", "A", "SUMMARY", "doubts", *links, *controls, "csv"]
        assert reached[: len(first)] == first
        order = [reached.index(name) for name in ("l", "m", "matrix")]
        assert order == sorted(order)
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate(f"{active}.id") == "training"
        page.close()
        assert_silent(said)

    def test_prints_whole(self, shared):
        page = shared("one", color_scheme="dark")
        page.evaluate(
            f"""() => addEventListener("beforeprint", () => {{ window.printed = {{
              charts: {VISIBLE}.map((c) => [c.id, c.querySelectorAll(".main-svg").length, c._fullLayout.width,
                c.parentElement.clientWidth]),
              ink: document.getElementById("coupling").layout.font.color,
              closed: document.querySelectorAll("details:not([open], .more)").length,
            }}; }}, {{ once: true }})"""
        )
        visible = page.evaluate(f"{VISIBLE}.map((c) => c.id)")
        pdf = page.pdf(format="A4")
        assert pdf.count(b"/Type /Page\n") > 5
        printed = page.evaluate("window.printed")
        assert [name for name, *_ in printed["charts"]] == visible
        for name, drawn, width, column in printed["charts"]:
            assert drawn and width <= column < 700, name
        assert printed["ink"] == "#1a1d21" and printed["closed"] == 0
        shown(page, "coupling")
        width = page.evaluate("$('coupling')._fullLayout.width")
        assert width > 1000, "afterwards it is as before"

    def test_a_chart_is_saved_as_numbers_and_as_pictures_on_the_page_s_colour(self, shared, told):
        expected, page = told("one")["coupling"], shared("one", color_scheme="dark")
        shown(page, "coupling")
        files = {}
        for kind in ("csv", "svg", "png"):
            name, files[kind] = downloaded(page, "coupling", kind)
            assert name == f"{expected.file}.{kind}"
        assert files["csv"].read_text() == expected.csv
        text = files["svg"].read_text()
        assert expected.title.split(":")[0] in text and "20, 23, 27" in text
        picture = plt.imread(files["png"], "png")
        assert picture.shape[0] > 1000 and picture[..., 3].min() == 1
        assert (np.round(255 * picture[-1, -1, :3]) == (20, 23, 27)).all()
        assert page.locator("#used-figure button.png").count() == 0, "a table is no picture"

    @pytest.mark.parametrize("width", [1280, 400])
    def test_what_a_picture_shows_is_where_it_is_on_the_page(self, shared, width):
        """The cells of the matrix are at its ticks, and the title is within the picture."""
        page = shared("one", viewport=(width, 900))
        shown(page, "matrix")
        picture = plt.imread(downloaded(page, "matrix", "png")[1], "png")[..., :3]
        left, top, cell, height = page.evaluate("""() => {
          const { xaxis, yaxis, height } = $("matrix")._fullLayout;
          return [xaxis._offset, yaxis._offset, xaxis._length / model().layers, height];
        }""")
        scale = 3
        above = picture.shape[0] / scale - height
        assert 20 < above < 90, "the title"
        places = np.array([0.1, 0.5, 0.9, 1.1, 1.5, 1.9, 2.1, 2.5, 2.9]) * cell
        rows, columns = (scale * (start + places) for start in (top + above, left))
        cells = picture[np.ix_(rows.astype(int), columns.astype(int))]
        empty = (cells == 1).all(-1)
        assert (empty == np.kron(np.eye(3), np.ones((3, 3)))).all(), "only the diagonal is"
        ink = np.flatnonzero((picture[: int(scale * above)] < 0.5).all(-1).any(0))
        assert 0 < ink.min() and ink.max() < picture.shape[1] - 3

    @pytest.mark.parametrize("measures", ["coupling", "trajectory", "tokenwise"])
    def test_results_of_one_measure_at_one_step(self, open_page, tmp_path, measures):
        unit = tracker.measure(neox(), tokens(2), k=4, measures=measures, pair_tokens=3)
        store = stored(tmp_path / "run", {7: unit}, callback="coupling")
        page, said = open_page(write_report(store.path, tmp_path / "page.html"))
        steps_through(page)
        visible = page.evaluate(f"{VISIBLE}.map((c) => c.id)")
        assert visible and ("coupling" in visible) == (measures == "coupling")
        assert ("lss" in visible) == (measures == "trajectory")
        header = page.inner_text("header")
        assert "1 checkpoint at step 7" in header and "Onset" not in header
        assert page.is_disabled("#step")
        page.close()
        assert_silent(said)


def downloaded(page, chart, kind):
    """The name of the file that a chart's button saves, and where it is."""
    with page.expect_download() as download:
        page.locator(f"#{chart}-figure button.{kind}").click()
    return download.value.suggested_filename, download.value.path()


class TestCommandLine:
    @pytest.mark.slow
    def test_one_store_and_several(self, several, other, tmp_path, capsys):
        one, *_ = several
        assert main([str(one), "--out", str(tmp_path / "page.html")]) == 0
        assert 4_000_000 < (tmp_path / "page.html").stat().st_size < 7_000_000
        for results, said in (
            ([one, other], "say where it goes: --out page.html"),
            ([one, one, "--out", tmp_path / "page.html"], "is given twice"),
        ):
            assert main([*map(str, results)]) == 2
            assert said in capsys.readouterr().err
        assert main([str(one)]) == 0 and (one / "report.html").is_file()

    def test_bad_input(self, other, tmp_path, capsys):
        with refused("a page shows each run by itself"):
            write_report({"a": [other]}, tmp_path / "page.html")
        assert main([str(tmp_path / "nothing")]) == 2
        assert "give a walk's --out directory" in capsys.readouterr().err
        assert main([str(other), "--out", str(tmp_path)]) == 2
        assert "is a directory; name the file" in capsys.readouterr().err
        damaged = shutil.copytree(other, tmp_path / "damaged")
        Store(damaged).file(4).write_bytes(b"\x89HDF no more")
        assert main([str(damaged), "--out", str(tmp_path / "page.html")]) == 2
        assert "step00000004.nc is damaged" in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()
