"""Clusters of results that are not independent, in tables, in figures and on the page."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.support.stores import stored, unit
from tracker.analysis.across_models import (
    assign_clusters,
    cluster_labels,
    compare_models,
    independence_note,
)
from tracker.analysis.reduction import reduced
from tracker.analysis.regression import holm
from tracker.figures import drawing
from tracker.figures.__main__ import main
from tracker.figures.selection import draw
from tracker.report.write import main as report
from tracker.store import open_results

NAMES = "70m 70m-deduped 160m 160m-deduped 410m 1b 1b-seed3".split()
LABELS = "70m 70m 160m 160m 410m 1b 1b".split()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Seven Pythias of four sizes."""
    place = tmp_path_factory.mktemp("variants")
    for i, name in enumerate(NAMES):
        size = sorted(set(LABELS)).index(LABELS[i])
        attributes = {
            "suite": f"pythia-{name}",
            "parameters": 1000 * (size + 1) ** 2,
            "width": 64 * (size + 1),
        }
        stored(place / name, {1: unit(1, 3 + size, (4,), 5, False, i, **attributes)})
    return [place / name for name in NAMES]


@pytest.fixture(scope="module")
def results(stores):
    return {path.name: open_results(path) for path in stores}


@pytest.mark.slow
def test_variants_of_one_model_are_recognised_by_name_and_sizes(results):
    assert cluster_labels(results).tolist() == LABELS
    ds = results["70m"]
    named = {
        "a": ds.assign_attrs(suite="", model_name="EleutherAI/pythia-70m-deduped"),
        "b": ds.assign_attrs(suite="", model_name="/models/Pythia-70m_seed-2/"),
        "decoupled seeds": ds.assign_attrs(suite="pythia-70m-weight-seed1"),
        "another size": ds.assign_attrs(parameters=3),
        "another class": ds.assign_attrs(model_class="x.Y"),
        "reseeded": ds.assign_attrs(suite="", model_name="pythia-reseeded-70m"),
        "nameless": ds.assign_attrs(suite="", model_name=""),
        "nameless too": ds.assign_attrs(suite="", model_name=""),
    }
    assert cluster_labels(named).tolist() == ["a", "a", "a", *list(named)[3:]]


@pytest.mark.parametrize("wrong", ["70m", "9b=x", "70m="])
def test_clusters_that_can_not_be_given(results, wrong):
    with pytest.raises(ValueError, match=re.escape(f"--clusters {wrong}: ")):
        assign_clusters(results, wrong)


def compared(results):
    return compare_models({name: reduced(ds) for name, ds in results.items()})


def means(values):
    return pd.Series(np.asarray(values, float)).groupby(LABELS, sort=False).mean().to_numpy()


@pytest.mark.slow
def test_figures_also_fit_the_means_of_clusters(results, monkeypatch):
    monkeypatch.setattr(drawing, "FEWEST_POINTS", 4)
    figure, table = draw("1a", results, 4)
    assert table["cluster"].tolist() == LABELS
    coupling, score = table["coupling by eq. 14, K = 4"], table["score"]
    fit = stats.linregress(means(coupling), means(score))
    averaged = f"clusters averaged (n = 4):\nR² = {fit.rvalue**2:.2f} ["
    title = figure.axes[0].get_title()
    assert averaged in title and f"p = {fit.pvalue:.2g}" in title
    notes = [draw(name, results, 4)[0].get_supxlabel().replace("\n", " ") for name in ("1a", "35")]
    assert "70m, 70m-deduped" in notes[0] and "treat models as independent" in notes[1]
    _, table = draw("table4", results, 4)
    assert table.subset.tolist()[:2] == ["all", "all, clusters averaged"]
    assert table.n.tolist()[:2] == [7, 4]
    assert table.p[1] == pytest.approx(fit.pvalue)


@pytest.mark.slow
def test_the_page_has_both_fits(results):
    found = compared(results)
    assert found["independence"] == independence_note(results)
    by_pairs = [of_k.values() for one in found["coupling"].values() for of_k in one.values()]
    every = [one["fit"] for of_pairs in by_pairs for one in of_pairs]
    corrected = holm(np.array([fit["p"] for fit in every]))
    np.testing.assert_allclose([fit["p_holm"] for fit in every], corrected)
    at = found["coupling"]["offdiag_normalized"][4]["mean_offdiag"]
    last = [reduced(ds).isel(step=-1).sel(k=4, pairs="mean_offdiag") for ds in results.values()]
    np.testing.assert_allclose(at["values"], [ds.offdiag_normalized_coupling for ds in last])
    fit = stats.linregress(means(at["values"]), means(found["score"]))
    assert at["fit"]["averaged"]["p"] == pytest.approx(fit.pvalue) and at["fit"]["n"] == 7
    whole = stats.linregress(at["values"], found["score"])
    found_line = at["fit"]["p"], at["fit"]["intercept"]
    assert found_line == pytest.approx((whole.pvalue, whole.intercept))
    assert at["controlled"]["averaged"]["n"] == 4
    assert at["subsets"]["subset"][1] == "all, clusters averaged"
    fit = stats.linregress(means(found["sizes"]["width"]), means(at["values"]))
    assert at["size_fits"]["width"]["averaged"]["p"] == pytest.approx(fit.pvalue)


@pytest.mark.slow
def test_all_fits_are_undefined_where_the_coupling_of_one_result_is(results):
    unknown = results | {"1b": results["1b"].assign(miscoupling=results["1b"].miscoupling * np.nan)}
    at = compared(unknown)["coupling"]["miscoupling"][4]["mean"]
    assert at["values"].count(None) == 1
    fits = at["fit"], at["controlled"], at["size_fits"]["width"]
    undefined = [of["r2"] for fit in fits for of in (fit, fit["averaged"])]
    assert undefined + at["subsets"]["r2"][:2] == [None] * 8


@pytest.mark.slow
def test_clusters_on_the_command_lines(stores, tmp_path, capsys):
    given = "70m=a, 70m-deduped=b, 410m=c, 1b=c"
    paths = list(map(str, stores))
    assert main(["1a", *paths, "--out", str(tmp_path), "--clusters", given]) == 0
    table = pd.read_csv(tmp_path / "1a.csv")
    assert table.cluster.tolist() == "a b 160m 160m c c 1b-seed3".split()
    assert report([*paths, "--out", str(tmp_path / "page.html"), "--clusters", given]) == 0
    said = "Clusters averaged in the second fit: 160m, 160m-deduped; 410m, 1b."
    assert said in (tmp_path / "page.html").read_text()
    wrong = ["--clusters", "7b=x"]
    assert main(["1a", *paths, *wrong]) == report([*paths, *wrong, "--out", "x"]) == 2
    assert capsys.readouterr().err.count("is not NAME=CLUSTER with one of 70m, 70m-deduped") == 2
