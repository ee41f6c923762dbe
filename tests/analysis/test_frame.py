"""Tidy tables: values, positions, null levels, and what is refused."""

import numpy as np
import pytest

import tracker
from tests.support.models import neox, padded, tokens
from tests.support.refused import refused


@pytest.fixture(scope="module")
def ds():
    return tracker.measure(neox(), padded(8, 5), k=[2, 4], tokens=[1, -1])


def test_a_row_for_each_pair_of_blocks(ds):
    table = tracker.to_frame(ds)
    expected = [
        "prompt",
        "token",
        "token_position",
        "k",
        "layer",
        "layer_other",
        "miscoupling",
        "miscoupling_null",
    ]
    assert table.columns.tolist() == expected and len(table) == ds.miscoupling.size
    levels = tracker.null_level(ds, "miscoupling")
    for row in table.sample(20, random_state=0).itertuples():
        at = {name: getattr(row, name) for name in ds.miscoupling.dims}
        assert row.miscoupling == ds.miscoupling.sel(at)
        assert row.token_position == ds.token_position.sel(token=row.token, prompt=row.prompt)
        assert row.miscoupling_null == pytest.approx(float(levels.sel(at)), rel=1e-6)
    assert sorted(set(table.token_position)) == [1, 4, 7]


def test_positions_that_a_shorter_prompt_lacks_are_left_out(ds):
    table = tracker.to_frame(ds, ["lss", "expodistance"])
    assert table.groupby("prompt").position.max().tolist() == [7, 4] and len(table) == 13
    np.testing.assert_array_equal(table[table.prompt == 0].lss, ds.lss[0])
    assert tracker.to_frame(ds, "norm").columns.tolist() == ["prompt", "position", "depth", "norm"]


def test_selected_coordinates_stay(ds):
    table = tracker.to_frame(
        ds.sel(k=4).expand_dims(step=[64]).isel(step=0), "miscoupling", null=False
    )
    assert set(table.k) == {4} and set(table.step) == {64} and "miscoupling_null" not in table


def test_token_pairs_have_two_positions():
    ds = tracker.measure(neox(), tokens(1), k=2, measures="tokenwise", pair_tokens=[0, 2, -1])
    table = tracker.to_frame(ds, "self_miscoupling")
    n = int(ds.pair_position.max())
    assert {*table.pair_token_position, *table.pair_token_other_position} == {0, 2, n}
    assert (table.pair_token_position == ds.pair_position[0].values[table.pair_token]).all()
    assert {"pair_token", "pair_token_other", "self_miscoupling_null"} <= set(table)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            "miscouplin",
            "'miscouplin' is no variable of these results; similar names are miscoupling,",
        ),
        (
            ["lss", "norm"],
            r"the same dimensions \(lss: position, prompt; norm: depth, position, prompt\)",
        ),
        ([], "none was given"),
    ],
)
def test_what_is_refused(ds, of, message):
    with refused(message):
        tracker.to_frame(ds, of)


def test_too_many_rows(ds, monkeypatch):
    monkeypatch.setattr("tracker.analysis.summary.ROWS", 10)
    with refused(r"rows are too many; select first, such as results.sel\(k=10\)"):
        tracker.to_frame(ds)


def test_public_names_are_listed():
    names = [name for name in dir(tracker) if not name.startswith("_")]
    assert {"summary", "to_frame", "measure", "Watch", "report"} <= set(
        names
    ) and "importlib" not in names
    assert all(hasattr(tracker, name) for name in names)
