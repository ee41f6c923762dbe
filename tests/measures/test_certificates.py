"""Certificates and errors of checks, which are rounding errors where nothing is wrong: the exact values of planted errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tracker
from tests.support.draws import seeded
from tests.support.formulas import evaluate, norm
from tests.support.linear_blocks import LinearBlocks
from tests.support.samples import measured
from tracker.linalg.svd import residual, triplets_of_each
from tracker.linalg.transfer import SEED
from tracker.measures.registry import BY_NAME, KINDS

pytestmark = pytest.mark.filterwarnings("ignore")
VARIANTS = [("", ""), ("", "_normed"), *((f"{kind}_", "") for kind in KINDS)]


def planting(of_each):
    """Return a decomposition whose certificates are functions of each J."""

    def decompose(Js, *arguments):
        return [
            replace(
                t,
                residual=1e-3 * torch.linalg.matrix_norm(J),
                complete=trace(J) > 0,
                full=J[:, 0, 0] > 0,
            )
            for J, t in zip(Js, of_each(Js, *arguments), strict=True)
        ]

    return decompose


def trace(J):
    return J.diagonal(dim1=-2, dim2=-1).sum(-1)


def test_certificates_are_those_of_each_jacobian(monkeypatch):
    """They differ between tokens, blocks and kinds of pairs."""
    monkeypatch.setattr("tracker.measures.layers.triplets_of_each", planting(triplets_of_each))
    ds, samples = measured.__wrapped__("gpt_neox")
    planted = {
        "diagnostics_residual": lambda b: 1e-3 * norm(b.J),
        "diagnostics_complete": lambda b: np.trace(b.J) > 0,
        "diagnostics_full_svd": lambda b: b.J[0, 0] > 0,
    }
    names = {
        f"diagnostics_{start}{name}{end}"
        for start, end in VARIANTS
        for name in ("residual", "complete", "full_svd")
    }
    names &= BY_NAME.keys()
    assert len(names) == 2 * len(VARIANTS) + 2
    for name in names:
        expected = np.array([evaluate(sample, BY_NAME[name], planted) for sample in samples], float)
        np.testing.assert_allclose(ds[name], expected, rtol=1e-10, err_msg=name)
        assert len(np.unique(expected)) > 1, name


@pytest.mark.parametrize("side", ["U", "V"])
def test_the_residual_of_a_wrong_vector(side):
    """J = diag(4, 2, 1) with u_2 (or v_2) turned by an angle from e_2 to e_3."""
    J, angle = torch.diag(torch.tensor([4.0, 2, 1]).double())[None], 0.1
    vectors = {of: torch.eye(3).double()[None, :, :2].clone() for of in "UV"}
    vectors[side][0, 1:, 1] = torch.tensor([np.cos(angle), np.sin(angle)])
    # |J e_2 - 2 u| = 2 |e_2 - u|, and |J u - 2 e_2| = |(2 (cos - 1), sin)|
    apart = max(2 * 2 * np.sin(angle / 2), np.hypot(2 * (np.cos(angle) - 1), np.sin(angle)))
    found = residual(J, vectors["U"], torch.tensor([[4.0, 2]]).double(), vectors["V"])
    assert float(found) == pytest.approx(apart / 4)


class Faulty(torch.autograd.Function):
    """A product with a matrix, whose backward is too large by a part."""

    @staticmethod
    def forward(ctx, x, matrix, excess):
        ctx.matrix, ctx.excess = matrix, excess
        return x @ matrix.mT

    @staticmethod
    def backward(ctx, gradient):
        return (1 + ctx.excess) * gradient @ ctx.matrix, None, None


class FaultyBlock(nn.Module):
    """A linear block of each token alone, with a wrong backward, that gives a little more for single tokens."""

    def __init__(self, matrix, more, excess):
        super().__init__()
        self.matrix, self.more, self.excess = nn.Parameter(matrix), more, excess

    def added(self, x, alone):
        y = Faulty.apply(x, self.matrix, self.excess)
        return y + self.more * alone * y.detach()

    def forward(self, x):
        return x + self.added(x, alone=x.shape[1] == 1)


def standard_normal(seed, *shape):
    return torch.randn(shape, generator=seeded(SEED + seed), dtype=torch.float64)


def test_errors_of_checks_are_those_planted():
    """Below their tolerances: values at single rows, and reverse mode against differences."""
    model = LinearBlocks()
    more, excess, blocks = (1e-10, 2e-10, 3e-10), (2e-6, 3e-6, 1e-6), model.blocks
    matrices = [block.mlp.weight.detach() for block in blocks]
    model.blocks = nn.ModuleList(
        FaultyBlock(*given) for given in zip(matrices, more, excess, strict=True)
    )
    model = model.double()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    ds = tracker.measure(
        model, ids, k=2, dtype="float64", measures="coupling", blocks="blocks", final_norm="include"
    )
    assert ds.diagnostics_sliced.all()

    x, v = model.embed(ids).detach(), standard_normal(1, 12).sign()
    expected = []
    for block in model.blocks:
        expected.append(planted_errors(block, nn.Identity(), x[0, -1], v))
        normed, x = planted_errors(block, model.norm, x[0, -1], v), block(x).detach()
    # Without the norm all is linear.
    np.testing.assert_allclose([value for value, _ in expected], more, rtol=1e-3)
    # The planted errors are 1e-10 and more, and those of rounding some 1e-15. Differences add h^2 = 1e-8 times a curvature.
    for i, (name, by_differences) in enumerate({"value": 0, "independent": 1e-7}.items()):
        found, with_norm = (
            ds[f"diagnostics_{name}_error{end}"].values[0, 0] for end in ("", "_normed")
        )
        of_blocks = [errors[i] for errors in expected]
        np.testing.assert_allclose(found, of_blocks, 1e-3, by_differences, err_msg=name)
        np.testing.assert_allclose(
            with_norm, [*found[:-1], normed[i]], 1e-3, by_differences, err_msg=name
        )


def planted_errors(block, norm, x, v):
    """Return the errors of value and of the formed J v for one token's state x."""
    values = []
    for alone in (False, True):
        at = x.clone().requires_grad_()
        y = norm(at + block.added(at, alone))
        values.append(y.detach() - x)
    rows = [
        torch.autograd.grad(y, at, one, retain_graph=True)[0] for one in torch.eye(len(x)).to(x)
    ]
    state = (x + block.matrix @ x).detach()
    true = torch.autograd.functional.jacobian(norm, state) @ (v + block.matrix @ v).detach() - v
    formed = torch.stack(rows) @ v - v
    return (
        float((values[1] - values[0]).norm() / values[0].norm()),
        float((formed - true).norm() / torch.maximum(formed.norm(), true.norm())),
    )
