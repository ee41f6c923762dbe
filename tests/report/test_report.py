"""The page in a real headless Chromium, opened from a file."""

import os
import shutil
import subprocess
import sys
from functools import cache

import numpy as np
import pandas
import pytest
import xarray as xr

import tracker
from checkpoints.suites import PYTHIA_STEPS
from tests.conftest import ROOT
from tests.models import neox, tokens
from tests.stores import generated, unit
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import reduced
from tracker.analysis.regression import linear_fit
from tracker.analysis.statistics import curves
from tracker.figures.model_comparisons import score_against_coupling
from tracker.figures.selection import draw
from tracker.measures.registry import MISCOUPLINGS, VARIANTS
from tracker.report.contents import contents
from tracker.report.write import main, write_report
from tracker.store.results import Store, distinct_names

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and "REQUIRE_BROWSER" not in os.environ,
        reason="no Chromium on the PATH (Debian: apt-get install chromium)",
    ),
]
TO_16_BITS = {"rtol": 1e-4}  # what the page promises of its matrices
VISIBLE = "[...document.querySelectorAll('.chart')].filter((c) => c.offsetParent)"
SHOWN = "(id) => document.getElementById(id).data"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A store of every measure, at four steps of a random model, one with a Jacobian of zero."""
    import torch

    store = Store(tmp_path_factory.mktemp("store") / "toy")
    store.check_settings({"model": "toy"})
    for step in (0, 1, 8, 2000):
        torch.manual_seed(step)
        model = neox()
        if step == 8:
            with torch.no_grad():
                for name, parameter in model.gpt_neox.layers[1].named_parameters():
                    if "dense." in name or "dense_4h_to_h" in name:
                        parameter.zero_()
        unit = tracker.measure(model, tokens(2), k=[4, 8], measures="all,tokenwise", pair_tokens=3)
        unit["score"] = ("task", [0.1 + step / 4000])
        unit = unit.assign_coords(task=["piqa"], step=step, commit=f"{step:040x}", revision=f"step{step}")
        store.write(step, unit.assign_coords(suspect="another shard's weights" if step == 1 else ""))
    return store.path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A store of another model, of the same name, by another convention."""
    path = tmp_path_factory.mktemp("other") / "toy"
    return generated(path, (1, 4, 16, 64), layers=8, ks=(4,), final_norm="exclude")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Stores of six models, of two architectures, measured alike."""
    place, paths = tmp_path_factory.mktemp("several"), []
    for i in range(6):
        store = Store(place / f"model{i}")
        store.check_settings({"model": store.path.name})
        sizes = {"width": 64 + 16 * (i % 4), "parameters": 1000 * (i + 1) ** 2}
        for step in (0, 64):
            made = unit(step, 3 + i % 3, (4, 8), 3, False, i, model_class=f"tests.{'AB'[i > 3]}", **sizes)
            rated = ("prompt", [3.0, 1, 4])
            store.write(step, made.assign_coords(tokens_seen=step * 2**i, difficulty=rated))
        paths.append(store.path)
    return paths


@pytest.fixture(scope="module")
def written(results, other, several, tmp_path_factory):
    """A function that writes the page of one store, that of two, or that of enough to compare models, once each."""
    directory, stores = tmp_path_factory.mktemp("pages"), {"one": results, "two": [results, other], "six": several}
    return cache(lambda which: write_report(stores[which], directory / f"{which}.html"))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Opens pages; at the end: nothing was logged to the console, nothing asked of the network."""
    said, asked, opened = [], [], []

    def open_page(file, fragment="", **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{file.as_uri()}{fragment}")
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


RESET = """() => {
  for (const name of Object.keys(state)) state[name] = typeof state[name] === "string" ? "" : null;
  settle(); paint(); offer(); show(); scrollTo(0, 0); document.activeElement.blur();
}"""


@pytest.fixture(scope="module")
def opened(browser, written):
    """Pages that tests share, for Plotly takes seconds to load; with what they said and asked for."""
    pages = {}

    def opened(which):
        if which not in pages:
            page, said = browser.new_page(), []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: said.append(request.url))
            page.goto(written(which).as_uri())
            pages[which] = page, said
        return pages[which]

    return opened


@pytest.fixture
def shared(opened):
    """Gives a page as it is when it is opened, but for the time that takes."""
    looked_at = []

    def shared(which, viewport=(1280, 900), color_scheme="light"):
        page, said = opened(which)
        page.set_viewport_size(dict(zip(("width", "height"), viewport, strict=True)))
        page.emulate_media(color_scheme=color_scheme)
        page.evaluate(RESET)
        looked_at.append(said)
        return page

    yield shared
    for said in looked_at:
        assert [line for line in said if not line.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture
def page(shared):
    return shared("one")


def shown(page, chart):
    """The traces of a chart, once it is in sight and drawn as chosen."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    page.wait_for_function("(id) => seen.has(id) && !stale.has(id)", arg=chart)
    return page.evaluate(SHOWN, chart)


def named(traces, name):
    (trace,) = [trace for trace in traces if trace.get("name") == name]
    return trace


def numbers(values):
    return np.array(values, dtype=float)


def off_diagonal(matrix):
    return np.where(np.eye(len(matrix)), np.nan, matrix)


def steps_through(page):
    """Scroll through the whole page, so that every chart is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 600):
        page.evaluate("(y) => window.scrollTo(0, y)", y)
        page.wait_for_timeout(40)


class TestNumbers:
    """What the page shows is what the store holds."""

    pytestmark = browser_test

    @pytest.mark.slow
    def test_every_matrix_curve_and_level(self, page, results):
        ds = tracker.open_results(results)
        points = curves(ds)
        decoded = page.evaluate(
            """() => {
              const { matrices, levels } = data.models[0];
              const values = (byK) => Object.entries(byK).map(([k, packed]) => [k, Array.from(unpacked(packed), finite)]);
              return [
                ...Object.entries(matrices).map(([name, byK]) => [name, values(byK)]),
                ...Object.entries(levels).map(([name, byK]) => [`${name}/level`, values(byK)]),
              ];
            }"""
        )
        assert [name for name, _ in decoded[:2]] == list(VARIANTS[:2]) and len(decoded) == 2 * len(VARIANTS)
        for name, by_k in decoded:
            for k, values in by_k:
                of, level, _ = name.partition("/level")
                if level:
                    stored = null_level(ds, of).sel(k=int(k)).astype(float).mean(("prompt", "token")).values
                    stored = stored if of.endswith("_vju") else np.stack([off_diagonal(matrix) for matrix in stored])
                else:
                    stored = ds[of].sel(k=int(k)).astype(float).mean(("prompt", "token")).values
                    stored = stored if of.endswith("_vju") else np.stack([off_diagonal(matrix) for matrix in stored])
                np.testing.assert_allclose(numbers(values).reshape(stored.shape), stored, **TO_16_BITS)
        for name in MISCOUPLINGS:
            carried = page.evaluate("(name) => data.models[0].curves[name]", name)
            for k in (4, 8):
                for pairs in ("mean", "mean_offdiag", "mean_adjacent"):
                    for part, of in {"value": name, "null": f"{name}_null", "q25": f"{name}_q25"}.items():
                        expected = points[of].sel(k=k, pairs=pairs).values
                        np.testing.assert_array_equal(numbers(carried[str(k)][pairs][part]), expected)

    @pytest.mark.slow
    def test_by_distance_by_depth_and_by_prompt(self, page, results):
        ds = tracker.open_results(results).isel(step=3)
        matrix = ds.miscoupling.sel(k=4).astype(float).mean(("prompt", "token"))
        drawn = named(shown(page, "distance"), "step 2,000")["y"]
        L = matrix.sizes["layer"]
        rings = [np.diagonal(matrix.values, r).tolist() + np.diagonal(matrix.values, -r).tolist() for r in range(1, L)]
        np.testing.assert_allclose(numbers(drawn), [np.mean(ring) for ring in rings], **TO_16_BITS)
        drawn = named(shown(page, "singular"), "s1")["y"]
        np.testing.assert_allclose(numbers(drawn), ds.singular_value.sel(rank=1).median(("prompt", "token")), rtol=1e-6)
        drawn = named(shown(page, "norm"), "step 2,000")["y"]
        np.testing.assert_allclose(numbers(drawn), ds.norm.median(("prompt", "position")), rtol=1e-6)
        drawn = named(shown(page, "entropy"), "step 2,000")["y"]
        np.testing.assert_allclose(numbers(drawn), ds.entropy.median(("prompt", "position")), rtol=1e-6)
        drawn = named(shown(page, "equidistance_window"), "step 2,000")["y"]
        expected = ds.equidistance_window.median(("prompt", "position")).values
        assert not np.isfinite(expected).all()  # depths at which no window fits are left out
        np.testing.assert_allclose(numbers(drawn), expected[np.isfinite(expected)], rtol=1e-6)
        apart = matrix.layer != matrix.layer_other
        drawn = named(shown(page, "prompts"), "prompts")["y"]
        above = (null_level(ds, "miscoupling") - ds.miscoupling).sel(k=4).where(apart)
        np.testing.assert_allclose(numbers(drawn), above.mean(("token", "layer", "layer_other")), atol=1e-6)
        assert named(shown(page, "prompts"), "null level")["y"] == [0, 0]
        points = curves(tracker.open_results(results)).sel(k=4, pairs="mean_offdiag")
        drawn = named(shown(page, "scatter"), "a point a step")["y"]
        np.testing.assert_allclose(numbers(drawn), points.miscoupling_null - points.miscoupling)
        noise = ds.noise_similarity.sel(depth=1).mean(("prompt", "position"))
        np.testing.assert_allclose(numbers(named(shown(page, "noise"), "after block 1")["y"]), noise, rtol=1e-6)

    @pytest.mark.slow
    def test_the_fit_of_singular_values_is_drawn_with_its_r2(self, shared, other):
        page = shared("two")
        page.select_option("#model", "1")
        lines = shown(page, "singular")
        s = tracker.open_results(other).singular_value.sel(step=64, rank=1).median(("prompt", "token")).values
        layers = np.arange(1, 9)
        fitted = np.polyval(np.polyfit(layers, 1 / s, 1), layers)
        expected = np.where(fitted > 0, 1 / fitted, np.nan)
        np.testing.assert_allclose(numbers(named(lines, "fit of 1 / s₁")["y"]), expected, rtol=1e-5)
        r2 = np.corrcoef(layers, 1 / s)[0, 1] ** 2
        assert f"R² = {r2:.2f} over 8 blocks" in page.inner_text("#singular-figure figcaption")

    @pytest.mark.slow
    def test_tokens(self, page, results):
        ds = tracker.open_results(results).isel(step=3)
        page.select_option("#kind", "fixed_output")
        page.select_option("#block", "1")
        (drawn,) = shown(page, "token_matrix")
        stored = ds.fixed_output_miscoupling.sel(k=4, layer=1).mean("prompt").values
        np.testing.assert_allclose(numbers(drawn["z"]), stored, **TO_16_BITS)
        assert (
            page.inner_text("#token_matrix-title")
            == "Mis-coupling of pairs of tokens: block 1, in bases of block 2, step 2,000"
        )
        assert drawn["text"][0][2] == "token 0 in block 1, in the basis of token 6 in block 2"
        blocks = page.eval_on_selector_all("#block option", "(options) => options.map((option) => option.value)")
        assert blocks == ["1", "2"], "no block lends its basis to the last"
        curve = named(shown(page, "token_curves"), "mean over prompts")["y"]
        expected = ds.fixed_output_miscoupling.sel(k=4).mean()
        assert curve[3] == pytest.approx(float(expected), rel=1e-6)
        title = "Coupling across tokens over training, fixed output: mis-coupling m_K, K = 4, l′ = l + 1"
        assert page.inner_text("#token_curves-title") == title
        (drawn,) = shown(page, "token_absolute")
        A = abs(ds.fixed_output_matrix) / ds.fixed_output_singular_value.sel(rank=1)
        A = A.sel(layer=1).mean("prompt").values
        seen = numbers(drawn["z"])
        for t, u in np.ndindex(3, 3):
            tile = seen[5 * t : 5 * t + 4, 5 * u : 5 * u + 4]
            np.testing.assert_allclose(tile, A[t, u], atol=np.ptp(A[t, u]) / 500)
        assert (
            page.inner_text("#token_absolute-title")
            == "Coupling matrices |A| of pairs of tokens, l = 1, l′ = 2, step 2,000"
        )
        assert "layers compared across tokensl' = l + 1" in page.text_content("body")

    @pytest.mark.slow
    def test_undefined_values_are_gaps(self, page, results):
        lines = shown(page, "lss")
        assert [value is None for value in named(lines, "median")["y"]] == [False, False, True, False]
        (band,) = [line for line in lines if line.get("fill") == "toself"]
        assert band["x"].count(None) == 2  # a piece before the gap, and one after
        data = contents(reduced(tracker.open_results(results)))
        assert [median is None for median in data["trajectory"]["lss"]["median"]] == [False, False, True, False]

    @pytest.mark.slow
    @pytest.mark.parametrize("which", ["one", "two", "six"])
    def test_every_chart_gives_its_numbers_as_one_table_with_named_columns(self, shared, which):
        page = shared(which)
        visible = page.evaluate("[...document.querySelectorAll('figure')].filter((f) => !f.hidden).map((f) => f.id)")
        assert len(visible) > 10
        names = set()
        for figure in visible:
            name, table = downloaded(page, figure)
            names.add(name)
            assert len(table) and table.shape[1] > 2 and not any("Unnamed" in column for column in table), name
            assert not {"x", "y", "z", "value", "series"} & set(table), name
            assert table.notna().any().all(), f"{name} has an empty column: {table.columns[table.isna().all()]}"
            words = {"model", "measure", "pairs", "subset", "prompt", "out_words", "in_words"}
            assert all(dtype.kind in "if" for column, dtype in table.dtypes.items() if column not in words), name
            for column, part in (("model", ""), ("measure", ""), ("k", "K"), ("step", "step")):
                values = table[column].unique() if column in table else []
                assert len(values) != 1 or f"_{part}{values[0]}".replace("/", "-") in name, name
        assert len(names) == len(visible), "no file replaces another"

    @pytest.mark.slow
    def test_the_numbers_of_a_table_are_the_stores(self, page, results):
        ds = tracker.open_results(results)
        stored = curves(ds).sel(k=4, pairs="mean_offdiag")
        name, table = downloaded(page, "coupling-figure")
        assert name == "coupling_toy_miscoupling_K4_steps0-2000.csv"
        assert table.columns.tolist() == "model measure k pairs step mean q25 q75 null_level".split()
        assert table.step.tolist() == [0, 1, 8, 2000]
        for column, of in {"mean": "", "q25": "_q25", "q75": "_q75", "null_level": "_null"}.items():
            np.testing.assert_allclose(table[column], stored[f"miscoupling{of}"])
        page.select_option("#score", "piqa")
        assert downloaded(page, "coupling-figure")[1].piqa.tolist() == ds.score.values[:, 0].tolist()
        at = {"k": 4, "step": 2000}
        name, table = downloaded(page, "matrix-figure")
        assert name == "matrix_toy_miscoupling_K4_step2000.csv"
        mean, level = (
            values.sel(at).mean(("prompt", "token")).values
            for values in (ds.miscoupling, null_level(ds, "miscoupling"))
        )
        L = len(mean)
        assert table[["layer", "layer_other"]].values.tolist() == [[i // L + 1, i % L + 1] for i in range(L * L)]
        np.testing.assert_allclose(table["mean"].values.reshape(L, L), off_diagonal(mean), **TO_16_BITS)
        np.testing.assert_allclose(table["null_level"].values.reshape(L, L), off_diagonal(level), **TO_16_BITS)
        name, table = downloaded(page, "graph-figure")
        assert len(table) == L * (L - 1) / 2
        name, table = downloaded(page, "norm-figure")
        assert name == "norm_toy_norm_step2000.csv" and table.depth.tolist() == list(range(L + 1))
        quartiles = ds.norm.sel(step=2000).quantile([0.25, 0.5, 0.75], ("prompt", "position")).values
        np.testing.assert_allclose(table[["q25", "median", "q75"]].values.T, quartiles, rtol=1e-6)
        page.select_option("#kind", "fixed_output")
        page.select_option("#block", "1")
        name, table = downloaded(page, "token_matrix-figure")
        assert name == "token_matrix_toy_fixed_output_miscoupling_K4_step2000.csv"
        of_pairs = ds.fixed_output_miscoupling.sel(at).sel(layer=1).mean("prompt").values
        np.testing.assert_allclose(table["mean"].values.reshape(of_pairs.shape), of_pairs, **TO_16_BITS)
        assert set(zip(table.layer, table.layer_other, strict=True)) == {(1, 2)} and 6 in table.token_other.values
        name, table = downloaded(page, "token_absolute-figure")
        A = abs(ds.fixed_output_matrix) / ds.fixed_output_singular_value.sel(rank=1)
        A = A.sel(layer=1, step=2000).mean("prompt").values
        np.testing.assert_allclose(table.absolute.values.reshape(A.shape), A, atol=np.ptp(A) / 100)

    @pytest.mark.slow
    def test_the_words_of_directions_no_better_than_random_ones_are_grey(self, page, results):
        ds = tracker.open_results(results).isel(step=3, prompt=0, token=0)
        rows = []
        for block in ds.layer.values:
            page.select_option("#l", str(block))
            shown_words = page.locator("#words tbody tr")
            page.locator("#words-figure").scroll_into_view_if_needed()
            page.wait_for_function("seen.has('words') && !stale.has('words')")
            at = ds.sel(layer=block)
            for part, column in (("out", 2), ("in", 4)):
                scores, null = at[f"direction_{part}_score"].values, float(at[f"direction_{part}_score_null"])
                for i, score in enumerate(scores):
                    cells = shown_words.nth(i).locator("td")
                    assert cells.nth(column).inner_text() == f"{score:.1f}"
                    for cell in (cells.nth(column - 1), cells.nth(column)):
                        assert ("faint" in (cell.get_attribute("class") or "")) == (score < null)
                    rows.append(score < null)
        assert any(rows)
        assert "Grey, in italics:" in page.inner_text("#words-figure figcaption")

    @pytest.mark.slow
    def test_tables_are_whole_on_a_narrow_screen(self, shared):
        page = shared("one", viewport=(400, 900))
        for name in ("words", "used"):
            page.locator(f"#{name}-figure").scroll_into_view_if_needed()
            page.wait_for_function("(id) => seen.has(id) && !stale.has(id)", arg=name)
            fits = "(id) => [...$(id).querySelectorAll('th, td')].every((c) => c.scrollWidth <= c.clientWidth + 1 && "
            assert page.evaluate(f"{fits} c.getBoundingClientRect().right <= 400)", name), name
            assert page.locator(f"#{name} td").count() > 6
            lines = "(cell) => { const r = document.createRange(); r.selectNodeContents(cell); return r.getClientRects().length }"
            cells = page.locator(f"#{name} tr > :first-child")
            assert {cells.nth(i).evaluate(lines) for i in range(cells.count())} == {1}, "no word is broken"


def downloaded(page, figure):
    """The name of the CSV that a figure offers, and the table that pandas reads from it."""
    shown(page, figure.removesuffix("-figure"))  # what is drawn while a button is clicked may move it
    with page.expect_download() as download:
        page.locator(f"#{figure} button.csv").click()
    return download.value.suggested_filename, pandas.read_csv(download.value.path())


class TestFirstLook:
    """What coupling is, what was measured, and every chart's title are in the page before anything is drawn."""

    pytestmark = browser_test

    @pytest.mark.slow
    def test_the_page_begins_with_what_coupling_is(self, page):
        said = page.locator("header .introduction > div").first
        assert said.locator("p").count() == 3
        assert all(text.count(". ") == 0 and text.endswith(".") for text in said.locator("p").all_inner_texts())
        assert said.locator("a").get_attribute("href") == "https://arxiv.org/abs/2407.07810"
        assert page.locator(".picture svg").count() == 3
        before = "document.querySelector('.introduction').compareDocumentPosition(document.getElementById('controls'))"
        assert page.evaluate(before) == 4  # follows

    @pytest.mark.slow
    def test_titles_are_there_before_their_charts_are_drawn(self, open_page, written):
        page = open_page(written("one"))
        titles = page.evaluate(f"{VISIBLE}.map((c) => [c.id, document.getElementById(`${{c.id}}-title`).textContent])")
        drawn = page.evaluate(f"{VISIBLE}.filter((c) => c.data).map((c) => c.id)")
        assert len(titles) > 20 > len(drawn)
        assert all(title for _, title in titles) and len({title for _, title in titles}) == len(titles)

    @pytest.mark.slow
    def test_prompts_are_listed(self, open_page, page, several, tmp_path):
        assert "2 inputs; the results hold no text of them. Jacobians" in page.inner_text("#of-prompts")
        store = Store(generated(tmp_path / "run", (0, 8), prompts=23))
        for step in (0, 8):
            texts = [f"Question {i}: <b>what is {i}?</b>" for i in range(22)] + ["word " * 100]
            unit = store.read(step).assign_coords(prompt_text=("prompt", texts), prompt_source=("prompt", ["arc"] * 23))
            unit["norm"][{"prompt": 4, "position": slice(1, None)}] = np.nan  # a prompt of one token
            store.write(step, unit.assign_attrs(tokens="last"))
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        said = page.inner_text("#of-prompts")
        assert "23 prompts. Jacobians, and therefore mis-couplings, are those at the last token of each prompt." in said
        assert "Question 3: <b>what is 3?</b>12 tokens, arc" in said.replace("\n", "") and "3 more" in said
        assert "Question 4: <b>what is 4?</b>1 token, arc" in said.replace("\n", "")
        assert "Question 21" not in said
        page.locator(".more > summary").click()
        assert "Question 21" in page.inner_text("#of-prompts")
        assert page.locator("#prompts-listed li").count() == 23

    @pytest.mark.slow
    @pytest.mark.parametrize("which", ["one", "six"])
    def test_prints_whole(self, shared, which):
        page = shared(which, color_scheme="dark")
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
        ink, width = page.evaluate("[$('coupling').layout.font.color, $('coupling')._fullLayout.width]")
        assert ink != "#1a1d21" and width > 1000, "afterwards it is as before"


class TestChoices:
    pytestmark = browser_test

    @pytest.mark.slow
    def test_the_slider_changes_the_matrix_by_mouse_and_by_keyboard(self, page, results):
        stored = tracker.open_results(results).miscoupling.sel(k=4).astype(float).mean(("prompt", "token")).values

        def assert_step(i):
            np.testing.assert_allclose(numbers(shown(page, "matrix")[0]["z"]), off_diagonal(stored[i]), **TO_16_BITS)

        assert_step(3)
        assert page.inner_text("#step-shown") == "2,000"
        page.locator("#step").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert_step(1)
        assert page.inner_text("#pairs-head .at-step") == "1"
        page.locator("#step").fill("0")
        assert_step(0)

    @pytest.mark.slow
    def test_measure_k_and_pairs(self, page, results):
        ds = tracker.open_results(results)
        page.select_option("#measure", "offdiag_normalized_vju")
        page.select_option("#k", "8")
        page.select_option("#pairs", "mean_adjacent")
        stored = ds.offdiag_normalized_vju.sel(k=8).isel(step=3).astype(float).mean(("prompt", "token")).values
        np.testing.assert_allclose(numbers(shown(page, "matrix")[0]["z"]), stored, **TO_16_BITS)
        said = "How coupled blocks are over training: off-diagonal, normalized, sides swapped, K = 8, adjacent blocks"
        assert page.inner_text("#coupling-title") == said
        drawn = named(shown(page, "coupling"), "mean over prompts")["y"]
        assert drawn == contents(reduced(ds))["curves"]["offdiag_normalized_vju"][8]["mean_adjacent"]["value"]

    @pytest.mark.slow
    def test_with_the_final_norm_the_last_row_and_column_are_others(self, page, results):
        stored = tracker.open_results(results).isel(step=3).sel(k=4)
        drawn = []
        for name in ("miscoupling", "miscoupling_normed"):
            page.select_option("#measure", name)
            drawn.append(numbers(shown(page, "matrix")[0]["z"]))
            expected = off_diagonal(stored[name].astype(float).mean(("prompt", "token")).values)
            np.testing.assert_allclose(drawn[-1], expected, **TO_16_BITS)
            said = page.inner_text("#matrix-figure figcaption")
            assert ("the last block with the final norm in it" in said) == (name == "miscoupling_normed")
        shown(page, "coupling")
        assert page.inner_text("#coupling-title").endswith(
            ": mis-coupling m_K, with the final norm, K = 4, pairs of different blocks"
        )
        assert np.nanmax(abs(drawn[0] - drawn[1])[:-1, :-1]) < 1e-4 < np.nanmax(abs(drawn[0] - drawn[1])[-1])

    @pytest.mark.slow
    def test_a_pair_is_picked_by_click_by_keyboard_and_by_number(self, page, results):
        ds = tracker.open_results(results)
        stored = ds.miscoupling.sel(k=4).astype(float).mean(("prompt", "token"))
        L = ds.sizes["layer"]

        def assert_picked(l, m):
            history = shown(page, "history")
            drawn, level = named(history, "mean over prompts"), named(history, "null level")
            of = stored.sel(layer=l, layer_other=m).values if l != m else np.zeros(4)
            np.testing.assert_allclose(numbers(drawn["y"]), of, **TO_16_BITS)
            null = null_level(ds, "miscoupling").sel(k=4, layer=l, layer_other=m).mean(("prompt", "token")).values
            if l != m:
                np.testing.assert_allclose(numbers(level["y"]), null, **TO_16_BITS)
            assert drawn["customdata"] == [0, 1, 8, 2000]
            A = abs(ds.matrix).mean(("prompt", "token")).isel(step=3).sel(layer=l, layer_other=m).values
            np.testing.assert_allclose(numbers(shown(page, "absolute")[0]["z"]), A, atol=np.ptp(A) / 500)
            said = page.inner_text("#picked")
            assert said.startswith(f"Block {l} in the basis of block {m}" if l != m else f"Block {l} in its own basis")

        last = (null_level(ds, "miscoupling") - ds.miscoupling).sel(k=4).isel(step=3).mean(("prompt", "token"))
        apart = np.where(np.eye(L, dtype=bool), -np.inf, last.transpose("layer", "layer_other"))
        opened = np.unravel_index(apart.argmax(), apart.shape)
        assert tuple(opened) != (0, 1), "the first pair is not the most coupled"
        assert_picked(*(int(i) + 1 for i in opened))
        shown(page, "matrix")
        box = page.locator("#matrix .nsewdrag").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.5 / L, box["y"] + box["height"] * (L - 0.5) / L)
        assert_picked(L, 1)
        page.locator("#matrix").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        assert_picked(L - 1, 2)
        for _ in range(L):
            page.keyboard.press("ArrowUp")
        assert_picked(1, 2)
        page.select_option("#l", "2")
        assert_picked(2, 2)

    @pytest.mark.slow
    def test_a_score_stands_on_a_second_axis(self, page, results):
        assert "yaxis2" not in page.evaluate("(id) => Object.keys(document.getElementById(id).layout)", "coupling")
        page.select_option("#score", "piqa")
        drawn = named(shown(page, "coupling"), "piqa")
        assert drawn["yaxis"] == "y2" and drawn["y"] == tracker.open_results(results).score.values[:, 0].tolist()
        assert page.evaluate("document.getElementById('coupling').layout.yaxis2.side") == "right"

    @pytest.mark.slow
    def test_the_theme_follows_the_system_until_one_is_chosen(self, open_page, written):
        page = open_page(written("one"), color_scheme="dark")
        background = "getComputedStyle(document.body).backgroundColor"
        ink = "document.getElementById('coupling').layout.font.color"
        shown(page, "coupling")
        in_dark = page.evaluate(background), page.evaluate(ink)
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"(before) => {background} !== before", arg=in_dark[0])
        shown(page, "coupling")
        in_light = page.evaluate(background), page.evaluate(ink)
        assert in_light == ("rgb(255, 255, 255)", "#1a1d21") and in_dark[0] != in_light[0] and in_dark[1] != in_light[1]
        page.locator("#theme").focus()
        page.keyboard.press("Enter")
        shown(page, "coupling")
        assert (page.evaluate(background), page.evaluate(ink)) == in_dark
        page.reload()
        assert page.evaluate(background) == in_dark[0]
        page.evaluate("localStorage.clear()")

    @pytest.mark.slow
    def test_the_address_keeps_the_choices(self, open_page, page, written):
        page.select_option("#k", "8")
        page.locator("#step").fill("1")
        page.select_option("#m", "3")
        page.reload()
        assert page.input_value("#k") == "8" and page.input_value("#m") == "3"
        assert page.inner_text("#step-shown") == "1"
        wrong = open_page(written("one"), "#k=999&step=7&l=99&m=x&measure=nothing&model=5&theme=pink")
        assert (
            wrong.input_value("#k") == "4" and wrong.inner_text("#step-shown") == "8" and wrong.input_value("#l") == "3"
        )

    @pytest.mark.slow
    def test_tab_goes_through_everything_in_order(self, page):
        reached = []
        for _ in range(80):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
                )
            )
        links, controls = ["A"] * 6, ["measure", "k", "pairs", "score", "axis", "last", "step"]
        first = ["skip", "theme", "A", "SUMMARY", "doubts", *links, *controls, "csv"]
        assert reached[: len(first)] == first
        assert reached.index("l") < reached.index("m") < reached.index("matrix") < reached.index("kind")
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "training"


class TestSeveral:
    pytestmark = browser_test

    @pytest.mark.slow
    def test_curves_stand_together_and_the_chooser_changes_the_rest(self, shared, results, other):
        page = shared("two")
        names = distinct_names([results, other])
        assert names[0] != names[1] and page.locator("#model option").all_inner_texts() == names
        stored = [curves(tracker.open_results(path)).sel(k=4, pairs="mean_offdiag") for path in (results, other)]
        lines = shown(page, "coupling")
        for name, points in zip(names, stored, strict=True):
            assert named(lines, name)["y"] == points.miscoupling.values.tolist()
            assert named(lines, f"{name}, null level")["y"] == points.miscoupling_null.values.tolist()
        looks = [(named(lines, name)["line"]["color"], named(lines, name)["line"]["dash"]) for name in names]
        assert looks[0][0] != looks[1][0] and looks[0][1] != looks[1][1]
        page.select_option("#model", "1")
        assert len(shown(page, "matrix")[0]["z"]) == 8 and page.inner_text("#step-shown") == "64"
        (line,) = [line["name"] for line in shown(page, "history") if "null" not in line["name"]]
        assert line == names[1]  # the other has as many blocks only by chance: it has not

    @pytest.mark.slow
    def test_prompts_against_their_difficulty(self, shared, several):
        page, ds = shared("six"), tracker.open_results(several[0]).isel(step=-1)
        line = named(shown(page, "difficulty"), "prompts")
        above = (null_level(ds, "miscoupling") - ds.miscoupling).sel(k=4).astype(float).values
        couplings = [np.nanmean(off_diagonal(A)) for A in above[:, 0]]
        assert line["x"] == [3, 1, 4]
        np.testing.assert_allclose(line["y"], couplings, atol=1e-6)

    @pytest.mark.slow
    def test_what_differs_is_said(self, shared):
        page = shared("two")
        said = page.inner_text("#differences")
        assert said.startswith("Not measured alike: these results differ in final norm (") and "exclude" in said
        shown(page, "coupling")
        assert "not measured alike" in page.inner_text("#coupling-caption")
        page.select_option("#k", "8")
        shown(page, "coupling")
        assert "Not measured in" in page.inner_text("#coupling-caption")
        page.select_option("#model", "1")  # which has no K = 8
        steps_through(page)
        assert (
            page.is_hidden("#matrix-figure") and page.is_hidden("#prompts-figure") and page.is_visible("#norm-figure")
        )

    @pytest.mark.slow
    def test_what_is_lacking_is_said_with_its_command(self, shared):
        foot = shared("two").inner_text("footer")
        assert (
            "A, for the smallest K: python -m tracker.pythia --model … --measures coupling,trajectory,matrices" in foot
        )


class TestBetween:
    pytestmark = browser_test

    @pytest.mark.slow
    def test_score_against_coupling_and_sizes(self, shared, several):
        from scipy import stats

        page, last = shared("six"), [tracker.open_results(path).isel(step=-1) for path in several]
        score = [float(ds.score.mean()) for ds in last]
        of = {"blocks": [ds.sizes["layer"] for ds in last], "training tokens": [float(ds.tokens_seen) for ds in last]}
        of |= {name: [ds.attrs[name] for ds in last] for name in ("width", "parameters")}
        page.select_option("#measure", "offdiag_normalized")
        page.select_option("#k", "8")
        for pairs in ("mean_offdiag", "mean"):
            page.select_option("#pairs", pairs)
            above = [null_level(ds, "offdiag_normalized") - ds.offdiag_normalized for ds in last]
            whole = [A.sel(k=8).mean(("prompt", "token")).astype(float).values for A in above]
            couplings = [np.nanmean(off_diagonal(A)) if pairs == "mean_offdiag" else A.mean() for A in whole]
            assert_line(page, "fit", couplings, score)
            assert "Blocks, width and parameters controlled for: R² = " in page.inner_text("#fit-caption")
        assert (
            page.inner_text("#fit-title")
            == "Score against coupling: off-diagonal, normalized, K = 8, all pairs of blocks"
        )
        for name, x in of.items():
            page.select_option("#against", name)
            assert_line(page, "fit", x, score)
            fit, said = stats.linregress(x, score), page.inner_text("#fit-caption")
            assert f"R² = {fit.rvalue**2:.2f} " in said and f"p = {fit.pvalue:.2g}" in said
            assert_line(page, "sizes", x, couplings)

    @pytest.mark.slow
    def test_as_the_figures_have_it(self, shared, several):
        from tracker.figures.model_comparisons import definitions, subsets

        page = shared("six")
        results = {path.name: tracker.open_results(path) for path in several}
        page.select_option("#measure", "offdiag_normalized")
        _, table = score_against_coupling(results, 4)
        dots = [line for line in shown(page, "fit") if line["mode"] == "markers"]
        null_level = np.sqrt(3 / 4)
        np.testing.assert_allclose([line["x"][0] for line in dots], table["coupling, K = 4"] + null_level, rtol=1e-6)
        bars = [line["error_x"]["array"][0] for line in dots]
        np.testing.assert_allclose(bars, table["coupling, K = 4 high"] - table["coupling, K = 4"], atol=1e-6)
        _, table = subsets(results, 4)
        (trace,) = shown(page, "subsets")
        assert trace["y"] == [f"{name} (n = {n})" for name, n in zip(table.subset, table.n, strict=True)]
        np.testing.assert_allclose(trace["x"], table.r2)
        _, table = definitions(results, 0)
        (trace,) = shown(page, "definitions")
        ordered = table.pivot(index=["measure", "pairs"], columns="k", values="r").loc[
            list(dict.fromkeys(zip(table.measure, table.pairs, strict=True)))
        ]
        np.testing.assert_allclose(numbers(trace["z"]), ordered.values)
        assert f"corrected for all {len(MISCOUPLINGS) * 2 * 3} definitions" in page.inner_text("#fit-caption")

    @pytest.mark.slow
    def test_twins_are_averaged_in_a_second_fit(self, open_page, several, tmp_path):
        given = ",".join(f"model{i}={'twins' if i < 2 else i}" for i in range(6))
        page = open_page(write_report(several, tmp_path / "twins.html", given), "#measure=offdiag_normalized")
        results = {
            path.name: tracker.open_results(path).assign_attrs(cluster=str(max(i, 1))) for i, path in enumerate(several)
        }
        for chart in ("fit", "sizes", "subsets"):
            shown(page, chart)
        said = page.inner_text("#fit-caption")
        table = score_against_coupling(results, 4)[1]
        means = table.groupby("cluster").mean(numeric_only=True)
        fit = linear_fit(means["coupling, K = 4"].to_numpy(), means["score"].to_numpy())
        assert (
            f"With clusters averaged, n = 5: R² = {fit['r2']:.2f} ({fit['r2_low']:.2f} to {fit['r2_high']:.2f})" in said
        )
        assert "6 models of 2 architectures: p and intervals treat models as independent" in said
        assert "Clusters averaged in the second fit: model0, model1." in said
        assert "With clusters averaged, n = 5" in page.inner_text("#sizes-caption")
        assert "all, clusters averaged (n = 5)" in shown(page, "subsets")[0]["y"]

    @pytest.mark.slow
    def test_where_nothing_can_be_fitted(self, shared, several, other, tmp_path):
        page = shared("two")
        steps_through(page)
        assert page.is_hidden("#between-results") and "Fits between" not in page.inner_text("footer")
        write_report([*several[:3], other], tmp_path / "unlike.html")
        assert (
            "Fits between results: they were not measured alike, in final norm"
            in (tmp_path / "unlike.html").read_text()
        )
        bare = Store(tmp_path / "bare")
        bare.check_settings({})
        bare.write(1, tracker.open_results(several[0]).isel(step=-1).drop_vars("score").assign_coords(step=1))
        write_report([*several[:3], bare.path], tmp_path / "few.html")
        said = "Fits between results: 3 of 4 results have scores and layer pairs; a fit needs 4"
        assert said in (tmp_path / "few.html").read_text()


def assert_line(page, chart, x, y):
    """A point for each result, and the straight line through them."""
    from scipy import stats

    lines = shown(page, chart)
    dots = [line for line in lines if line["mode"] == "markers"]
    np.testing.assert_allclose([line["x"][0] for line in dots], x, rtol=1e-6)
    np.testing.assert_allclose([line["y"][0] for line in dots], y, rtol=1e-6)
    drawn, fit = named(lines, "linear fit"), stats.linregress(x, y)
    np.testing.assert_allclose(drawn["y"], fit.intercept + fit.slope * numbers(drawn["x"]), rtol=1e-6)


class TestAccess:
    pytestmark = browser_test

    @pytest.mark.slow
    @pytest.mark.parametrize("which", ["one", "two", "six"])
    @pytest.mark.parametrize("width", [1280, 800, 400])
    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_no_serious_fault_and_nothing_cut_off(self, shared, width, theme, which):
        from axe_playwright_python.sync_playwright import Axe

        page = shared(which, viewport=(width, 900), color_scheme=theme)
        page.select_option("#score", "piqa")
        steps_through(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for box in page.evaluate(f"{VISIBLE}.map((c) => c.getBoundingClientRect().toJSON())"):
            assert box["width"] > 250 and box["left"] >= 0 and box["right"] <= width
        serious = [v for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
        assert [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in serious] == []

    @pytest.mark.slow
    def test_every_chart_has_a_name_and_says_what_it_shows(self, page):
        steps_through(page)
        labels = page.evaluate(f"{VISIBLE}.map((c) => [c.id, c.getAttribute('aria-label')])")
        assert len(labels) > 20 and all(label for _, label in labels)
        assert "mean over prompts: " in dict(labels)["coupling"] and " at 2000" in dict(labels)["coupling"]


class TestHonesty:
    pytestmark = browser_test

    @pytest.mark.slow
    def test_doubts_are_named_and_marked(self, page):
        top, foot = page.inner_text("header"), page.inner_text("footer")
        assert "Step 1 is suspect: another shard's weights." in top
        assert "Undefined values, left out of means and quartiles: " in top
        assert named(shown(page, "coupling"), "mean over prompts")["marker"]["symbol"] == [
            "circle",
            "x-open",
            "circle",
            "circle",
        ]
        for said in (
            "final norm\tinclude",
            "miscoupling: ",
            "lss: ",
            "certified by Cholesky",
            "sdpa",
            "relative error",
        ):
            assert said in foot

    @pytest.mark.slow
    def test_onset_is_no_more_precise_than_the_steps(self, open_page, tmp_path):
        """Mis-coupling falls from its null level between steps 64 and 1,024, in prompts of two sources."""
        store = Store(generated(tmp_path / "run", (0, 8, 64, 1024, 4096), layers=3, prompts=4))
        fallen, noise = {1024: 0.2, 4096: 0.4}, np.random.default_rng(0)
        for step in store.steps():
            unit = store.read(step)
            for name in MISCOUPLINGS:
                by_prompt = 1e-4 * noise.standard_normal(4) - fallen.get(step, 0)
                level = null_level(unit, name) + xr.DataArray(by_prompt, dims="prompt")
                unit[name] = level.where(unit["layer"] != unit["layer_other"], 0).transpose(*unit[name].dims)
            store.write(step, unit.assign_coords(prompt_source=("prompt", ["a", "a", "b", "b"])))
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        said = page.inner_text("#coupling-caption")
        words = "between steps 64 and 1,024 (95 % interval over prompts of 2 sources: 64 to 1,024)"
        assert f"Onset: {words}." in said
        page.select_option("#measure", "offdiag_normalized")
        shown(page, "coupling")
        bands = page.evaluate("document.getElementById('coupling').layout.shapes.map((shape) => [shape.x0, shape.x1])")
        assert bands == [[64, 1024], [64, 1024]]
        assert page.inner_text("#coupling-caption").endswith(f"Onset: {words}.")
        figure, table = draw("1b", {"run": tracker.open_results(store.path)}, 4)
        label = figure.axes[0].get_legend().get_texts()[-1].get_text()
        assert label.replace("\n", " ") == f"onset: {words}"
        assert (table.onset_after == 64).all() and (table.onset_by == 1024).all()

    @pytest.mark.slow
    def test_an_onset_before_the_first_step_is_drawn_from_step_0(self, open_page, tmp_path):
        store = Store(generated(tmp_path / "run", (64, 128, 256), layers=3, prompts=4))
        for step in store.steps():
            unit = store.read(step)
            level = null_level(unit, "miscoupling") - 0.3
            unit["miscoupling"] = level.where(unit["layer"] != unit["layer_other"], 0).transpose(
                *unit["miscoupling"].dims
            )
            store.write(step, unit)
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        shown(page, "coupling")
        said = page.inner_text("#coupling-caption")
        assert "Onset: at or before step 64, the first measured (95 % interval over prompts: 0 to 64)." in said
        axis = page.evaluate("document.getElementById('coupling')._fullLayout.xaxis")
        assert axis["ticktext"][:2] == ["0", "64"] and 10 ** axis["range"][0] <= axis["tickvals"][0] == 32
        bands = page.evaluate("document.getElementById('coupling').layout.shapes.map((shape) => [shape.x0, shape.x1])")
        assert bands == [[32, 64], [32, 64]]

    @pytest.mark.slow
    def test_fallbacks_and_certificates(self, tmp_path):
        store = Store(generated(tmp_path / "run", (0, 5), layers=3))
        for step in (0, 5):
            unit = store.read(step)
            for name in ("diagnostics_sliced", "diagnostics_complete"):
                unit[name][0, 0, 2] = 0
            unit["diagnostics_formed"][0, 0, 1] = 0
            unit.attrs["fallbacks"] = '{"3": "value differs by 0.1"}'
            store.write(step, unit)
        said = write_report(store.path, tmp_path / "page.html").read_text()
        assert "Fallback: 2 of 18 Jacobians, of block 3, were taken over the full sequence" in said
        assert "(value differs by 0.1)" in said and "Probabilistic: 2 of 18 Jacobians" in said
        assert "Incomplete: 2 of 18 sets" in said

    @pytest.mark.slow
    @pytest.mark.parametrize("measures", ["coupling", "trajectory", "tokenwise"])
    def test_results_of_one_measure_at_one_step(self, open_page, tmp_path, measures):
        store = Store(tmp_path / "run")
        store.check_settings({"callback": "coupling"})
        unit = tracker.measure(neox(), tokens(2), k=4, measures=measures, pair_tokens=3)
        store.write(7, unit.assign_coords(step=7))
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        steps_through(page)
        visible = page.evaluate("[...document.querySelectorAll('figure')].filter(f => !f.hidden).map(f => f.id)")
        assert visible and ("coupling-figure" in visible) == (measures == "coupling")
        assert ("lss-figure" in visible) == (measures == "trajectory")
        assert "1 checkpoint at step 7" in page.inner_text("header")
        assert page.is_disabled("#step")

    @pytest.mark.slow
    def test_one_block(self, open_page, tmp_path):
        page = open_page(write_report(generated(tmp_path / "run", (0, 5), layers=1), tmp_path / "page.html"))
        steps_through(page)
        visible = page.evaluate("[...document.querySelectorAll('figure')].filter(f => !f.hidden).map(f => f.id)")
        assert "singular-figure" in visible and "matrix-figure" not in visible and "coupling-figure" not in visible
        assert "pairs of layers: one block was measured" in page.inner_text("footer")


class TestSize:
    pytestmark = browser_test

    @pytest.mark.slow
    def test_large_arrays_are_thinned_and_the_page_says_so(self, open_page, tmp_path, monkeypatch):
        monkeypatch.setattr("tracker.report.contents.ABSOLUTE", 4 * 36 * 16)
        path = generated(tmp_path / "run", range(9), matrices=True)
        page = open_page(write_report(path, tmp_path / "page.html"), "#step=4&l=1&m=2")
        shown(page, "absolute")
        assert page.inner_text("#absolute-title").endswith("step 3, the last carried before 4")
        assert "at 4 or more of 9 steps" in page.inner_text("footer")
        A = abs(tracker.open_results(path).matrix).mean(("prompt", "token")).sel(step=3, layer=1, layer_other=2).values
        np.testing.assert_allclose(numbers(shown(page, "absolute")[0]["z"]), A, atol=np.ptp(A) / 500)

    @pytest.mark.slow
    def test_12b_opens_within_three_seconds_and_twenty_megabytes(self, open_page, tmp_path):
        path = generated(tmp_path / "12b", PYTHIA_STEPS, 36, (10, 30, 50), 2, matrices=True)
        file = write_report(path, tmp_path / "page.html")
        assert file.stat().st_size < 20_000_000
        usable = []
        for _ in range(3):
            page = open_page(file)
            page.wait_for_function("performance.getEntriesByName('usable').length")
            usable.append(page.evaluate("performance.getEntriesByName('usable')[0].startTime"))
            page.close()
        print(f"{file.stat().st_size / 1e6:.1f} MB, usable after {min(usable):.0f} ms")
        assert min(usable) < 3000


class TestCommandLine:
    @pytest.mark.slow
    def test_one_store_and_several(self, results, other, tmp_path, capsys):
        assert main([str(results), "--out", str(tmp_path / "page.html")]) == 0
        assert 4_000_000 < (tmp_path / "page.html").stat().st_size < 7_000_000
        assert main([str(results), str(other)]) == 2
        assert "2 directories of results make one page; say where it goes: --out page.html" in capsys.readouterr().err
        assert main([str(results), str(results), "--out", str(tmp_path / "page.html")]) == 2
        assert "is given twice" in capsys.readouterr().err
        assert main([str(results)]) == 0 and (results / "report.html").is_file()

    def test_bad_input(self, other, tmp_path, capsys):
        assert main([str(tmp_path / "nothing")]) == 2
        assert "give a walk's --out directory" in capsys.readouterr().err
        assert main([str(other), "--out", str(tmp_path)]) == 2
        assert "is a directory; name the file" in capsys.readouterr().err
        damaged = shutil.copytree(other, tmp_path / "damaged")
        Store(damaged).file(4).write_bytes(b"\x89HDF no more")
        assert main([str(damaged), "--out", str(tmp_path / "page.html")]) == 2
        assert "step00000004.nc can't be read" in capsys.readouterr().err and not (tmp_path / "page.html").exists()

    def test_the_package_loads_neither_torch_nor_xarray(self):
        code = "import sys, tracker.report; sys.exit('torch' in sys.modules or 'xarray' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

    @pytest.mark.slow
    def test_read_unit_by_unit_gives_the_same_numbers(self, results):
        from tracker.report.write import Reader

        assert contents(Reader().read(results)) == contents(reduced(tracker.open_results(results)))
