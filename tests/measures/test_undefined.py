"""A warning where most values of a measure are undefined, or states are not finite."""

import warnings

import numpy as np
import pytest
import torch
import xarray as xr

import tracker
from tests.support.models import Size, build, neox, padded, silence, tokens


def warned(model, inputs, **options) -> tuple[list[str], object]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = tracker.measure(model, inputs, k=5, **options)
    return [str(one.message) for one in caught], ds


def test_embeddings_that_overflow():
    model, inputs = build("llama, grouped keys")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e21)
    (message,), ds = warned(model, inputs)
    norms, couplings = int(ds.norm.notnull().sum()), int(ds.miscoupling.size)
    undefined = int(ds.diagnostics_undefined.sel(quantity="miscoupling"))
    assert f"{norms} of {norms} norms of states are infinite, first before block 1" in message
    assert f"{undefined} of {couplings} of miscoupling, " in message and undefined > couplings / 2
    assert "first at block 1 (model.layers.0)" in message and "dtype=torch.float64" in message
    # In float64 the norms are finite, and what the blocks add is still lost beside such states.
    (message,), ds = warned(model, inputs, dtype=torch.float64)
    assert "infinite" not in message and "float64" not in message and "of miscoupling, " in message


@pytest.mark.parametrize("zero", [(1, 2), (0, 1, 2)])
@pytest.mark.parametrize("width", [64, 256, 384])
def test_blocks_that_add_nothing(zero, width):
    """Their Jacobians are zero; the other blocks, and pairs of them, are measured."""
    model = neox(size=Size(width))
    silence(model, zero)
    options = {"measures": "coupling", "keep": "singular_vectors", "final_norm": "exclude"}
    (message,), ds = warned(model, tokens(1, 5), dtype="float64", **options)
    adding = np.isin(ds.layer, np.array(zero) + 1, invert=True)
    assert (ds.miscoupling.notnull() == adding[:, None] & adding).all()
    assert (ds.left_singular_vector.notnull() == xr.DataArray(adding, dims="layer")).all()
    undefined = int(ds.miscoupling.isnull().sum())
    assert f"{undefined} of {ds.miscoupling.size} of miscoupling, " in message
    assert f"first at block {zero[0] + 1} (gpt_neox.layers.{zero[0]})" in message
    assert "float64" not in message and "infinite" not in message


def test_few_undefined_values_are_only_counted():
    model = neox(size=Size(depth=6))
    silence(model, [2])
    messages, ds = warned(model, tokens(), measures="coupling", final_norm="exclude")
    assert not messages and int(ds.diagnostics_undefined.sum()) > 0


def test_padding_is_not_undefined():
    assert warned(neox(), padded(7, 2))[0] == []


def test_a_training_run_is_told():
    model = neox(size=Size(256))
    silence(model, range(3))
    with tracker.Watch(k=5, probe=tokens()) as watch:
        with pytest.warns(UserWarning, match="of miscoupling.*first at block 1"):
            assert watch(0, model) is not None
