"""The summary: its numbers against means over the Dataset, its intervals, steps and results side by side."""

import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

import tracker
from tests.models import neox, tokens
from tests.stores import generated
from tracker.analysis.reduction import reduced
from tracker.analysis.summary import summary_of_reduced
from tracker.common.errors import UsageError
from tracker.store import Store, open_results

STEPS = [0, 64, 512, 4096]


def blocks_2_and_4(ds):
    return ((ds.layer == 2) & (ds.layer_other == 4)) | ((ds.layer == 4) & (ds.layer_other == 2))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store whose coupling is largest at step 512, most between blocks 2 and 4."""
    path = generated(tmp_path_factory.mktemp("summary") / "toy", STEPS, layers=5, prompts=6)
    for step, factor in zip(STEPS, (1.0, 0.9, 0.5, 0.8), strict=True):
        unit = Store(path).read(step)
        unit["miscoupling"] = unit["miscoupling"] * factor
        unit["miscoupling"] = unit["miscoupling"].where(~blocks_2_and_4(unit), 0.1 * factor)
        Store(path).write(step, unit)
    return path


def coupling(ds, name, k, where):
    """Return null level minus mis-coupling of each prompt, from its definition."""
    gain = tracker.null_level(ds, name) - ds[name].astype(float)
    return gain.sel(k=k).where(where).mean(("token", "layer", "layer_other")).values


def interval(values):
    return stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))


def assert_ends(row, expected):
    np.testing.assert_allclose(row[["low", "high"]].astype(float), expected, rtol=1e-5)


def test_numbers_and_intervals_of_one_measurement():
    ds = tracker.measure(neox(), tokens(5), k=[2, 4])
    table = tracker.summary(ds)
    apart, near = ds.layer != ds.layer_other, abs(ds.layer - ds.layer_other) == 1
    for name in ("miscoupling", "offdiag_normalized"):
        for words, where in {"all pairs": apart, "neighbours": near}.items():
            by_prompt, row = coupling(ds, name, 2, where), table.loc[name, words]
            assert row.value == pytest.approx(float(ds[name].sel(k=2).where(where).mean()), rel=1e-6)
            assert row.null_level - row.value == row.coupling == pytest.approx(by_prompt.mean(), rel=1e-5)
            assert_ends(row, interval(by_prompt))
    for name in ("lss", "expodistance", "alpha_mean"):
        by_prompt, row = ds[name].median("position").values, table.loc[name, "median of tokens"]
        assert row.value == pytest.approx(by_prompt.mean(), rel=1e-6) and np.isnan(row.null_level)
        assert_ends(row, interval(by_prompt))
    assert tracker.summary(ds, k=4).loc["miscoupling", "all pairs"].value != table.loc["miscoupling", "all pairs"].value
    assert "5 samples, K = 2" in repr(table) and "95 % interval over prompts" in repr(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an index that is not sorted
        table.loc["miscoupling", "neighbours"]
    assert "<table" in table._repr_html_() and type(table.loc["miscoupling"]) is pd.DataFrame


def test_a_store_is_summarised_at_its_first_best_and_last_step(store):
    table = tracker.summary(store)
    assert table.loc["miscoupling", "all pairs"].index.tolist() == ["0", "512", "4,096"]
    ds = open_results(store)
    assert "blocks 2 and 4" in table.index.get_level_values("of")
    for step in ("0", "512", "4,096"):
        unit = ds.sel(step=int(step.replace(",", "")))
        expected = coupling(unit, "miscoupling", 4, unit.layer != unit.layer_other).mean()
        assert table.loc["miscoupling", "all pairs", step].coupling == pytest.approx(expected, rel=1e-6)
        both = blocks_2_and_4(unit)
        pair = table.loc["miscoupling", "blocks 2 and 4", step]
        assert pair.coupling == pytest.approx(coupling(unit, "miscoupling", 4, both).mean(), rel=1e-6)
        assert pair.value == pytest.approx(float(unit.miscoupling.sel(k=4).where(both).mean()), rel=1e-6)
        assert np.isnan(pair.low)
    assert "the first, the most coupled and the last of 4 steps" in table.attrs["title"]
    assert any(
        "Blocks 2 and 4 have the largest coupling by miscoupling at step 512" in note for note in table.attrs["notes"]
    )
    for other in (tracker.summary(ds), tracker.summary(Store(store)), summary_of_reduced({"": reduced(ds)})):
        pd.testing.assert_frame_equal(pd.DataFrame(other), pd.DataFrame(table), rtol=1e-6)


def test_results_side_by_side(store, tmp_path):
    other = generated(tmp_path / "other", [10], layers=5, prompts=6, seed=1)
    table = tracker.summary([store, other])
    assert table.loc["lss", "median of tokens"].index.tolist() == ["toy", "other", "other − toy"]
    first, second = open_results(store).isel(step=-1), open_results(other).isel(step=-1)
    differences = second.lss.median("position").values - first.lss.median("position").values
    row = table.loc["lss", "median of tokens", "other − toy"]
    assert_ends(row, interval(differences))
    # With other prompts, and another number of them, the interval is Welch's.
    fewer = second.isel(prompt=slice(4)).assign_attrs(inputs_sha256="others")
    table = tracker.summary({"a": first, "b": fewer})
    row = table.loc["lss", "median of tokens", "b − a"]
    samples = [ds.lss.median("position").values for ds in (fewer, first)]
    expected = stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    assert_ends(row, [expected.low, expected.high])
    assert any("The results differ in inputs" in note for note in table.attrs["notes"])


def test_names_of_results_in_a_list(store):
    ds = tracker.measure(neox(), tokens(2), k=4)
    results = tracker.summary([ds, ds]).index.get_level_values("result")
    first = "GPTNeoXForCausalLM (1)"
    assert set(results) == {first, "GPTNeoXForCausalLM (2)", f"GPTNeoXForCausalLM (2) − {first}"}
    assert set(tracker.summary([ds, store]).index.get_level_values("result")) > {"GPTNeoXForCausalLM", store.name}


def test_prompts_of_several_sources_and_one_prompt():
    ds = tracker.measure(neox(), tokens(6), k=2)
    grouped = ds.assign_coords(prompt_source=("prompt", list("aabbcc")))
    alone, clustered = (tracker.summary(of).loc["lss", "median of tokens"] for of in (ds, grouped))
    means = ds.lss.median("position").values.reshape(3, 2).mean(1)
    assert_ends(clustered, interval(means))
    assert clustered.value == pytest.approx(alone.value)
    one = tracker.summary(ds.isel(prompt=[0]))
    assert one[["low", "high"]].isna().all(axis=None) and "There are no intervals" in repr(one)


def test_coupled_blocks_are_said_to_be_and_unrelated_ones_not(store):
    notes = tracker.summary(store).attrs["notes"]
    assert any(
        "pairs of blocks (miscoupling) " in note and "above 0 for" in note and "step 512" in note for note in notes
    )
    untrained = tracker.measure(neox(layers=6), tokens(2), k=2)
    assert any("not above 0 beyond chance" in note for note in tracker.summary(untrained).attrs["notes"])


def test_what_can_not_be_summarised(tmp_path):
    ds = tracker.measure(neox(), tokens(2), k=2)
    for given, message in (
        (lambda: tracker.summary(ds, k=3), "K = 3 was not measured; choose from 2"),
        (lambda: tracker.summary({}), "no results"),
        (lambda: tracker.summary(ds[["norm"]]), "no mis-couplings and no paths"),
    ):
        with pytest.raises(UsageError, match=message):
            given()
    with pytest.raises(FileNotFoundError, match="no results in"):
        tracker.summary(tmp_path)
    paths = tracker.summary(tracker.measure(neox(), tokens(2), measures="trajectory"))
    assert paths.index.get_level_values("measure").tolist() == ["lss", "expodistance", "alpha_mean"]
    assert isinstance(tracker.summary(xr.merge([ds])), pd.DataFrame)


def test_doubts_about_a_step_are_noted_for_a_store_and_for_its_dataset(tmp_path):
    store = Store(generated(tmp_path / "toy", (0, 8, 64)))
    for step, ids, suspect in ((0, "a", ""), (8, "a", ""), (64, "b", "another step's weights")):
        unit = store.read(step).assign_attrs(token_ids_sha256=ids)
        store.write(step, unit.assign_coords(suspect=suspect, revision=f"step{step}"))
    ds = open_results(store.path)
    expected = {
        "Step 64 is suspect: another step's weights.",
        "The prompts have other token ids at step 64 than at the other steps: the tokenizers of the checkpoints differ, and so "
        "results differ for another reason than the weights.",
    }
    for results in (store, ds):
        assert expected <= set(tracker.summary(results).attrs["notes"])
    older = store.read(64)
    del older.attrs["token_ids_sha256"]  # as of a model without token ids
    store.write(64, older)
    assert not any("token ids" in note for note in tracker.summary(store).attrs["notes"])
