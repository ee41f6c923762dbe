"""Measurements that are compared with brute force."""

import torch

import tracker
from tests.support import brute_force
from tests.support.refusals import K


def measured_as_by_brute_force(model, inputs, names, **keywords):
    """Return a measurement without the final norm whose mis-couplings, at its first row, are those by brute force."""
    ds = tracker.measure(model, inputs, k=K, dtype="float64", final_norm="exclude", **keywords)
    assert ds.attrs["blocks"].split(", ") == names
    given = inputs.double() if inputs.is_floating_point() else inputs
    truth = brute_force.Truth(model, given, names, ds.attrs["width"])
    J = truth.jacobians(int(ds.token_position[0, 0]))[0]
    for name, values in brute_force.couplings(J, K).items():
        found = torch.as_tensor(ds[name].sel(k=K).isel(prompt=0, token=0).values)
        torch.testing.assert_close(found, values, rtol=0, atol=1e-8)
    return ds
