"""The page in a real headless Chromium, opened from a file."""

import shutil
import subprocess
import sys
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pytest

import tracker
from checkpoints import nano
from checkpoints.fetch import cached_snapshot
from checkpoints.load import load
from tests.conftest import ROOT
from tests.support.browser import CHROMIUM, browser_test
from tests.support.models import neox, tokens
from tests.support.stores import generated, stored, unit
from tracker.analysis.curves import curves
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import read_reduced, reduced
from tracker.analysis.regression import FEWEST_POINTS
from tracker.figures.selection import draw as draw_figure
from tracker.measures.registry import BY_NAME, MISCOUPLINGS, VARIANTS, headline_names
from tracker.report.contents import contents
from tracker.report.write import main, write_report
from tracker.store import Store, distinct_names

TO_16_BITS = {"rtol": 1e-4}  # what the page promises of its matrices
VISIBLE = "[...document.querySelectorAll('.chart')].filter((c) => c.offsetParent)"
PATIENCE = 300_000  # milliseconds
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
        unit = unit.assign_coords(
            task=["piqa"], step=step, commit=f"{step:040x}", revision=f"step{step}"
        )
        store.write(
            step, unit.assign_coords(suspect="another shard's weights" if step == 1 else "")
        )
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
            made = unit(
                step, 3 + i % 3, (4, 8), 3, False, i, model_class=f"tests.{'AB'[i > 3]}", **sizes
            )
            rated = ("prompt", [3.0, 1, 4])
            store.write(step, made.assign_coords(tokens_seen=step * 2**i, difficulty=rated))
        paths.append(store.path)
    return paths


@pytest.fixture(scope="module")
def written(results, other, several, tmp_path_factory):
    """A function that writes the page of one store, that of two, or that of enough to compare models, once each."""
    directory = tmp_path_factory.mktemp("pages")
    stores = {"one": results, "two": [results, other], "six": several}
    return cache(lambda which: write_report(stores[which], directory / f"{which}.html"))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


def recorded(browser, url):
    """Open a page; return it, and a list of what it says on the console and asks of the network."""
    page, said = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(url)
    return page, said


def assert_silent(said):
    """Assert that a page logged nothing to the console and asked nothing of the network."""
    assert [line for line in said if not line.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture
def open_page(browser):
    """Opens pages, which stay silent."""
    opened = []

    def open_page(file, fragment=""):
        opened.append(recorded(browser, f"{file.as_uri()}{fragment}"))
        return opened[-1][0]

    yield open_page
    for page, said in opened:
        page.close()
        assert_silent(said)


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
            pages[which] = recorded(browser, written(which).as_uri())
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
        assert_silent(said)


@pytest.fixture
def page(shared):
    return shared("one")


def draw(page, chart):
    """Scroll a chart into sight and wait until it is drawn as chosen."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    page.wait_for_function("(id) => seen.has(id) && !stale.has(id)", arg=chart)


def shown(page, chart):
    """The traces of a chart."""
    draw(page, chart)
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
    for chart in page.evaluate(f"{VISIBLE}.map((c) => c.id)"):
        draw(page, chart)


class TestNumbers:
    """What the page shows is what the store holds."""

    pytestmark = browser_test

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
        assert [name for name, _ in decoded[:2]] == list(VARIANTS[:2]) and len(decoded) == 2 * len(
            VARIANTS
        )
        for name, by_k in decoded:
            for k, values in by_k:
                of, level, _ = name.partition("/level")
                whole = (null_level(ds, of) if level else ds[of]).sel(k=int(k))
                stored = whole.astype(float).mean(("prompt", "token")).values
                stored = (
                    stored
                    if of.endswith("_vju")
                    else np.stack([off_diagonal(matrix) for matrix in stored])
                )
                np.testing.assert_allclose(
                    numbers(values).reshape(stored.shape), stored, **TO_16_BITS
                )
        for name in MISCOUPLINGS:
            carried = page.evaluate("(name) => data.models[0].curves[name]", name)
            for k in (4, 8):
                for pairs in ("mean", "mean_offdiag", "mean_adjacent"):
                    for part, of in {
                        "value": name,
                        "null": f"{name}_null",
                        "q25": f"{name}_q25",
                    }.items():
                        expected = points[of].sel(k=k, pairs=pairs).values
                        np.testing.assert_array_equal(
                            numbers(carried[str(k)][pairs][part]), expected
                        )

    def test_by_distance_by_depth_and_by_prompt(self, page, results):
        whole = tracker.open_results(results)
        ds, points = whole.isel(step=3), curves(whole).sel(k=4, pairs="mean_offdiag")
        matrix = ds.miscoupling.sel(k=4).astype(float).mean(("prompt", "token")).values
        rings = [[*np.diagonal(matrix, r), *np.diagonal(matrix, -r)] for r in range(1, len(matrix))]
        above = (null_level(ds, "miscoupling") - ds.miscoupling).sel(k=4)
        above = above.where(above.layer != above.layer_other)
        windows = ds.equidistance_window.median(("prompt", "position")).values
        assert not np.isfinite(windows).all()  # depths at which no window fits are left out
        step = "step 2,000"
        expected = {
            ("distance", step): [*map(np.mean, rings)],
            ("singular", "s1"): ds.singular_value.sel(rank=1).median(("prompt", "token")),
            ("norm", step): ds.norm.median(("prompt", "position")),
            ("entropy", step): ds.entropy.median(("prompt", "position")),
            ("equidistance_window", step): windows[np.isfinite(windows)],
            ("prompts", "prompts"): above.mean(("token", "layer", "layer_other")),
            ("prompts", "unrelated blocks"): [0, 0],
            ("scatter", "a point a step"): points.miscoupling_null - points.miscoupling,
            ("noise", "after block 1"): ds.noise_similarity.sel(depth=1).mean(
                ("prompt", "position")
            ),
        }
        for (chart, name), values in expected.items():
            exact = {"atol": 1e-6} if chart == "prompts" else {"rtol": 1e-6}
            drawn = numbers(named(shown(page, chart), name)["y"])
            np.testing.assert_allclose(
                drawn, values, **(TO_16_BITS if chart == "distance" else exact), err_msg=chart
            )

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
        blocks = page.eval_on_selector_all(
            "#block option", "(options) => options.map((option) => option.value)"
        )
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

    def test_undefined_values_are_gaps(self, page, results):
        lines = shown(page, "lss")
        assert [value is None for value in named(lines, "median")["y"]] == [
            False,
            False,
            True,
            False,
        ]
        (band,) = [line for line in lines if line.get("fill") == "toself"]
        assert band["x"].count(None) == 2  # a piece before the gap, and one after
        data = contents(reduced(tracker.open_results(results)))
        assert [median is None for median in data["trajectory"]["lss"]["median"]] == [
            False,
            False,
            True,
            False,
        ]

    @pytest.mark.parametrize("which", ["one", "six"])
    def test_every_chart_gives_its_numbers_as_one_table_with_named_columns(self, shared, which):
        page = shared(which)
        visible = page.evaluate(
            "[...document.querySelectorAll('figure')].filter((f) => !f.hidden).map((f) => f.id)"
        )
        assert len(visible) > 10
        names = set()
        for figure in visible:
            name, table = downloaded(page, figure)
            names.add(name)
            assert (
                len(table)
                and table.shape[1] > 2
                and not any("Unnamed" in column for column in table)
            ), name
            assert not {"x", "y", "z", "value", "series"} & set(table), name
            assert table.notna().any().all(), (
                f"{name} has an empty column: {table.columns[table.isna().all()]}"
            )
            words = {"model", "measure", "pairs", "subset", "prompt", "out_words", "in_words"}
            assert all(
                dtype.kind in "if" for column, dtype in table.dtypes.items() if column not in words
            ), name
            for column, part in (("model", ""), ("measure", ""), ("k", "K"), ("step", "step")):
                values = table[column].unique() if column in table else []
                assert len(values) != 1 or f"_{part}{values[0]}".replace("/", "-") in name, name
            title = page.text_content(f"#{figure} h3")
            measures = set(table.get("measure", ())) & set(VARIANTS)
            if len(measures) == 1:  # a saved picture has the title, and not the choices
                assert BY_NAME[measures.pop()].label.lower() in title.lower(), title
        assert len(names) == len(visible), "no file replaces another"

    def test_the_numbers_of_a_table_are_the_stores(self, page, results):
        ds = tracker.open_results(results)
        stored = curves(ds).sel(k=4, pairs="mean_offdiag")
        name, table = downloaded(page, "coupling-figure")
        assert name == "coupling_GPTNeoXForCausalLM_miscoupling_K4_steps0-2000.csv"
        assert (
            table.columns.tolist()
            == "model measure k pairs step mean q25 q75 null_level coupling".split()
        )
        assert table.step.tolist() == [0, 1, 8, 2000]
        parts = {
            "mean": "",
            "q25": "_q25",
            "q75": "_q75",
            "null_level": "_null",
            "coupling": "_coupling",
        }
        for column, of in parts.items():
            np.testing.assert_allclose(table[column], stored[f"miscoupling{of}"])
        page.select_option("#score", "piqa")
        assert (
            downloaded(page, "coupling-figure")[1].piqa.tolist() == ds.score.values[:, 0].tolist()
        )
        at = {"k": 4, "step": 2000}
        name, table = downloaded(page, "matrix-figure")
        assert name == "matrix_GPTNeoXForCausalLM_miscoupling_K4_step2000.csv"
        mean, level = (
            values.sel(at).mean(("prompt", "token")).values
            for values in (ds.miscoupling, null_level(ds, "miscoupling"))
        )
        L = len(mean)
        assert table[["layer", "layer_other"]].values.tolist() == [
            [i // L + 1, i % L + 1] for i in range(L * L)
        ]
        np.testing.assert_allclose(
            table["mean"].values.reshape(L, L), off_diagonal(mean), **TO_16_BITS
        )
        np.testing.assert_allclose(
            table["null_level"].values.reshape(L, L), off_diagonal(level), **TO_16_BITS
        )
        name, table = downloaded(page, "graph-figure")
        assert len(table) == L * (L - 1) / 2
        name, table = downloaded(page, "norm-figure")
        assert name == "norm_GPTNeoXForCausalLM_norm_step2000.csv" and table.depth.tolist() == list(
            range(L + 1)
        )
        quartiles = (
            ds.norm.sel(step=2000).quantile([0.25, 0.5, 0.75], ("prompt", "position")).values
        )
        np.testing.assert_allclose(table[["q25", "median", "q75"]].values.T, quartiles, rtol=1e-6)
        page.select_option("#kind", "fixed_output")
        page.select_option("#block", "1")
        name, table = downloaded(page, "token_matrix-figure")
        assert name == "token_matrix_GPTNeoXForCausalLM_fixed_output_miscoupling_K4_step2000.csv"
        of_pairs = ds.fixed_output_miscoupling.sel(at).sel(layer=1).mean("prompt").values
        np.testing.assert_allclose(
            table["mean"].values.reshape(of_pairs.shape), of_pairs, **TO_16_BITS
        )
        assert (
            set(zip(table.layer, table.layer_other, strict=True)) == {(1, 2)}
            and 6 in table.token_other.values
        )
        name, table = downloaded(page, "token_absolute-figure")
        A = abs(ds.fixed_output_matrix) / ds.fixed_output_singular_value.sel(rank=1)
        A = A.sel(layer=1, step=2000).mean("prompt").values
        np.testing.assert_allclose(table.absolute.values.reshape(A.shape), A, atol=np.ptp(A) / 100)

    def test_one_number_has_one_name_in_summary_curves_figures_page_and_wandb(
        self, suite, tmp_path, open_page
    ):
        """The coupling of nano by the paper's equation 14."""
        measure, step, k = "offdiag_normalized", 8, 4
        texts = ["import os", "The function raises", "for name in sorted(names):"]
        units = {}
        for at in (0, step):
            model, tokenizer = load(cached_snapshot(nano.REPO, f"step{at}", suite))
            units[at] = tracker.measure(model, texts, tokenizer=tokenizer, k=k).assign_coords(
                step=at
            )
        store = stored(tmp_path / "nano", units)
        ds, unit = tracker.open_results(store), units[step]
        expected = (
            (null_level(unit, measure) - unit[measure]).sel(k=k).mean(("prompt", "token")).values
        )
        expected = float(np.nanmean(off_diagonal(expected)))
        (metric,) = [name for name in headline_names(k) if f"{measure}_coupling" in name]
        points = curves(ds)[f"{measure}_coupling"].sel(k=k, pairs="mean_offdiag")
        drawn = {name: draw_figure(name, {"nano": ds}, k)[1] for name in ("1b", "1c", "9")}
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        page.select_option("#measure", measure)
        of_page = downloaded(page, "coupling-figure")[1].set_index("step")["coupling"]
        edges = drawn["1c"].query("step == @step")
        found = {
            "summary": tracker.summary(unit).loc[(measure, "all pairs"), "coupling"],
            "curves": points.sel(step=step),
            "figure 1b": drawn["1b"].set_index("step")["coupling"][step],
            "figure 1c": edges["coupling"].mean(),
            "figure 9": drawn["9"]["coupling"].mean(),
            "page": of_page[step],
            "page, prompts": downloaded(page, "prompts-figure")[1]["coupling"].mean(),
            "page, graph": downloaded(page, "graph-figure")[1]["coupling"].mean(),
            "W&B": tracker.scalars(unit)[metric],
        }
        for name, value in found.items():
            assert float(value) == pytest.approx(expected, abs=2e-5), name


def downloaded(page, figure):
    """The name of the CSV that a figure offers, and the table that pandas reads from it."""
    # What is drawn while a button is clicked may move it
    shown(page, figure.removesuffix("-figure"))
    with page.expect_download() as download:
        page.locator(f"#{figure} button.csv").click()
    return download.value.suggested_filename, pandas.read_csv(download.value.path())


class TestFirstLook:
    """What coupling is, what was measured, and every chart's title are in the page before anything is drawn."""

    pytestmark = browser_test

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
        ink, width = page.evaluate(
            "[$('coupling').layout.font.color, $('coupling')._fullLayout.width]"
        )
        assert ink != "#1a1d21" and width > 1000, "afterwards it is as before"


class TestChoices:
    pytestmark = browser_test

    def test_a_pair_is_picked_by_click_by_keyboard_and_by_number(self, page, results):
        ds = tracker.open_results(results)
        stored = ds.miscoupling.sel(k=4).astype(float).mean(("prompt", "token"))
        L = ds.sizes["layer"]

        def assert_picked(l, m):
            history = shown(page, "history")
            drawn, level = named(history, "mean over prompts"), named(history, "null level")
            of = stored.sel(layer=l, layer_other=m).values if l != m else np.zeros(4)
            np.testing.assert_allclose(numbers(drawn["y"]), of, **TO_16_BITS)
            null = (
                null_level(ds, "miscoupling")
                .sel(k=4, layer=l, layer_other=m)
                .mean(("prompt", "token"))
                .values
            )
            if l != m:
                np.testing.assert_allclose(numbers(level["y"]), null, **TO_16_BITS)
            assert drawn["customdata"] == [0, 1, 8, 2000]
            A = (
                abs(ds.matrix)
                .mean(("prompt", "token"))
                .isel(step=3)
                .sel(layer=l, layer_other=m)
                .values
            )
            np.testing.assert_allclose(
                numbers(shown(page, "absolute")[0]["z"]), A, atol=np.ptp(A) / 500
            )
            said = page.inner_text("#picked")
            assert said.startswith(
                f"Block {l} in the basis of block {m}" if l != m else f"Block {l} in its own basis"
            )

        last = (
            (null_level(ds, "miscoupling") - ds.miscoupling)
            .sel(k=4)
            .isel(step=3)
            .mean(("prompt", "token"))
        )
        both = last.values + last.values.T
        both[np.tril_indices(L)] = -np.inf
        opened = np.unravel_index(both.argmax(), both.shape)
        assert_picked(*(int(i) + 1 for i in opened))
        shown(page, "matrix")
        box = page.locator("#matrix .nsewdrag").bounding_box()
        page.mouse.click(
            box["x"] + box["width"] * 0.5 / L, box["y"] + box["height"] * (L - 0.5) / L
        )
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

    def test_tab_goes_through_everything_in_order(self, open_page, written):
        page, reached = open_page(written("one")), []
        for _ in range(200):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
                )
            )
        links, controls = ["A"] * 6, ["measure", "k", "pairs", "score", "axis", "last", "step"]
        first = ["skip", "theme", "A", "SUMMARY", "doubts", *links, *controls, "csv"]
        assert reached[: len(first)] == first
        assert (
            reached.index("l")
            < reached.index("m")
            < reached.index("matrix")
            < reached.index("kind")
        )
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "training"


class TestSaving:
    """Charts as pictures."""

    pytestmark = browser_test

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_chart_is_saved_as_png_and_svg(self, shared, scheme):
        page = shared("one", color_scheme=scheme)
        for chart in ("coupling", "matrix"):
            shown(page, chart)
            title = page.inner_text(f"#{chart}-title")
            for kind in ("png", "svg"):
                with page.expect_download() as download:
                    page.locator(f"#{chart}-figure button.{kind}").click()
                name = download.value.suggested_filename
                content = download.value.path().read_bytes()
                assert name.startswith(
                    f"{chart}_GPTNeoXForCausalLM_miscoupling_K4_step"
                ) and name.endswith(kind)
                if kind == "svg":
                    text = content.decode()
                    assert (
                        title.split(":")[0] in text
                        and f"{'20, 23, 27' if scheme == 'dark' else '255, 255, 255'}" in text
                    )
                else:
                    picture = plt.imread(download.value.path(), "png")
                    assert picture.shape[0] > 1000 and picture[..., 3].min() == 1, (
                        "large, and on the page's colour"
                    )
                    colours = (
                        (255 * picture).astype(np.uint8).view(np.uint32)
                    )  # sorting rows takes seconds
                    assert len(np.unique(colours)) > 20
        assert page.locator("#used-figure button.png").count() == 0, "a table is no picture"

    @pytest.mark.parametrize("width", [1280, 400])
    def test_what_a_picture_shows_is_where_it_is_on_the_page(self, shared, width):
        """Every cell of the matrix is at its ticks, and the title is within the picture."""
        page = shared("one", viewport=(width, 900))
        shown(page, "matrix")
        with page.expect_download() as download:
            page.locator("#matrix-figure button.png").click()
        picture = plt.imread(download.value.path(), "png")
        left, top, cell, L, height = page.evaluate("""() => {
          const { xaxis, yaxis, height } = $("matrix")._fullLayout, L = model().layers;
          return [xaxis._offset, yaxis._offset, xaxis._length / L, L, height];
        }""")
        scale = 3
        above = picture.shape[0] / scale - height
        assert 20 < above < 90, "the title"
        near = [-0.4, 0, 0.4]
        for l, m in np.ndindex(L, L):
            xs, ys = (
                [scale * (start + (i + 0.5 + by) * cell) for by in near]
                for start, i in ((left, m), (top + above, l))
            )
            colours = np.array([picture[int(y), int(x), :3] for x in xs for y in ys])
            assert (colours == 1).all() == (l == m), (l, m)
        title = picture[: int(scale * above)]
        ink = np.flatnonzero((title[..., :3] < 0.5).all(-1).any(0))
        assert 0 < ink.min() and ink.max() < picture.shape[1] - 3


class TestSteps:
    """The axis of training steps."""

    pytestmark = browser_test

    def test_it_says_where_it_is_logarithmic_and_the_last_step_has_a_tick(self, page):
        def axis():
            shown(page, "coupling")
            return page.evaluate(
                """() => {
                  const { xaxis } = $("coupling").layout;
                  return [xaxis.type, xaxis.title.text, xaxis.ticktext];
                }"""
            )

        assert axis() == ["log", "training step (log scale)", ["0", "8", "2,000"]]
        page.select_option("#axis", "linear")
        assert axis() == ["linear", "training step", ["0", "500", "1,000", "1,500", "2,000"]]

    def test_it_is_linear_for_evenly_spaced_steps(self, open_page, tmp_path):
        store = generated(tmp_path / "even", range(0, 250, 20), layers=9, ks=(4,))
        page = open_page(write_report(store, tmp_path / "page.html"))
        shown(page, "coupling")
        layout = page.evaluate("() => $('coupling').layout.xaxis")
        assert layout["type"] == "linear" and layout["title"]["text"] == "training step"
        assert layout["ticktext"] == ["0", "50", "100", "150", "200", "240"]
        assert page.input_value("#axis") == "linear"
        draw(page, "singular")
        assert "R² = " in page.inner_text("#singular-fit"), "nine blocks"

    def test_no_fit_over_depth_of_few_blocks(self, page):
        names = [line["name"] for line in shown(page, "singular")]
        assert "fit of 1 / s₁" not in names
        assert (
            page.inner_text("#singular-fit").strip()
            == "1 / s₁ against depth: n = 3: fewer than 8 points, no fit."
        )


class TestSeveral:
    pytestmark = browser_test

    def test_curves_stand_together_and_the_chooser_changes_the_rest(self, shared, results, other):
        page = shared("two")
        names = distinct_names([results, other])
        assert names[0] != names[1] and page.locator("#model option").all_inner_texts() == names
        stored = [
            curves(tracker.open_results(path)).sel(k=4, pairs="mean_offdiag")
            for path in (results, other)
        ]
        lines = shown(page, "coupling")
        for name, points in zip(names, stored, strict=True):
            assert named(lines, name)["y"] == points.miscoupling.values.tolist()
            assert (
                named(lines, f"{name}, null level")["y"] == points.miscoupling_null.values.tolist()
            )
        looks = [
            (named(lines, name)["line"]["color"], named(lines, name)["line"]["dash"])
            for name in names
        ]
        assert looks[0][0] != looks[1][0] and looks[0][1] != looks[1][1]
        page.select_option("#model", "1")
        assert len(shown(page, "matrix")[0]["z"]) == 8 and page.inner_text("#step-shown") == "64"
        (line,) = [line["name"] for line in shown(page, "history") if "null" not in line["name"]]
        assert line == names[1]  # the other has as many blocks only by chance: it has not


class TestBetween:
    pytestmark = browser_test

    def test_score_against_coupling_and_sizes(self, shared, several):
        from scipy import stats

        page, last = shared("six"), [tracker.open_results(path).isel(step=-1) for path in several]
        score = [float(ds.score.mean()) for ds in last]
        of = {
            "blocks": [ds.sizes["layer"] for ds in last],
            "training tokens": [float(ds.tokens_seen) for ds in last],
        }
        of |= {name: [ds.attrs[name] for ds in last] for name in ("width", "parameters")}
        page.select_option("#measure", "offdiag_normalized")
        page.select_option("#k", "8")
        for pairs in ("mean_offdiag", "mean"):
            page.select_option("#pairs", pairs)
            page.evaluate(f"data.texts.fewest = {FEWEST_POINTS}; refresh()")
            assert [line["name"] for line in shown(page, "fit")] == [
                path.name for path in several
            ], "points alone"
            said = page.inner_text("#fit-caption")
            assert said.startswith("n = 6: fewer than 8 points, no fit.") and "R²" not in said
            assert not any(any(line.get("x", [])) for line in shown(page, "subsets"))
            assert not any(shown(page, "definitions")[0]["text"][0])
            page.evaluate("data.texts.fewest = 4; refresh()")
            above = [null_level(ds, "offdiag_normalized") - ds.offdiag_normalized for ds in last]
            whole = [A.sel(k=8).mean(("prompt", "token")).astype(float).values for A in above]
            couplings = [
                np.nanmean(off_diagonal(A)) if pairs == "mean_offdiag" else A.mean() for A in whole
            ]
            assert_line(page, "fit", couplings, score)
            assert "Blocks, width and parameters controlled for: R² = " in page.inner_text(
                "#fit-caption"
            )
        assert (
            page.inner_text("#fit-title")
            == "Score against coupling: mis-coupling, eq. 14, K = 8, all pairs of blocks"
        )
        for name, x in of.items():
            page.select_option("#against", name)
            assert_line(page, "fit", x, score)
            fit, said = stats.linregress(x, score), page.inner_text("#fit-caption")
            assert f"R² = {fit.rvalue**2:.2f} " in said and f"p = {fit.pvalue:.2g}" in said
            assert_line(page, "sizes", x, couplings)

    def test_where_nothing_can_be_fitted(self, several, tmp_path):
        bare = stored(
            tmp_path / "bare",
            {1: tracker.open_results(several[0]).isel(step=-1).drop_vars("score")},
        )
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
    np.testing.assert_allclose(
        drawn["y"], fit.intercept + fit.slope * numbers(drawn["x"]), rtol=1e-6
    )


class TestAccess:
    pytestmark = browser_test

    @pytest.mark.parametrize(
        "which, width, theme",
        [
            ("one", 1280, "light"),
            ("one", 400, "dark"),
            ("two", 1280, "dark"),
            ("six", 400, "light"),
        ],
    )
    def test_no_serious_fault_and_nothing_cut_off(self, shared, width, theme, which):
        from axe_playwright_python.sync_playwright import Axe

        page = shared(which, viewport=(width, 900), color_scheme=theme)
        page.select_option("#score", "piqa")
        steps_through(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for box in page.evaluate(f"{VISIBLE}.map((c) => c.getBoundingClientRect().toJSON())"):
            assert box["width"] > 250 and box["left"] >= 0 and box["right"] <= width
        serious = [
            v
            for v in Axe().run(page).response["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in serious] == []


class TestHonesty:
    pytestmark = browser_test

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

    def test_fallbacks_and_certificates(self, tmp_path):
        store = Store(generated(tmp_path / "run", (0, 5), layers=3))
        for step in (0, 5):
            unit = store.read(step)
            for name in ("diagnostics_sliced", "diagnostics_complete"):
                unit[name][0, 0, 2] = 0
            unit.attrs["fallbacks"] = '{"3": "value differs by 0.1"}'
            store.write(step, unit)
        said = write_report(store.path, tmp_path / "page.html").read_text()
        assert "Fallback: 2 of 18 Jacobians, of block 3, were taken over the full sequence" in said
        assert "(value differs by 0.1)" in said
        assert "Incomplete: 2 of 18 sets" in said

    @pytest.mark.parametrize("measures", ["coupling", "trajectory", "tokenwise"])
    def test_results_of_one_measure_at_one_step(self, open_page, tmp_path, measures):
        unit = tracker.measure(neox(), tokens(2), k=4, measures=measures, pair_tokens=3)
        store = stored(tmp_path / "run", {7: unit}, callback="coupling")
        page = open_page(write_report(store.path, tmp_path / "page.html"))
        steps_through(page)
        visible = page.evaluate(
            "[...document.querySelectorAll('figure')].filter(f => !f.hidden).map(f => f.id)"
        )
        assert visible and ("coupling-figure" in visible) == (measures == "coupling")
        assert ("lss-figure" in visible) == (measures == "trajectory")
        assert "1 checkpoint at step 7" in page.inner_text("header")
        assert page.is_disabled("#step")


class TestSize:
    pytestmark = browser_test

    def test_large_arrays_are_thinned_and_the_page_says_so(self, open_page, tmp_path, monkeypatch):
        monkeypatch.setattr("tracker.report.contents.ABSOLUTE", 4 * 36 * 16)
        path = generated(tmp_path / "run", range(9), matrices=True)
        page = open_page(write_report(path, tmp_path / "page.html"), "#step=4&l=1&m=2")
        shown(page, "absolute")
        assert page.inner_text("#absolute-title").endswith("step 3, the last carried before 4")
        assert "at 4 or more of 9 steps" in page.inner_text("footer")
        A = (
            abs(tracker.open_results(path).matrix)
            .mean(("prompt", "token"))
            .sel(step=3, layer=1, layer_other=2)
            .values
        )
        np.testing.assert_allclose(
            numbers(shown(page, "absolute")[0]["z"]), A, atol=np.ptp(A) / 500
        )


class TestCommandLine:
    @pytest.mark.slow
    def test_one_store_and_several(self, results, other, tmp_path, capsys):
        assert main([str(results), "--out", str(tmp_path / "page.html")]) == 0
        assert 4_000_000 < (tmp_path / "page.html").stat().st_size < 7_000_000
        assert main([str(results), str(other)]) == 2
        assert (
            "2 directories of results make one page; say where it goes: --out page.html"
            in capsys.readouterr().err
        )
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
        assert (
            "step00000004.nc is damaged" in capsys.readouterr().err
            and not (tmp_path / "page.html").exists()
        )

    def test_the_package_loads_neither_torch_nor_xarray(self):
        code = "import sys, tracker.report; sys.exit('torch' in sys.modules or 'xarray' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

    @pytest.mark.slow
    def test_read_unit_by_unit_gives_the_same_numbers(self, results):
        assert contents(read_reduced(results)) == contents(reduced(tracker.open_results(results)))
