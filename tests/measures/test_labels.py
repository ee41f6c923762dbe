"""What a Dataset says of itself: order, attributes, the text of tokens, in memory and on disk."""

import re

import numpy as np
import pytest
import xarray as xr

import tracker
from tests.support.models import Letters, build, neox, tokens
from tests.support.stores import generated, stored
from tests.support.words import PROMPTS, tokenizer
from tracker.measures.dataset import labelled
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import MEASURES
from tracker.store import Store

SAID = ("long_name", "units", "formula", "reference")


@pytest.fixture(scope="module")
def ds():
    model, _ = build("gpt_neox")
    return tracker.measure(model, PROMPTS, tokenizer=tokenizer(), k=[2, 4])


def described(dataset: xr.Dataset):
    for name, values in dataset.variables.items():
        assert all(values.attrs.get(said) for said in SAID), (name, values.attrs)


def test_every_entry_of_the_registry_states_its_formula_and_reference():
    for measure in MEASURES:
        assert measure.label and measure.formula and measure.reference, measure.name
        ours = measure.reference.startswith(("paper", "the paper", "authors' code", "this package"))
        assert ours or re.search(r"\([12]\d{3}\)", measure.reference), (
            f"{measure.name}: {measure.reference}"
        )


def test_variables_are_in_the_order_in_which_they_were_asked_for(ds):
    names = list(ds.data_vars)
    assert names[:4] == ["miscoupling", "offdiag_normalized", "lss", "expodistance"]
    diagnostics = [name.startswith(DIAGNOSTICS) for name in names]
    assert (
        diagnostics == sorted(diagnostics)
        and names[-1] == "diagnostics_undefined"
        and sum(diagnostics) > 10
    )
    assert [
        line.split()[0] for line in str(ds).partition("Data variables:")[2].splitlines()[1:7]
    ] == names[:6]
    turned = tracker.measure(neox(), tokens(1), k=2, measures=["entropy", "trajectory", "coupling"])
    assert (
        list(turned.data_vars)[:2] == ["entropy", "lss"]
        and list(turned.data_vars)[6] == "miscoupling"
    )


def test_what_a_walk_adds_is_described(tmp_path):
    path = generated(tmp_path / "toy", (1, 2))
    described(Store(path).read(1))
    opened = tracker.open_results(path)
    described(opened)
    assert opened.score.attrs["long_name"] == "score on a benchmark" and "repeats" in opened.coords
    assert list(opened.data_vars)[:2] == ["miscoupling", "offdiag_normalized"]


def test_labelling_leaves_its_argument_alone():
    given = xr.Dataset({"lss": ("position", [1.0])}, {"position": [0]}, {"a": 1})
    assert labelled(given).lss.attrs and not given.lss.attrs


def test_text_of_the_tokens(ds, tmp_path):
    assert ds.token_text.dims == ("prompt", "position")
    for prompt, row, steps in zip(PROMPTS, ds.token_text.values, ds.lss.values, strict=True):
        there = [text for text in row if text]
        assert there == prompt.split() and np.isfinite(steps).sum() == len(there)
        assert list(row[: len(there)]) == there
    store = stored(tmp_path / "toy", {0: ds})
    np.testing.assert_array_equal(store.read(0).token_text.values, ds.token_text.values)
    assert "token_text" not in tracker.measure(neox(), tokens(1), k=2).coords


def test_text_of_tokens_beyond_ascii_and_of_tokenizers_without_texts(tmp_path):
    model = neox()
    assert "token_text" not in tracker.measure(model, "abc", tokenizer=Letters(), k=2).coords
    ds = tracker.measure(
        model, ["abc", "abcde"], tokenizer=Letters(lambda ids: "αβγ€"[ids[0] % 4]), k=2
    )
    store = stored(tmp_path / "toy", {0: ds})
    read = store.read(0).token_text
    assert set("".join(read.values[1])) <= set("αβγ€") and read.values[0, 3:].tolist() == ["", ""]
    np.testing.assert_array_equal(read.values, ds.token_text.values)
