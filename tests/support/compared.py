"""Measurements that are compared with brute force."""

import torch

import tracker
from tests.support import brute_force
from tests.support.refusals import K


def measured_as_by_brute_force(model, inputs, names, batch_first=True, **keywords):
    """Return a measurement without the final norm whose mis-couplings, at its first row, are those by brute force."""
    ds = tracker.measure(model, inputs, k=K, dtype="float64", final_norm="exclude", **keywords)
    assert ds.attrs["blocks"].split(", ") == names
    blocks = [model.get_submodule(name) for name in names]
    given = inputs.double() if inputs.is_floating_point() else inputs
    oracle = brute_force.run(model, given, blocks, None, batch_first)
    t = int(ds.token_position[0, 0])
    for name, values in brute_force.couplings(oracle.jacobians(0, t), K).items():
        found = torch.as_tensor(ds[name].sel(k=K).isel(prompt=0, token=0).values)
        torch.testing.assert_close(found, values, rtol=0, atol=1e-8)
    return ds
