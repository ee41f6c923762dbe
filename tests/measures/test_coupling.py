"""Coupling measures: equations in texts, bases of a low rank, means over depth."""

import torch

from tests.conftest import ROOT
from tests.support.models import random
from tests.support.spectra import top_singular_triplets
from tracker.measures.coupling import DEFINITIONS, depth_means, in_bases, miscouplings, side_by_side


def jacobians(seed: int, L: int = 3, d: int = 12, dtype=torch.float64):
    return random(L, d, d, seed=seed).to(dtype)


def coupling_matrices(J, U, V):
    """A[l, m] = U[m]^T J[l] V[m]: every Jacobian in every basis."""
    return torch.stack([in_bases(U, J_l @ side_by_side(V)) for J_l in J])


def measured(J, K):
    triplets = top_singular_triplets(J, K)
    return miscouplings(
        coupling_matrices(J, triplets.U, triplets.V), triplets.S, J.shape[-1], triplets.S
    )


def test_texts_have_the_equations_of_the_definitions():
    assert all(definition.equation in definition.text for definition in DEFINITIONS)
    page = (ROOT / "tracker" / "report" / "assets" / "template.html").read_text()
    assert f"</strong> {DEFINITIONS[0].equation}, the distance" in page


def test_a_jacobian_of_rank_below_k_has_no_basis():
    J = jacobians(0)
    J[1] = J[1][:, :3] @ J[1][:3]  # rank 3
    m = measured(J, 4)["miscoupling"]
    assert m[:, 1].isnan().all() and m[1, [0, 2]].isfinite().all()
    assert measured(J, 3)["miscoupling"].isfinite().all()


def test_tiny_jacobians_are_coupled_as_others():
    """Squares of their entries underflow."""
    J = jacobians(0, dtype=torch.float32)
    tiny, plain = measured(2.0**-100 * J, 4), measured(J, 4)
    tiny["offdiag"] = 2.0**100 * tiny["offdiag"]
    torch.testing.assert_close(tiny, plain, rtol=1e-5, atol=1e-5)


def test_depth_means():
    l = torch.arange(3)
    means = depth_means(torch.arange(9.0).view(3, 3), (l[:, None] - l).abs())
    assert means.tolist() == [4, (1 + 2 + 3 + 5 + 6 + 7) / 6, (1 + 3 + 5 + 7) / 4]
    assert depth_means(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))[1].isnan()
