"""`keep=`: the Jacobians and singular vectors that the measures are computed from."""

import numpy as np
import pytest
import xarray as xr

import tracker
from tests.models import Letters, build
from tracker.common.errors import UsageError
from tracker.measures import layers as kept

BOTH = ("jacobian", "singular_vectors")


def measured(name, **options):
    model, inputs = build(name)
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    options = {"k": (2, 5), "tokens": (1, -1), "measures": "coupling", "dtype": "float64", "keep": BOTH} | options
    return model, inputs, tracker.measure(model, inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"memory_budget": 20_000}, {"svd": "krylov"}])
def test_they_are_kept_by_every_method(options):
    _, _, expected = measured("gpt_neox")
    _, _, ds = measured("gpt_neox", **options)
    np.testing.assert_allclose(ds.jacobian, expected.jacobian, atol=1e-9)
    U, V = ds.left_singular_vector, ds.right_singular_vector
    np.testing.assert_allclose((U * ds.singular_value * V).sum("rank"), low_rank(expected), atol=1e-7)


def low_rank(ds):
    return (ds.left_singular_vector * ds.singular_value * ds.right_singular_vector).sum("rank")


def test_nothing_else_changes():
    _, _, ds = measured("gpt_neox")
    _, _, plain = measured("gpt_neox", keep=())
    for name in plain.data_vars:
        np.testing.assert_array_equal(ds[name], plain[name])
    assert {*ds.data_vars} - {*plain.data_vars} == {"jacobian", "left_singular_vector", "right_singular_vector"}
    assert next(iter(ds.data_vars)) == "miscoupling"
    assert ds.jacobian.dims == ("prompt", "token", "layer", "output", "input")
    assert ds.jacobian.attrs["formula"] and ds.coords["output"].attrs["long_name"]
    _, _, vectors = measured("gpt_neox", keep="singular_vectors")
    assert "jacobian" not in vectors and "left_singular_vector" in vectors


@pytest.mark.slow
def test_they_are_written_to_a_file_and_read(tmp_path):
    _, _, ds = measured("gpt_neox")
    ds.to_netcdf(tmp_path / "kept.nc")
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "kept.nc").jacobian, ds.jacobian)


def test_prompts_of_different_length_are_kept():
    model, _ = build("gpt_neox")
    prompts = ["abc", "abcde"]
    ds = tracker.measure(model, prompts, tokenizer=Letters(), k=2, tokens="all", measures="coupling", keep="jacobian")
    assert (
        ds.jacobian.isel(prompt=0, token=slice(3, None)).isnull().all() and ds.jacobian.isel(prompt=1).notnull().all()
    )


def test_a_dry_run_counts_them():
    model, inputs = build("gpt_neox")
    options = {"k": 2, "measures": "coupling", "dry_run": True}
    without, with_them = (tracker.measure(model, inputs, keep=keep, **options) for keep in ((), "jacobian"))
    assert with_them.peak_bytes - without.peak_bytes == 2 * 2 * 3 * 32**2 * 4  # copies, prompts, blocks, entries, bytes


def test_what_cannot_be_kept_is_refused(monkeypatch):
    model, inputs = build("gpt_neox")
    with pytest.raises(UsageError, match="keep='J'; choose from jacobian, singular_vectors"):
        tracker.measure(model, inputs, keep="J")
    with pytest.raises(UsageError, match="add 'coupling'"):
        tracker.measure(model, inputs, keep=["jacobian"], measures="trajectory")
    monkeypatch.setattr(kept.os, "sysconf", lambda name: 100)
    with pytest.raises(UsageError, match=r"takes .* for 2 tokens, and the machine has"):
        tracker.measure(model, inputs, keep="jacobian")
    assert "the machine has" in tracker.measure(model, inputs, keep="jacobian", dry_run=True).refused
