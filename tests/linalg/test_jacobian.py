"""Jacobians of rows by reverse mode, of functions whose derivatives are known."""

import pytest
import torch
from torch import Tensor

from tests.support.draws import seeded
from tracker.linalg.jacobian import dense_jacobian, linearize

R, D = 3, 6
GENERATOR = seeded(0)
X = torch.randn(R, D, generator=GENERATOR, dtype=torch.float64)
FLIP = torch.eye(D, dtype=torch.float64).flip(0)


class Flipped(torch.autograd.Function):
    """A custom function that is differentiable once, whose derivative decides by a value, which vmap does not allow."""

    @staticmethod
    def forward(ctx, x):
        return 0.5 * x.flip(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 0.5 * g.flip(-1) if g.any() else g


def without_vmap(x: Tensor) -> Tensor:
    return x * Flipped.apply(x)  # type: ignore[operator]


def in_place(x: Tensor) -> Tensor:
    return x.mul_(x.flip(-1)).mul_(0.5)


def constant(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def expected(f) -> Tensor:
    if f is constant:
        return torch.zeros(R, D, D, dtype=torch.float64)
    return 0.5 * (torch.diag_embed(X.flip(-1)) + X[..., None] * FLIP)


@pytest.mark.parametrize("chunk", [1, 4, D])
@pytest.mark.parametrize("f", [without_vmap, in_place, constant], ids=lambda f: f.__name__)
def test_the_jacobian_of_every_row(f, chunk):
    block = linearize(f, X)
    J = dense_jacobian(block, chunk)
    torch.testing.assert_close(J, expected(f), atol=1e-14, rtol=0)
