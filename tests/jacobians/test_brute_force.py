"""Every architecture against brute force: which path serves it, and that Jacobians and mis-couplings are right."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.support import brute_force
from tests.support.families_by_brute_force import (
    K,
    brute_force_jacobians,
    jacobian_difference,
    oracle,
)
from tests.support.models import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")
J_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
M_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


@torch.no_grad()
def conditioning(J, k):
    """How much more than an error in J a mis-coupling may err: singular vectors turn by error / gap (Wedin)."""
    S = torch.stack([torch.linalg.svdvals(matrix) for matrix in J])[:, : k + 1]
    return max(1.0, float((S[:, :1] / -S.diff()).max()) / 10)


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
