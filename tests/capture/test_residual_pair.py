"""Blocks that hand their state on as two tensors are measured by the sum, or refused."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracker
from tests.brute_force import couplings, in_one_graph
from tests.jacobians.test_rows import Attention, Stack, random
from tracker.common.errors import UsageError


class Fused(nn.Module):
    """Fused add and norm: the residual stream is hidden + residual, and the addition is left to the next block."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def mix(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else hidden + residual
        return self.mix(residual), residual


class Plain(nn.Module):
    """The same function, written plainly."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        return x + self.fused.mix(x)


class Collecting(Fused):
    def forward(self, hidden, **given):
        return super().forward(hidden, given.get("residual"))


class Model(nn.Module):
    """How the two tensors are handed on: by position, by name, in **kwargs, from the first block on, or added in between."""

    def __init__(self, how="position", blocks=3):
        super().__init__()
        self.layers = nn.ModuleList([Collecting() if how == "kwargs" else Fused() for _ in range(blocks)])
        self.norm, self.how = nn.LayerNorm(8), how

    def forward(self, x):
        residual = x / 3 if self.how == "from the first" else None
        x = x - residual if residual is not None else x
        for layer in self.layers:
            if self.how == "added":
                x, residual = layer(x if residual is None else x + residual)
            elif self.how == "position" or (residual is None and self.how != "from the first"):
                x, residual = layer(x) if residual is None else layer(x, residual)
            else:
                x, residual = layer(x, residual=residual)
        return self.norm(x + residual)


HOW = ["position", "name", "kwargs", "from the first", "added"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("final_norm", ["exclude", "include"])
def test_the_sum_is_the_state(how, final_norm):
    torch.manual_seed(0)
    model, x = Model(how).double(), random(2, 5, 8)
    plain = nn.Sequential(Stack([Plain(layer) for layer in model.layers]), model.norm)
    torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)
    given = {"k": 3, "tokens": [0, -1], "dtype": torch.float64, "final_norm": final_norm}
    seen, expected = (tracker.measure(m, x, **given) for m in (model, plain))
    assert seen.diagnostics_sliced.all()
    assert set(seen) == set(expected)
    for name in ("miscoupling", "offdiag_normalized", "singular_value", "lss", "norm", "expodistance"):
        np.testing.assert_allclose(seen[name].values, expected[name].values, atol=1e-9, err_msg=name)


def test_against_brute_force():
    torch.manual_seed(0)
    model, x = Model().double(), random(1, 5, 8)
    states = [x.requires_grad_()]
    for layer in model.layers:
        states.append(states[-1] + layer.mix(states[-1]))
    J = [in_one_graph(before, after, 0, -1, -1) for before, after in pairwise(states)]
    ds = tracker.measure(model, x.detach(), k=3, dtype=torch.float64, final_norm="exclude")
    for name, values in couplings(J, 3).items():
        np.testing.assert_allclose(ds[name].sel(k=3).values[0, 0], values, atol=1e-8)


class Uneven(Fused):
    """Not a function of the sum: the two tensors enter with different weights."""

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else hidden + 0.5 * residual
        return self.mix(residual), residual


class Normed(Fused):
    """Returns the normed state beside the residual stream, and works on the normed one: no function of the sum."""

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else residual
        return self.norm(residual + self.mix(hidden)), residual


@pytest.mark.parametrize("block", [Uneven, Normed])
def test_two_tensors_that_are_not_parts_of_a_sum_are_refused(block):
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList([block() for _ in range(3)])
    with pytest.raises(UsageError, match="no function of their sum.*blocks="):
        tracker.measure(model.double(), random(1, 5, 8), k=3, dtype=torch.float64)


def test_a_second_output_that_is_not_handed_on_is_no_part_of_the_state():
    class Reporting(Fused):
        def forward(self, hidden):
            out = self.mix(hidden)
            return hidden + out, out

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Reporting() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model, x = First().double(), random(1, 5, 8)
    plain = Stack([Plain(layer) for layer in model.layers])
    seen, expected = (tracker.measure(m, x, k=3, dtype=torch.float64) for m in (model, plain))
    np.testing.assert_allclose(seen.miscoupling.values, expected.miscoupling.values, atol=1e-10)
