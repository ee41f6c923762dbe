"""Measures of blocks' Jacobians and of their products: known cases, what is undefined, some depths of many blocks."""

import numpy as np
import pytest
import torch

import tracker
from tests.support.draws import seeded
from tests.support.models import Size, build
from tests.support.spectra import top_singular_triplets
from tracker.measures import block_products, coupling, single_blocks, trajectory

pytestmark = pytest.mark.filterwarnings("ignore")


def test_only_some_depths_of_many_blocks_are_decomposed():
    model, inputs = build("gpt_neox", Size(depth=11))
    ds = tracker.measure(
        model.double(), inputs, k=4, measures=("coupling", "products"), dtype="float64"
    )
    there = ds.from_first_effective_rank.notnull().all(("prompt", "token")).values
    assert (
        list(np.flatnonzero(there) + 1)
        == block_products.depths(11, 32)
        == [1, 2, 4, 5, 7, 8, 10, 11]
    )
    np.testing.assert_array_equal(
        ds.to_last_amplification.notnull().all(("prompt", "token")).values, there
    )
    np.testing.assert_allclose(
        ds.from_first_amplification.sel(layer=11), ds.to_last_amplification.sel(layer=1), rtol=1e-10
    )


def eye(d=6):
    return torch.eye(d, dtype=torch.float64)[None]


def orthogonal(seed, d=6):
    generator = seeded(seed)
    Q, R = torch.linalg.qr(torch.randn(1, d, d, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # Haar-random


def measures_of_products(Js):
    """Return the measures of the products of blocks with these Jacobians."""
    products = block_products.Products(len(Js), Js[0].shape[-1], 2, Js[0].dtype)
    for l, J in enumerate(Js, 1):
        products.add(l, J)
    return products.values(lambda l: Js[l - 1])


def test_products_of_rank_one_factors():
    """I + J = 2 u v^T: all but one direction is lost in the first block, and its exponents are undefined."""
    u, v = orthogonal(1)[..., :1], orthogonal(2)[..., :1]
    found = measures_of_products([2 * u @ v.mT - eye()] * 3)
    torch.testing.assert_close(
        found["from_first_effective_rank"], torch.ones(1, 3).double(), rtol=1e-10, atol=0
    )
    overlap = abs(float((u * v).sum()))
    expected = torch.tensor([[2.0, 4 * overlap, 8 * overlap**2]]).double()
    torch.testing.assert_close(found["from_first_amplification"], expected)
    torch.testing.assert_close(found["to_last_amplification"], expected.flip(-1))
    assert found["lyapunov_exponent"].isnan().sum() == 5


def test_exponents_of_what_rounding_leaves_are_undefined():
    """Rounding leaves d eps of the largest value, whatever the number of products."""
    edge = 40 * torch.finfo(torch.float64).eps
    S = torch.ones(2, 40, dtype=torch.float64)
    S[:, -2:] = torch.tensor([2 * edge, edge / 2])
    found = block_products.lyapunov_exponents(S, 2)
    assert found.isnan().sum(-1).tolist() == [1, 1] and found[:, -1].isnan().all()
    assert float(found[0, -2]) == pytest.approx(float(np.log(2 * edge) / 2))


def symmetric_share(J):
    moments = coupling.moments(J, J.abs().amax((-2, -1)))
    return single_blocks.symmetric_share(moments, J.shape[-1])


def test_normality_of_known_matrices():
    Q = orthogonal(1)
    symmetric = Q @ torch.diag(torch.arange(1.0, 7).double()) @ Q.mT
    nilpotent = torch.diag_embed(torch.ones(1, 5).double(), 1)
    u = Q[..., :1]
    for J, share, departure in ((nilpotent, 0.5, 1), (1e-200 * symmetric, 1, 0)):
        assert float(symmetric_share(J)) == pytest.approx(share)
        # A defective matrix, such as the nilpotent one, has eigenvalues that rounding moves by eps^(1/d).
        assert float(single_blocks.departure(J)) == pytest.approx(departure, abs=1e-4)
    assert symmetric_share(0 * Q).isnan().all() and single_blocks.departure(0 * Q).isnan().all()
    together = single_blocks.departure(torch.cat([0 * Q, nilpotent]))
    assert together.isnan().tolist() == [True, False]
    assert single_blocks.alignment(top_singular_triplets(0 * Q, 3)).isnan().all()
    assert single_blocks.alignment(top_singular_triplets(u @ u.mT, 3)).isnan().tolist() == [
        [False, True, True]
    ]


def test_the_linear_error_of_a_block_that_adds_nothing_is_undefined():
    assert single_blocks.linear_error(torch.ones(1, 2), torch.zeros(1, 2)).isnan().all()


def test_the_influence_of_a_block_that_hardly_turns_its_state():
    x = torch.tensor([[1.0, 0]])
    X = torch.stack([x, x + torch.tensor([[0, 1e-5]])])  # the cosine rounds to 1 in float32
    assert float(trajectory.block_influence(X)) == pytest.approx(5e-11, rel=1e-3)
