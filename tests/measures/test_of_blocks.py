"""Measures of blocks' Jacobians and of their products: against brute force, closed forms, invariances, small budgets."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import Size, build
from tracker.linalg.svd import top_singular_triplets
from tracker.measures import block_products, single_blocks, trajectory

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = (1, -1)
CHOICES = ("coupling", "products", "normality", "eigenvalues")


def measured(name, choices=CHOICES, size=None, **options):
    """Return a model in float64, its input, and what is measured of them."""
    torch.manual_seed(0)
    model, inputs = build(name, size) if size else build(name)
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    options = {"k": 4, "tokens": TOKENS, "measures": choices, "dtype": "float64"} | options
    return model, inputs, tracker.measure(model, inputs, **options)


def test_without_memory_for_all_jacobians():
    """With a budget of two blocks' Jacobians at one row."""
    choices = ("coupling", "products", "normality")
    how = {"choices": choices, "size": Size(width=32), "k": 2, "tokens": "last"}
    _, _, expected = measured("gpt_neox", **how)
    _, _, ds = measured("gpt_neox", **how, memory_budget=60_000)
    for variable in (
        "to_last_effective_rank",
        "from_first_singular_value",
        "lyapunov_exponent",
        "symmetric_share",
    ):
        np.testing.assert_allclose(ds[variable], expected[variable], atol=1e-8, err_msg=variable)


def test_only_some_depths_of_many_blocks_are_decomposed():
    _, _, ds = measured("gpt_neox", ("coupling", "products"), Size(depth=11), tokens="last")
    there = ds.from_first_effective_rank.notnull().all(("prompt", "token")).values
    assert list(np.flatnonzero(there) + 1) == block_products.depths(11, 32) == [1, 2, 4, 5, 7, 8, 10, 11]
    np.testing.assert_array_equal(ds.to_last_amplification.notnull().all(("prompt", "token")).values, there)
    np.testing.assert_allclose(
        ds.from_first_amplification.sel(layer=11), ds.to_last_amplification.sel(layer=1), rtol=1e-10
    )


def test_nothing_else_changes():
    _, _, ds = measured("gpt_neox")
    _, _, plain = measured("gpt_neox", ("coupling",))
    for name in set(plain.data_vars) - {"diagnostics_undefined"}:
        np.testing.assert_array_equal(ds[name], plain[name])


def eye(d=6):
    return torch.eye(d, dtype=torch.float64)[None]


def orthogonal(seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    Q, R = torch.linalg.qr(torch.randn(1, d, d, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # Haar-random


def measures_of_products(Js):
    """Return the measures of the products of blocks with these Jacobians."""
    products = block_products.Products(len(Js), Js[0].shape[-1], 2, Js[0].dtype)
    for l, J in enumerate(Js, 1):
        products.add(l, J)
    return products.values(lambda l: Js[l - 1])


def test_products_of_blocks_that_add_nothing_and_of_isometries():
    for Js in ([0 * eye()] * 3, [orthogonal(seed) - eye() for seed in range(3)]):
        found = measures_of_products(Js)
        for name, expected in (("amplification", 1), ("effective_rank", 6)):
            for form in ("from_first", "to_last"):
                torch.testing.assert_close(found[f"{form}_{name}"], torch.full((1, 3), float(expected)).double())
        torch.testing.assert_close(found["lyapunov_exponent"], torch.zeros(1, 6).double(), rtol=0, atol=1e-12)


def test_products_of_rank_one_factors():
    """I + J = 2 u v^T: all but one direction is lost in the first block, and its exponents are undefined."""
    u, v = orthogonal(1)[..., :1], orthogonal(2)[..., :1]
    found = measures_of_products([2 * u @ v.mT - eye()] * 3)
    torch.testing.assert_close(found["from_first_effective_rank"], torch.ones(1, 3).double(), rtol=1e-10, atol=0)
    overlap = abs(float((u * v).sum()))
    expected = torch.tensor([[2.0, 4 * overlap, 8 * overlap**2]]).double()
    torch.testing.assert_close(found["from_first_amplification"], expected)
    torch.testing.assert_close(found["to_last_amplification"], expected.flip(-1))
    assert found["lyapunov_exponent"].isnan().sum() == 5


def test_normality_of_known_matrices():
    Q = orthogonal(1)
    symmetric = Q @ torch.diag(torch.arange(1.0, 7).double()) @ Q.mT
    nilpotent = torch.diag_embed(torch.ones(1, 5).double(), 1)
    u, v = Q[..., :1], Q[..., 1:2]
    cases = {
        "symmetric": (symmetric, 1, 0),
        "antisymmetric": (nilpotent - nilpotent.mT, 0, 0),
        "orthogonal": (Q, None, 0),
        "nilpotent": (nilpotent, 0.5, 1),
        "u v^T with u and v orthogonal": (u @ v.mT, 0.5, 1),
        "u u^T": (u @ u.mT, 1, 0),
        "tiny": (1e-200 * symmetric, 1, 0),
    }
    for name, (J, share, departure) in cases.items():
        if share is not None:
            assert float(single_blocks.symmetric_share(J)) == pytest.approx(share, abs=1e-12), name
        # A defective matrix, such as the nilpotent one, has eigenvalues that rounding moves by eps^(1/d).
        assert float(single_blocks.departure(J)) == pytest.approx(departure, abs=1e-4 if departure else 1e-7), name
    assert single_blocks.symmetric_share(0 * Q).isnan().all() and single_blocks.departure(0 * Q).isnan().all()
    together = single_blocks.departure(torch.cat([0 * Q, nilpotent]))
    assert together.isnan().tolist() == [True, False]
    assert single_blocks.alignment(top_singular_triplets(0 * Q, 3)).isnan().all()
    assert single_blocks.alignment(top_singular_triplets(u @ u.mT, 3)).isnan().tolist() == [[False, True, True]]
    alignment = single_blocks.alignment(top_singular_triplets(torch.cat([symmetric, -symmetric]), 3))
    torch.testing.assert_close(alignment, torch.tensor([[1.0] * 3, [-1.0] * 3]).double())


def test_the_null_level_of_the_symmetric_share():
    shares = []
    for seed in range(400):
        U, V = orthogonal(seed), orthogonal(1000 + seed)
        shares.append(float(single_blocks.symmetric_share(U @ torch.diag(torch.arange(1.0, 7).double()) @ V.mT)))
    assert np.mean(shares) == pytest.approx((1 + 1 / 6) / 2, abs=3 * np.std(shares) / 20)


def test_depth_use_of_known_blocks():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    turned = x.flip(-1) * torch.tensor([1.0, -1, 1, -1])  # at a right angle to x
    X = torch.stack([x, 2 * x, 2 * x, 2 * x + 2 * turned, 0 * x, x])
    expected = torch.tensor([0, 0, 1 - 2**-0.5, torch.nan, torch.nan]).double()
    torch.testing.assert_close(trajectory.block_influence(X), expected[:, None].expand(-1, 3), equal_nan=True)
    expected = torch.tensor([1, torch.nan, 0, -1, torch.nan]).double()
    torch.testing.assert_close(
        trajectory.update_cosine(X), expected[:, None].expand(-1, 3), equal_nan=True, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(single_blocks.linear_error(x, x), torch.zeros(3).double())
    torch.testing.assert_close(single_blocks.linear_error(0 * x, x), torch.ones(3).double())
    assert single_blocks.linear_error(x, 0 * x).isnan().all()
    assert float(single_blocks.jacobian_gain(torch.linalg.matrix_norm(3 * eye()), 6)) == pytest.approx(3)


def test_the_influence_of_a_block_that_hardly_turns_its_state():
    x = torch.tensor([[1.0, 0]])
    X = torch.stack([x, x + torch.tensor([[0, 1e-5]])])  # the cosine rounds to 1 in float32
    assert float(trajectory.block_influence(X)) == pytest.approx(5e-11, rel=1e-3)
