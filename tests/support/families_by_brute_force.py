"""The Jacobians of a family of models by brute force, and how far measured ones are from them."""

import torch

import tracker
from tests.support import brute_force
from tests.support.measured import jacobians_at
from tests.support.models import build
from tracker.blocks.find import find_blocks

K = 6


def oracle(name, dtype):
    model, inputs = build(name)
    model = model.to(dtype).eval()
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    found = find_blocks(model)
    ds = tracker.measure(model, inputs, k=[2, K], tokens=[1, -1], dtype=dtype)
    norm = brute_force.final_norm(model, ds)
    blocks = [model.get_submodule(n) for n in found.names]
    return (
        model,
        inputs,
        ds,
        brute_force.run(model, inputs, blocks, norm, found.batch_first, functorch=name != "bloom"),
    )


def brute_force_jacobians(expected, inputs):
    """By (sample, position), the Jacobian of every block."""
    rows = [(b, t) for b in range(len(inputs)) for t in (1, expected.inputs[0].shape[1] - 1)]
    return {row: expected.jacobians(*row) for row in rows}


def jacobian_difference(model, inputs, ds, truth, dtype):
    """Largest difference of an entry, relative to the largest entry where that is above 1."""
    found = jacobians_at(
        model, inputs, list(truth), dtype, final_norm=ds.attrs["final_norm"] == "include"
    )
    differences = [
        (J[r] - truth[at][l]).abs().max() / truth[at][l].abs().max().clamp(min=1)
        for l, (J, _) in enumerate(found)
        for r, at in enumerate(truth)
    ]
    return float(torch.stack(differences).max())


def jacobian_error(name, dtype):
    """For the table in the docs: whether the sliced path serves, and the difference from brute force."""
    model, inputs, ds, expected = oracle(name, dtype)
    return bool(ds.diagnostics_sliced.all()), jacobian_difference(
        model, inputs, ds, brute_force_jacobians(expected, inputs), dtype
    )
