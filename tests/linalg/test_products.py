"""Singular values of long products, against products of which they are known."""

import pytest
import torch

from tests.support.draws import seeded
from tests.support.spectra import rotation
from tracker.linalg.products import MOST, Chain


def factors(values, count, dtype=torch.float64):
    """Return matrices whose product has the singular values `values` to the power `count`: each maps one basis to the next."""
    Q = [rotation(seed, len(values)) for seed in range(count + 1)]
    return [(Q[i + 1] @ torch.diag(values) @ Q[i].mT).to(dtype)[None] for i in range(count)]


def chained(matrices):
    chain = Chain()
    for M in matrices:
        chain.multiply(M)
    return chain.singular_values()[0]


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_equals_the_decomposition_of_the_product(count):
    generator = seeded(count)
    matrices = [
        torch.eye(9) + 0.3 * torch.randn(2, 9, 9, generator=generator).double()
        for _ in range(count)
    ]
    chain, P = Chain(), torch.eye(9, dtype=torch.float64).expand(2, -1, -1)
    for M in matrices:
        chain.multiply(M)
        P = M @ P
        largest = float(torch.linalg.matrix_norm(P, 2).max())
        torch.testing.assert_close(
            chain.singular_values(), torch.linalg.svdvals(P), rtol=0, atol=1e-13 * largest
        )


def test_small_values_are_accurate_in_float32_where_the_product_loses_them():
    # To the power 30: from 3e4 to 3e-8
    values = torch.logspace(0.15, -0.25, 12, dtype=torch.float64)
    matrices = factors(values, 30, torch.float32)
    found, P = chained(matrices), torch.eye(12)
    for M in matrices:
        P = M[0] @ P
    relative = abs(found / values**30 - 1)
    assert float(relative.max()) < 1e-4
    naive = abs(torch.linalg.svdvals(P.double()) / values**30 - 1)
    assert float(naive.max()) > 1


def test_orthogonal_factors_are_multiplied_in_groups(monkeypatch):
    steps = []
    qr = torch.linalg.qr
    matrices = factors(torch.ones(8, dtype=torch.float64), 2 * MOST + 1)
    monkeypatch.setattr(torch.linalg, "qr", lambda A: steps.append(1) or qr(A))
    torch.testing.assert_close(
        chained(matrices), torch.ones(8, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert len(steps) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_singular_factors(rank):
    u, v = rotation(1, 6)[:, :rank], rotation(2, 6)[:, :rank]
    found = chained([2 * u @ v.mT[None], *factors(torch.ones(6, dtype=torch.float64), 3)])
    torch.testing.assert_close(
        found, torch.tensor([2.0 * rank, 0, 0, 0, 0, 0]).double(), rtol=1e-12, atol=1e-12
    )
