"""Every architecture against brute force: which path serves it, and that Jacobians and mis-couplings are right."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import tracker
from tests.conftest import ROOT
from tests.support import brute_force
from tests.support.measured import jacobians_at
from tests.support.models import FAMILIES, build
from tracker.blocks.find import find_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
K = 6
J_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
M_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


@torch.no_grad()
def conditioning(J, k):
    """How much more than an error in J a mis-coupling may err: singular vectors turn by error / gap (Wedin)."""
    S = torch.stack([torch.linalg.svdvals(matrix) for matrix in J])[:, : k + 1]
    return max(1.0, float((S[:, :1] / -S.diff()).max()) / 10)


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


# float32 takes the same road: a family of each path, sliced and over the full sequence.
CASES = [
    *((name, torch.float64) for name in FAMILIES),
    ("gpt_neox", torch.float32),
    ("bloom", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_jacobians_and_mis_couplings(name, dtype):
    model, inputs, ds, expected = oracle(name, dtype)
    assert bool(ds.diagnostics_sliced.all()) == (not FAMILIES[name].full) and bool(
        ds.diagnostics_sliced.any()
    ) == bool(ds.diagnostics_sliced.all())
    assert ds.diagnostics_complete.all()
    truth = brute_force_jacobians(expected, inputs)
    assert jacobian_difference(model, inputs, ds, truth, dtype) <= J_TOLERANCE[dtype]
    assert ("miscoupling_normed" in ds) == (expected.norm is not None)
    for (b, position), J in truth.items():
        found = ds.isel(prompt=b, token=0 if position == 1 else 1)
        last = (
            dataclasses.replace(expected, norm=None)
            .jacobian(len(J) - 1, b, position, position)
            .detach()
        )
        by_name = {"": [*J[:-1], last]} | ({"_normed": J} if expected.norm is not None else {})
        for (end, of_blocks), k in itertools.product(by_name.items(), (2, K)):
            # Only in float32 do near-degenerate pairs cost digits that the tolerance does not leave.
            factor = conditioning(of_blocks, k) if dtype == torch.float32 else 1
            for measure, values in brute_force.couplings(of_blocks, k).items():
                scale = 1 if measure != "offdiag" else max(1, float(values.max()))
                seen = found[f"{measure}{end}"].sel(k=k).values
                np.testing.assert_allclose(
                    seen, values, rtol=0, atol=factor * M_TOLERANCE[dtype] * scale
                )


def brute_force_jacobians(expected, inputs):
    """By (sample, position), the Jacobian of every block."""
    rows = [(b, t) for b in range(len(inputs)) for t in (1, expected.inputs[0].shape[1] - 1)]
    return {
        (b, t): [expected.jacobian(l, b, t, t).detach() for l in range(len(expected.blocks))]
        for b, t in rows
    }


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


def test_the_table_in_the_docs_is_that_of_these_tests():
    """`python -m tests.architectures` writes it."""
    rows = [
        line.split(" | ") for line in (ROOT / "docs" / "architectures.md").read_text().splitlines()
    ]
    listed = {
        row[0].removeprefix("| "): row[1]
        for row in rows
        if len(row) == 5 and row[1] in ("sliced", "full")
    }
    assert listed == {
        name: "full" if family.full else "sliced" for name, family in FAMILIES.items()
    }
    assert sum(path == "sliced" for path in listed.values()) >= 25
