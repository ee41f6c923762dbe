"""Matrices with planted singular values, and what their top singular triplets must be."""

import torch

from tests.support.models import random
from tests.support.rounding import rounding
from tracker.common.values import Method
from tracker.linalg import svd


def rotation(seed: int, d: int):
    return torch.linalg.qr(random(d, d, seed=seed)).Q


FALLING = torch.linspace(2, 0.5, 96, dtype=torch.float64)


def flat(d: int) -> torch.Tensor:
    """A spectrum with the edge that random matrices have, as at initialisation."""
    return 1 - 0.9 * torch.linspace(0, 1, d, dtype=torch.float64) ** (2 / 3)


FLAT = flat(160)


def top_singular_triplets(J: torch.Tensor, K: int, method: Method = "auto") -> svd.Triplets:
    return svd.triplets_of_each([J], K, method, memory=1 << 30)[0]


def planted(s: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A matrix of these singular values in random bases."""
    d = len(s)
    return (rotation(seed, d) * s @ rotation(seed + 1, d).T)[None]


def assert_same_span(A: torch.Tensor, B: torch.Tensor, atol: float):
    """The largest principal angle: |(1 - B B^T) A|."""
    assert float(torch.linalg.matrix_norm(A - B @ (B.mT @ A), 2).max()) < atol


SPECTRA = {
    "all equal": [1.0] * 96,
    "a cluster wider than a block": [1.0] * 24 + [0.5] * 72,
    "a cluster across the cut": [2.0] * 5 + [1.0] * 20 + [0.3] * 71,
    "rank below a block": [3.0, 2.0, 1.0] + [0.0] * 93,
    "rank 40": [1.0] * 40 + [0.0] * 56,
    "zero": [0.0] * 96,
    "tiny": [1e-22 * (1 - k / 96) for k in range(96)],
    "six decades": [10 ** (-k / 16) for k in range(96)],
}


def assert_right(t, s, dtype):
    """Assert that ten triplets have the singular values s, orthonormal vectors, and a certificate."""
    assert bool(t.complete)
    assert bool(t.residual.isnan()) == bool(t.gap.isnan().all()) == (float(s[0]) == 0)
    assert not float(t.residual) > svd.TOLERANCE[dtype]
    # Where values are equal, they err as much as the residual (Weyl), not as its square.
    accuracy = rounding(dtype) + float(t.residual.nan_to_num(0))
    torch.testing.assert_close(t.S[0].cpu().double(), s[:10], atol=accuracy * float(s[0]), rtol=0)
    for basis in (t.U.cpu(), t.V.cpu()):
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(10, dtype=dtype)[None], atol=rounding(dtype), rtol=0
        )
