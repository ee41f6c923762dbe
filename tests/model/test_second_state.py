"""Blocks that hand their state on as two tensors are refused, with what to do; a block with one is measured."""

import pytest
import torch
from torch import nn

import tracker
from tests.support.attention import attend
from tests.support.models import random
from tests.support.refused import refused
from tests.support.stacks import Attention, Stack
from tests.support.units import assert_same

OPTIONS = dict(k=3, dtype="float64")


class Fused(nn.Module):
    """Fused add and norm: the residual stream is hidden + residual, and the addition is left to the next block."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def mix(self, x):
        return self.out(attend(self.qkv(self.norm(x)), causal=True))

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else hidden + residual
        return self.mix(residual), residual


class Collecting(Fused):
    def forward(self, hidden, **given):
        return super().forward(hidden, given.get("residual"))


class Normed(Fused):
    """Returns the normed state beside the residual stream, and works on the normed one: no function of the sum."""

    def forward(self, hidden, residual=None):
        residual = self.mix(hidden) + (hidden if residual is None else residual)
        return self.norm(residual), residual


class Remembering(Fused):
    """Hands on a second tensor that stays the same."""

    changes = False

    def forward(self, hidden, residual=None):
        memory = hidden.mean(1, keepdim=True) if residual is None else residual
        return hidden + self.mix(hidden) + memory, memory * (1 + self.changes)


class Doubling(Remembering):
    changes = True


class Reporting(Fused):
    """Returns a second tensor that is not handed on."""

    def forward(self, hidden):
        return hidden + self.mix(hidden), hidden


class Plain(nn.Module):
    """The function of a fused block, written plainly."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        return x + self.fused.mix(x)


class Model(nn.Module):
    """How the two tensors are handed on: by position, by name, in **kwargs, from the first block on, or one alone."""

    def __init__(self, how="position", block=Fused):
        super().__init__()
        self.layers = nn.ModuleList(
            [Collecting() if how == "kwargs" else block() for _ in range(3)]
        )
        self.norm, self.how = nn.LayerNorm(8), how

    def forward(self, x):
        residual = x / 3 if self.how == "from the first" else None
        x = x - residual if residual is not None else x
        for layer in self.layers:
            if self.how == "one":
                x, _ = layer(x)
            elif self.how == "position" or (residual is None and self.how != "from the first"):
                x, residual = layer(x) if residual is None else layer(x, residual)
            else:
                x, residual = layer(x, residual=residual)
        return self.norm(x if residual is None else x + residual)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return random(2, 5, 8)


def plain(model):
    """Return the model of fused blocks as one whose blocks hand on one tensor."""
    return nn.Sequential(Stack([Plain(layer) for layer in model.layers]), model.norm)


def assert_equal_results(found, expected):
    names = ("miscoupling", "offdiag_normalized", "singular_value", "lss", "norm", "expodistance")
    assert_same(found, expected, names, rtol=1e-7, atol=1e-9)


REMEDY = "wrap each block in a module that returns the sum"


@pytest.mark.parametrize(
    ("how", "block", "remedy"),
    [
        ("position", Fused, REMEDY),
        ("name", Fused, REMEDY),
        ("kwargs", Fused, REMEDY),
        ("from the first", Fused, REMEDY),
        ("position", Normed, REMEDY),
        ("position", Doubling, "the blocks carry two streams"),
    ],
)
def test_two_states_are_refused_with_what_to_do(how, block, remedy, x):
    with refused(f"block layers.1 takes and returns two hidden states.*{remedy}"):
        tracker.measure(Model(how, block).double(), x, **OPTIONS)


def test_a_second_tensor_that_stays_the_same_is_no_stream(x):
    ds = tracker.measure(Model("position", Remembering).double(), x, **OPTIONS)
    assert ds.sizes["layer"] == 3


def test_a_second_output_that_is_not_handed_on_is_no_part_of_the_state(x):
    model = Model("one", Reporting).double()
    seen, expected = (tracker.measure(m, x, **OPTIONS) for m in (model, plain(model)))
    assert_equal_results(seen, expected)
