"""The summary: its numbers against means over the Dataset, its intervals, steps and results side by side."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from scipy import stats

import tracker
from tests.support.coverage import assert_covers
from tests.support.models import Size, neox, tokens
from tests.support.refused import refused
from tests.support.stores import generated
from tracker.analysis.reduction import reduced
from tracker.analysis.summary import Cell, summary_of_reduced
from tracker.report.contents import contents
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


def welch(first, second):
    ends = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    return [ends.low, ends.high]


def interval_of_median(ds, name, clusters=None):
    """Woodruff's, of shares below the median and percentiles, which `test_reduction` compares with their definitions."""
    unit = reduced(ds)
    shares = unit[f"{name}_below"].values
    if clusters is not None:
        shares = np.array([shares[clusters == one].mean() for one in np.unique(clusters)])
    ends = 0.5 + np.array(interval(shares - shares.mean()))
    return np.interp(ends, np.arange(101) / 100, unit[f"{name}_percentiles"])


def assert_ends(row, expected):
    np.testing.assert_allclose(row[["low", "high"]].astype(float), expected, rtol=1e-5)


def test_numbers_and_intervals_of_one_measurement():
    ds = tracker.measure(neox(), tokens(5), k=[2, 4])
    table = tracker.summary(ds)
    apart, near = ds.layer != ds.layer_other, abs(ds.layer - ds.layer_other) == 1
    for name in ("miscoupling", "offdiag_normalized"):
        for words, where in {"all pairs": apart, "neighbours": near}.items():
            by_prompt, row = coupling(ds, name, 2, where), table.loc[name, words]
            value = float(ds[name].sel(k=2).where(where).mean())
            assert row.value == pytest.approx(value, rel=1e-6)
            assert row.null_level - row.value == row.coupling
            assert row.coupling == pytest.approx(by_prompt.mean(), rel=1e-5)
            assert_ends(row, interval(by_prompt))
    for name in ("lss", "expodistance", "alpha_mean"):
        row = table.loc[name, "median of tokens"]
        assert row.value == pytest.approx(np.nanmedian(ds[name]), rel=1e-6)
        assert np.isnan(row.null_level)
        assert_ends(row, interval_of_median(ds, name))
    assert tracker.summary(ds, k=4).value.iloc[0] != table.value.iloc[0]
    assert "5 samples, K = 2" in repr(table) and "95 % interval of the coupling" in repr(table)
    assert set(table.over) == {"samples"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an index that is not sorted
        table.loc["miscoupling", "neighbours"]
    assert "<table" in table._repr_html_() and type(table.loc["miscoupling"]) is pd.DataFrame


def test_a_store_is_summarised_at_its_first_and_last_step(store):
    table, ds = tracker.summary(store), open_results(store)
    rows = table.loc["miscoupling", "all pairs"]
    assert rows.index.tolist() == ["0", "4,096"]
    for row, step in zip(rows.coupling, (0, 4096), strict=True):
        unit = ds.sel(step=step)
        expected = coupling(unit, "miscoupling", 4, unit.layer != unit.layer_other).mean()
        assert row == pytest.approx(expected, rel=1e-6)
    assert contents(reduced(ds))["most_coupled"]["miscoupling"][4] == (2, 4)
    assert "the first and the last of 4 steps" in table.attrs["title"]
    highest = tracker.summary(store, step=512)
    value = highest.coupling["miscoupling", "all pairs", "512"]
    said = f"At step 512 it was highest, by the first definition, with {value:.3f}."
    assert table.attrs["finding"].endswith(said)
    assert "highest" not in highest.attrs["finding"]
    with refused("step 9 of toy was not measured; choose from 0, 64, 512, 4096"):
        tracker.summary(store, step=9)
    parts = tracker.summary(ds.assign_coords(step=ds.step / 8192))
    assert [at for *_, at in parts.index] == [
        {"0": "0.0", "4,096": "0.5"}[at] for *_, at in table.index
    ]
    for other in (
        tracker.summary(ds),
        tracker.summary(Store(store)),
        summary_of_reduced({"": reduced(ds)}),
    ):
        pd.testing.assert_frame_equal(pd.DataFrame(other), pd.DataFrame(table), rtol=1e-6)


def test_results_side_by_side(store, tmp_path):
    other = generated(tmp_path / "other", [10], layers=5, prompts=6, seed=1)
    table = tracker.summary([store, other])
    assert table.loc["lss", "median of tokens"].index.tolist() == ["toy", "other", "other − toy"]
    assert table.attrs["title"] == "toy, other, the last step of each (4,096, 10); K = 4"
    first, second = (open_results(path).isel(step=-1) for path in (store, other))
    coupled = [coupling(ds, "miscoupling", 4, ds.layer != ds.layer_other) for ds in (first, second)]
    row = table.loc["miscoupling", "all pairs", "other − toy"]
    assert_ends(row, interval(coupled[1] - coupled[0]))
    row = table.loc["lss", "median of tokens", "other − toy"]
    medians = [np.nanmedian(ds.lss) for ds in (first, second)]
    assert row.value == pytest.approx(medians[1] - medians[0], rel=1e-5)
    assert row.low < row.value < row.high and row.answer == ""
    named = tracker.summary([first.drop_vars("step"), second.drop_vars("step")])
    assert named.attrs["title"] == "Generated (1), Generated (2), the last step of each; K = 4"
    # With other prompts, and another number of them, the interval is Welch's.
    fewer = second.isel(prompt=slice(4)).assign_attrs(inputs_sha256="others")
    table = tracker.summary({"a": first, "b": fewer})
    row = table.loc["miscoupling", "all pairs", "b − a"]
    assert_ends(row, welch(coupled[0], coupled[1][:4]))
    assert row.over == "prompts"
    sources = fewer.assign_coords(prompt_source=("prompt", list("aabb")))
    row = tracker.summary({"a": first, "b": sources}).loc["miscoupling", "all pairs", "b − a"]
    assert row.over == "2 clusters of prompts and prompts"
    assert any("The results differ in inputs" in note for note in table.attrs["notes"])


def test_recipes_are_said_to_be_highest_at_an_earlier_step(tmp_path):
    steps = [0, 8, 16]
    runs = [generated(tmp_path / str(seed), steps, prompts=2, seed=seed) for seed in range(4)]
    table = tracker.summary({"a": runs[:2], "b": runs[2:]})
    listed = []
    for name, (first, second) in {"a": runs[:2], "b": runs[2:]}.items():
        of_runs = (tracker.curves(run).miscoupling_coupling for run in (first, second))
        mean = (sum(of_runs) / 2).isel(k=0).sel(pairs="mean_offdiag")
        listed.append(f"{name} {mean.max().item():z.3f} at step {mean.idxmax().item():.0f}")
    assert f"The highest coupling: {', '.join(listed)}. " in table.attrs["finding"]
    Store(runs[0]).file(8).write_bytes(b"no results")
    table = tracker.summary(runs[0])
    assert "At which step coupling is highest is not known: " in table.attrs["notes"][-1]


def test_recipes_are_compared_over_their_runs(tmp_path):
    runs = [generated(tmp_path / str(seed), [8], seed=seed) for seed in range(6)]
    each = [tracker.summary(run) for run in runs]
    table = tracker.summary({"a": runs[:3], "b": runs[3:5], "c": runs[5]})
    for *at, column in (
        ("miscoupling", "all pairs", "coupling"),
        ("lss", "median of tokens", "value"),
    ):
        a, b, c = np.split([one.loc[tuple(at), column] for one in each], [3, 5])
        rows, means = table.loc[tuple(at)], np.array([a.mean(), b.mean(), *c])
        assert rows[column].tolist() == pytest.approx([*means, *means[1:] - means[0]])
        assert_ends(rows.loc["a"], interval(a))
        assert_ends(rows.loc["b − a"], welch(a, b))
        assert rows.over.tolist() == ["3 runs", "2 runs", "", "2 runs and 3 runs", ""]
    said, alone = repr(table), repr(tracker.summary({"a": [runs[0]], "b": [runs[1]]}))
    assert "holds for these prompts alone. A recipe of one run has none" in said
    for words in ("holds for these weights alone", "Two runs of one recipe differ", "above 0"):
        assert words in alone and words not in said


def test_intervals_over_runs_cover():
    random, inside = np.random.default_rng(0), []
    for _ in range(1000):
        samples = random.standard_normal(5), 3 * random.standard_normal(4)
        one, other = (Cell(-runs.mean(), 0, runs, None, "run") for runs in samples)
        rows = one.row(), other.row_of_difference(one, False)
        inside.append([low < 0 < high for *_, low, high, _, _ in rows])
    for of_mean_or_difference in np.transpose(inside):
        assert_covers(of_mean_or_difference)


def course(store, change: float, by_eq_14: float) -> xr.Dataset:
    """Return two steps, between which coupling changes by so much, in each definition, with noise of blocks and prompts."""
    unit, random = open_results(store).isel(step=0, drop=True), np.random.default_rng(0)
    steps = []
    for share in (0, 1):
        moved = unit.copy()
        for name, by in (("miscoupling", change), ("offdiag_normalized", by_eq_14)):
            noise = 0.01 * random.standard_normal(unit[name].shape)
            moved[name] = tracker.null_level(unit, name) - 0.1 - by * share + noise
        steps.append(moved)
    return xr.concat(steps, xr.Variable("step", [0, 8]), coords="minimal", compat="override")


@pytest.mark.parametrize(
    "change, by_eq_14, said",
    [
        (0.3, 0.2, ("Coupling rises from", "coupling by eq. 14 rises from")),
        (-0.3, -0.2, ("Coupling falls from", "coupling by eq. 14 falls from")),
        (
            0.3,
            0,
            (
                "Coupling rises from",
                "coupling by eq. 14 goes from",
                "; no change beyond chance over pairs of blocks).",
            ),
        ),
        (0, -0.2, ("Coupling goes from", "; no change beyond chance over", "eq. 14 falls from")),
        (0.3, -0.2, ("rises", "falls", "The definitions disagree: report both")),
    ],
)
def test_the_last_line_says_whether_coupling_rises(store, change, by_eq_14, said):
    ds = course(store, change, by_eq_14)
    table = tracker.summary(ds)
    assert table.attrs["title"].endswith("; the first and the last of 2 steps")
    last = repr(table).splitlines()[-1]
    assert all(words in last for words in said) and last == table.attrs["finding"]
    assert ("disagree" in last) == (change * by_eq_14 < 0)
    first, second = (
        coupling(ds.sel(step=step), "miscoupling", 4, ds.layer != ds.layer_other) for step in (0, 8)
    )
    low, high = interval(second - first)
    ends = f"from {first.mean():.3f} to {second.mean():.3f} (by {(second - first).mean():z.3f}"
    assert f"{ends} [{low:z.3f}, {high:z.3f}] over prompts, these weights alone" in last
    assert tracker.summary(ds.isel(step=[0])).attrs["finding"] == ""


@pytest.mark.slow
def test_untrained_steps_are_rarely_said_to_rise_or_fall():
    """Two untrained models in place of two steps: each verdict one-sided at 2.5 %."""
    units, verdicts = [], []
    for seed in range(21):
        torch.manual_seed(seed)
        ds = tracker.measure(neox(size=Size(depth=4)), tokens(3), k=4, measures="coupling")
        units.append(ds.assign_coords(step=seed))
    for pair in zip(units, units[1:], strict=False):
        finding = tracker.summary(xr.concat(pair, "step", combine_attrs="override"))
        verdicts.append(finding.attrs["finding"].split("; ")[0].split()[1])
    assert sum(verdict in ("rises", "falls") for verdict in verdicts) <= 3, verdicts


def test_an_interval_above_0_beside_another_answer_is_explained():
    """The interval is over prompts, the test also over pairs of blocks, here two couplings that differ."""
    ds = tracker.measure(neox(), tokens(4), k=2, measures="coupling")
    values = ds.miscoupling_level.values.copy()
    values[..., 0, 1] -= 0.5  # one pair alone is coupled, in all prompts alike
    told = tracker.summary(ds.assign(miscoupling=ds.miscoupling.copy(data=values)))
    row = told.loc["miscoupling", "all pairs"]
    explained = [note for note in told.attrs["notes"] if note.startswith("Where low is above 0")]
    assert row.low > 0 and row.answer == "not above 0" and len(explained) == 1
    assert "Where low" not in repr(
        tracker.summary(ds.assign(miscoupling=ds.miscoupling_level - 0.3))
    )


def test_no_number_is_minus_zero():
    ds = tracker.measure(neox(), tokens(2), k=2, measures="coupling")
    assert " -0.000" not in repr(
        tracker.summary(ds.assign(miscoupling=ds.miscoupling_level + 1e-6))
    )


def test_prompts_of_several_sources_and_one_prompt():
    ds = tracker.measure(neox(), tokens(6), k=2)
    grouped = ds.assign_coords(prompt_source=("prompt", list("aabbcc")))
    row = tracker.summary(grouped).loc["lss", "median of tokens"]
    assert_ends(row, interval_of_median(ds, "lss", np.array(list("aabbcc"))))
    assert row.over == "3 clusters of samples"
    said = "Equal samples, and those of one source, are a cluster."
    assert said in repr(tracker.summary({"alone": ds, "grouped": grouped}))
    assert said not in repr(tracker.summary(ds))
    for alike in (ds.isel(prompt=[0]), ds.isel(prompt=[0, 0])):  # one, and two that are equal
        one = tracker.summary(alike)
        assert one[["low", "high"]].isna().all(axis=None)
        assert "There are no intervals, since they are over independent samples" in repr(one)
        assert "low and high" not in repr(one) and "a t test over the pairs of blocks." in repr(one)
        assert "low and high" in repr(tracker.summary({"one": alike, "all": ds}))


def test_a_median_moves_with_the_shares_below_it_by_the_slope_of_the_quantiles():
    """The slope is taken over a percentile to both sides if the shares do not differ: here 3, and 100 beyond."""
    shares = np.arange(101) / 100
    away = np.abs(shares - 0.5)
    quantiles = np.sign(shares - 0.5) * (
        3 * np.minimum(away, 0.01) + 100 * np.maximum(away - 0.01, 0)
    )
    alike, apart = np.full(4, 0.1), np.array([0.1, 0.1, -0.1, -0.1])
    linear = lambda below: Cell(0.0, np.nan, below, None, "prompt", quantiles).linear()  # noqa: E731
    np.testing.assert_allclose(linear(alike), -3 * alike)
    error = stats.sem(apart)
    slope = (3 * 0.01 + 100 * (error - 0.01)) / error
    np.testing.assert_allclose(linear(apart), -slope * apart)


def test_an_untrained_store_and_a_coupled_one_have_an_answer_for_each_definition(store):
    table = tracker.summary(store)
    assert table.answer["miscoupling", "all pairs"].tolist() == ["above 0"] * 2
    unit = open_results(store).isel(step=0)
    noise = 1 + 0.1 * np.random.default_rng(0).standard_normal((5, 5))
    level, name = tracker.null_level(unit, "offdiag_normalized"), "offdiag_normalized"
    for share, expected in ((1, "not above 0"), (0.9, "above 0")):
        assert answer(unit.assign({name: share * level * noise}), name) == expected
    assert set(table.drop("all pairs", level="of").answer) == {""}
    said = "One in 40 untrained models whose blocks have independent weights passes it by chance."
    assert said in repr(table)
    for changed in (
        {"equal_blocks": "equal weights: 1 2"},
        {"equal_blocks": "one module: 1 2"},
    ):
        assert "One in 40" not in repr(tracker.summary(unit.assign_attrs(changed)))


def answer(ds, name="miscoupling"):
    return tracker.summary(ds).loc[name, "all pairs"].answer


def test_where_there_is_no_test():
    ds = tracker.measure(neox(size=Size(depth=4)), tokens(3), k=2)
    assert answer(ds) in ("above 0", "not above 0")
    two = tracker.measure(neox(size=Size(depth=2)), tokens(3), k=2)
    assert answer(two) == "no test: 1 pair of blocks"
    assert "answer:" not in repr(tracker.summary(two))
    steps = xr.concat([two, two], xr.Variable("step", [0, 1]), combine_attrs="drop_conflicts")
    finding = tracker.summary(steps).attrs["finding"]
    assert finding.startswith("Coupling goes from") and "no test: 1 pair of blocks)" in finding
    one_module = ds.assign_attrs(equal_blocks="one module: 1 2 3 4")
    assert answer(one_module) == "no test: the blocks are one module"
    post_norm = tracker.summary(ds.assign_attrs(post_norm=1))
    assert post_norm.loc["miscoupling", "all pairs"].answer == "no test: post-norm"
    assert "untrained blocks of this model are not at the null level" in repr(post_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        undefined = ds.assign({name: ds[name] * np.nan for name in ("miscoupling", "lss")})
        table = tracker.summary(undefined)
        tracker.summary({"a": undefined, "b": undefined})
    assert answer(undefined) == table.loc["lss", "median of tokens"].answer == "undefined"
    assert table.over.iloc[0] == ""


def test_paths_alone_are_summarised_from_what_is_reduced(store):
    ds = open_results(store)
    paths = ds[[name for name in ds.data_vars if name.startswith(("lss", "expodistance"))]]
    table, expected = summary_of_reduced({"toy": reduced(paths)}), tracker.summary(ds)
    assert table.index.get_level_values("measure").unique().tolist() == ["lss", "expodistance"]
    pd.testing.assert_frame_equal(table.loc["lss"], expected.loc["lss"], check_categorical=False)


def test_what_can_not_be_summarised(tmp_path):
    ds = tracker.measure(neox(), tokens(2), k=2)
    for given, message in (
        (lambda: tracker.summary(ds, k=3), "K = 3 was not measured; choose from 2"),
        (lambda: tracker.summary({"a": []}), "no results"),
        (lambda: tracker.summary([[ds]]), "list is no result; .* take the runs of recipes"),
        (
            lambda: tracker.summary({"a": [ds, ds]}),
            r"\(1\) and .* \(2\) of a have the same numbers",
        ),
        (
            lambda: tracker.summary({"a": [ds, ds.assign_attrs(blocks="x")], "b": ds}),
            r"the runs of a differ in blocks \(",
        ),
        (lambda: tracker.summary(ds[["norm"]]), "no mis-couplings and no paths"),
    ):
        with refused(message):
            given()
    with pytest.raises(FileNotFoundError, match="no results in"):
        tracker.summary(tmp_path)


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
