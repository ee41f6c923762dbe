"""Measurements that are compared with brute force."""

import torch
from torch.utils._pytree import tree_map

import tracker
from tests.support import brute_force
from tests.support.refusals import K


def measured_as_by_brute_force(model, inputs, names, norm="", final_norm="exclude", **keywords):
    """Return a measurement whose mis-couplings, at its first row, are those by brute force.

    Args:
        norm: the name of the final norm that is counted in; "": none is.
        final_norm: as in `tracker.measure`.
    """
    keywords |= {"k": K, "dtype": "float64", "final_norm": final_norm}
    ds = tracker.measure(model, inputs, **keywords)
    assert ds.attrs["blocks"].split(", ") == names
    assert ds.attrs["final_norm"] == ("include" if norm else "exclude")
    assert not norm or ds.attrs["final_norm_module"] == norm
    given = tree_map(lambda value: value.double() if value.is_floating_point() else value, inputs)
    truth = brute_force.Truth(model, given, names, ds.attrs["width"], norm)
    J = truth.jacobians(int(ds.token_position[0, 0]), normed=bool(norm))[0]
    for name, values in brute_force.couplings(J, K).items():
        found = ds[f"{name}_normed" if norm else name].sel(k=K).isel(prompt=0, token=0)
        torch.testing.assert_close(torch.as_tensor(found.values), values, rtol=0, atol=1e-8)
    return ds
