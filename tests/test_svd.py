"""Singular triplets and their certificate, which must tell the truth about planted faults."""

import pytest
import torch

from tests.test_coupling import rotation
from tracker.svd import is_complete, residual, top_singular_triplets


def planted(s: torch.Tensor) -> torch.Tensor:
    d = len(s)
    return (rotation(0, d) * s @ rotation(1, d).T)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_triplets_reproduce_known_values(dtype):
    s = torch.linspace(2, 0.5, 20, dtype=torch.float64)
    t = top_singular_triplets(planted(s).to(dtype), 7)
    torch.testing.assert_close(t.S[0].double(), s[:7], atol=20 * torch.finfo(dtype).eps, rtol=0)
    assert float(t.residual) < 100 * torch.finfo(dtype).eps and bool(t.complete)
    torch.testing.assert_close(t.V.mT @ t.V, torch.eye(7, dtype=dtype)[None], atol=1e-5, rtol=0)


@pytest.mark.parametrize("missed", [0, 3, 6])
def test_a_missed_triplet_is_found_out(missed):
    """Residuals of the triplets that are there look perfect; only the completeness test sees what is not."""
    J = planted(torch.linspace(2, 0.5, 20, dtype=torch.float64))
    U, S, Vh = torch.linalg.svd(J)
    kept = [i for i in range(8) if i != missed]
    U, S, V = U[..., kept], S[..., kept], Vh[..., kept, :].mT
    assert float(residual(J, U, S, V)) < 1e-14
    assert not bool(is_complete(J, U, S, V))


def test_a_wrong_vector_has_a_residual():
    J = planted(torch.linspace(2, 0.5, 20, dtype=torch.float64))
    t = top_singular_triplets(J, 5)
    turned = t.U.clone()
    turned[..., 4] = (t.U[..., 4] + 1e-3 * t.U[..., 0]) / (1 + 1e-6) ** 0.5
    assert float(residual(J, turned, t.S, t.V)) > 1e-4


@pytest.mark.parametrize("s", [[1.0] * 12, [1.0] * 4 + [0.0] * 8, [0.0] * 12, [1e-22] * 12], ids=str)
def test_clustered_deficient_zero_and_tiny(s):
    t = top_singular_triplets(planted(torch.tensor(s, dtype=torch.float64)).float(), 6)
    assert bool(t.complete)
    assert bool(t.residual.isnan()) == (max(s) == 0)


def test_not_finite_is_refused():
    J = torch.zeros(1, 4, 4)
    J[0, 1, 2] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        top_singular_triplets(J, 2)
