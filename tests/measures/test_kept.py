"""`keep=`: the Jacobians and singular vectors that the measures are computed from."""

import tracker
from tests.support.models import Letters, build
from tests.support.refused import refused
from tests.support.units import assert_same
from tracker.measures import layers as kept


def measured(keep):
    model, inputs = build("gpt_neox")
    options = {"k": (2, 5), "tokens": (1, -1), "measures": "coupling", "dtype": "float64"}
    return tracker.measure(model.double(), inputs, keep=keep, **options)


def test_nothing_else_changes():
    ds = measured(("jacobian", "singular_vectors"))
    plain = measured(())
    assert_same(ds, plain, plain.data_vars)
    assert {*ds.data_vars} - {*plain.data_vars} == {
        "jacobian",
        "left_singular_vector",
        "right_singular_vector",
    }
    assert next(iter(ds.data_vars)) == "miscoupling"
    assert ds.jacobian.dims == ("prompt", "token", "layer", "output", "input")
    assert ds.jacobian.attrs["formula"] and ds.coords["output"].attrs["long_name"]
    vectors = measured("singular_vectors")
    assert "jacobian" not in vectors and "left_singular_vector" in vectors


def test_prompts_of_different_length_are_kept():
    model, _ = build("gpt_neox")
    prompts = ["abc", "abcde"]
    ds = tracker.measure(
        model, prompts, tokenizer=Letters(), k=2, tokens="all", measures="coupling", keep="jacobian"
    )
    assert (
        ds.jacobian.isel(prompt=0, token=slice(3, None)).isnull().all()
        and ds.jacobian.isel(prompt=1).notnull().all()
    )


def test_a_dry_run_counts_them():
    model, inputs = build("gpt_neox")
    options = {"k": 2, "measures": "coupling", "dry_run": True}
    without, with_them = (
        tracker.measure(model, inputs, keep=keep, **options) for keep in ((), "jacobian")
    )
    # Copies, prompts, blocks, entries, bytes
    assert with_them.peak_bytes - without.peak_bytes == 2 * 2 * 3 * 32**2 * 4


def test_what_cannot_be_kept_is_refused(monkeypatch):
    model, inputs = build("gpt_neox")
    with refused("keep='J'; choose from jacobian, singular_vectors"):
        tracker.measure(model, inputs, keep="J")
    with refused("add 'coupling'"):
        tracker.measure(model, inputs, keep=["jacobian"], measures="trajectory")
    monkeypatch.setattr(kept.os, "sysconf", lambda name: 100)
    with refused(r"takes .* for 2 tokens, and the machine has"):
        tracker.measure(model, inputs, keep="jacobian")
    with refused("the machine has"):
        tracker.measure(model, inputs, keep="jacobian", dry_run=True)
