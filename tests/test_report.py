"""The page in a real headless Chromium, opened from a file."""

import os
import shutil

import numpy as np
import pytest

import tracker
from tests.models import neox, tokens
from tracker.report import main, page_data, write_report
from tracker.results import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and "REQUIRE_BROWSER" not in os.environ,
        reason="no Chromium on the PATH (Debian: apt-get install chromium)",
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A store of four steps of a random model, one with a Jacobian of zero."""
    import torch

    store = Store(tmp_path_factory.mktemp("store") / "toy")
    store.settle({"model": "toy"})
    for step in (0, 1, 8, 2000):
        torch.manual_seed(step)
        model = neox()
        if step == 8:
            with torch.no_grad():
                for name, parameter in model.gpt_neox.layers[1].named_parameters():
                    if "dense." in name or "dense_4h_to_h" in name:
                        parameter.zero_()
        unit = tracker.measure(model, tokens(3), k=[4, 8])
        store.write(step, unit.assign_coords(step=step, commit=f"{step:040x}", revision=f"step{step}"))
    return store.path


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, results, tmp_path):
    """The opened page; at the end: nothing was logged to the console, nothing asked of the network."""
    file = write_report(results, tmp_path / "page.html")
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    said, asked = [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(file.as_uri())
    yield opened
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    opened.close()


def shown_matrix(page):
    return np.array(page.evaluate("document.getElementById('matrix').data[0].z"), dtype=float)


def off_diagonal(matrix):
    return np.where(np.eye(len(matrix)), np.nan, matrix)


class TestInBrowser:
    pytestmark = browser_test

    def test_the_slider_changes_the_matrix_by_mouse_and_by_keyboard(self, page, results):
        ds = tracker.open_results(results)
        expected = ds.miscoupling.sel(k=4).mean(("prompt", "token")).values
        np.testing.assert_array_equal(shown_matrix(page), off_diagonal(expected[3]))
        assert page.inner_text("#step-shown") == "2,000"
        page.locator("#step").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        np.testing.assert_array_equal(shown_matrix(page), off_diagonal(expected[1]))
        assert page.inner_text("h2 .at-step") == "1"
        page.locator("#step").fill("0")
        np.testing.assert_array_equal(shown_matrix(page), off_diagonal(expected[0]))

    def test_the_choices_change_the_charts(self, page, results):
        ds = tracker.open_results(results)
        page.select_option("#measure", "offdiag_normalized")
        page.select_option("#k", "8")
        page.select_option("#pairs", "mean_adjacent")
        np.testing.assert_array_equal(
            shown_matrix(page),
            off_diagonal(ds.offdiag_normalized.sel(k=8).isel(step=3).mean(("prompt", "token")).values),
        )
        title = page.evaluate("document.getElementById('coupling').layout.title.text")
        assert title == "offdiag_normalized, K = 8, adjacent"
        drawn = page.evaluate("document.getElementById('coupling').data[2].y")
        assert drawn == page_data(ds)["curves"]["offdiag_normalized"][8]["mean_adjacent"]["value"]

    @pytest.mark.parametrize("width", [1280, 400])
    def test_it_fits_the_window(self, page, width):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}", timeout=5000)
        for chart in ("coupling", "matrix", "distance", "singular", "lss_window", "expodistance_window"):
            box = page.locator(f"#{chart} .main-svg").first.bounding_box()
            assert box and box["width"] > 250 and box["x"] >= 0 and box["x"] + box["width"] <= width

    def test_the_foot_tells_settings_and_what_is_undefined(self, page):
        foot = page.inner_text("footer")
        for said in ("final norm\tinclude", "miscoupling: ", "lss: ", "certified by Cholesky", "sdpa"):
            assert said in foot


def test_undefined_values_are_null_on_the_page(results):
    data = page_data(tracker.open_results(results))
    assert [median is None for median in data["trajectory"]["lss"]["median"]] == [False, False, True, False]
    assert data["steps"] == [0, 1, 8, 2000]


def test_command_line(results, tmp_path, capsys):
    assert main([str(results), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    assert main([str(tmp_path / "nothing")]) == 2
    assert "give a walk's --out directory" in capsys.readouterr().err
