"""Certificates and errors of checks, which are rounding errors where nothing is wrong: the exact values of planted errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.formulas import evaluate, norm
from tests.support.samples import VARIANTS, measured
from tracker.jacobians.rows import Jacobians
from tracker.linalg.svd import residual, triplets_of_each
from tracker.measures.registry import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore")


def planting(of_each):
    """Return a decomposition whose certificates are functions of each J."""

    def decompose(Js, *arguments):
        return [
            replace(
                t,
                residual=1e-3 * torch.linalg.matrix_norm(J),
                complete=J.diagonal(dim1=-2, dim2=-1).sum(-1) > 0,
                full=J[:, 0, 0] > 0,
            )
            for J, t in zip(Js, of_each(Js, *arguments), strict=True)
        ]

    return decompose


def planting_errors(form):
    """Return what forms Jacobians with errors that are functions of each J, and of the first row's."""

    def formed(self, selections):
        found = []
        for J, checks in form(self, selections):
            of_rows = 1e-4 * torch.linalg.matrix_norm(J)
            errors = {"value_error": float(of_rows[0]), "derivative_error": 2 * float(of_rows[0])}
            found.append((J, replace(checks, **errors, independent_errors=tuple(of_rows.tolist()))))
        return found

    return formed


def test_certificates_and_errors_are_those_of_each_jacobian(monkeypatch):
    """They differ between tokens, blocks and kinds of pairs, but for two errors that a block has once."""
    monkeypatch.setattr("tracker.measures.layers.triplets_of_each", planting(triplets_of_each))
    monkeypatch.setattr(Jacobians, "__call__", planting_errors(Jacobians.__call__))
    ds, samples = measured.__wrapped__("gpt_neox")
    planted = {
        "diagnostics_residual": lambda b: 1e-3 * norm(b.J),
        "diagnostics_complete": lambda b: np.trace(b.J) > 0,
        "diagnostics_full_svd": lambda b: b.J[0, 0] > 0,
        "diagnostics_independent_error": lambda b: 1e-4 * norm(b.J),
    }
    starts = {name.removeprefix("diagnostics_") for name in planted}
    names = {f"diagnostics_{start}{name}{end}" for start, end in VARIANTS for name in starts}
    names &= BY_NAME.keys()
    assert len(names) == 2 * len(VARIANTS) + 4
    for name in names:
        expected = np.array([evaluate(sample, BY_NAME[name], planted) for sample in samples], float)
        np.testing.assert_allclose(ds[name], expected, rtol=1e-6, err_msg=name)
        assert len(np.unique(expected)) > 1, name
    for end in ("", "_normed"):
        of_first = ds[f"diagnostics_independent_error{end}"][0, 0]
        for name, times in (("value", 1), ("derivative", 2)):
            error = ds[f"diagnostics_{name}_error{end}"]
            np.testing.assert_allclose(error, (times * of_first).broadcast_like(error))


@pytest.mark.parametrize("side", [0, 1])
def test_the_residual_of_a_wrong_vector(side):
    """J = diag(4, 2, 1) with u_2 (or v_2) turned from e_2 to e_3."""
    J, angle = torch.diag(torch.tensor([4.0, 2, 1])), 0.1
    turned = torch.tensor([[1, 0], [0, np.cos(angle)], [0, np.sin(angle)]]).float()
    vectors = [torch.eye(3)[:, :2]] * 2
    vectors[side] = turned
    U, V = vectors
    S = torch.tensor([4.0, 2])
    apart = max((J @ V - U * S).norm(), (J.T @ U - V * S).norm())
    found = residual(J[None], U[None], S[None], V[None])
    assert float(found) == pytest.approx(float(apart) / 4, rel=1e-4)
