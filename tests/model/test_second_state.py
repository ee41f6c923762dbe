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


class Plain(nn.Module):
    """The function of a fused block, written plainly."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        return x + self.fused.mix(x)


class Summed(nn.Module):
    """A fused block that passes on the sum, as the refusal advises."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, hidden, residual=None):
        assert residual is None
        return sum(self.fused(hidden)), None


class Model(nn.Module):
    """How the two tensors are handed on: by position, by name, in **kwargs, from the first block on, or added in between."""

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
            if self.how == "added":
                x, residual = layer(x if residual is None else x + residual)
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


@pytest.mark.parametrize(
    ("how", "block"),
    [
        ("position", Fused),
        ("name", Fused),
        ("kwargs", Fused),
        ("from the first", Fused),
        ("position", Normed),
    ],
)
def test_two_states_are_refused_with_what_to_do(how, block, x):
    advice = r"block layers.1 takes and returns two hidden states.*wrap each block in a module that returns the sum"
    with refused(advice):
        tracker.measure(Model(how, block).double(), x, **OPTIONS)


def test_fused_blocks_wrapped_as_the_refusal_advises_are_measured(x):
    model = Model().double()
    expected = tracker.measure(plain(model), x, **OPTIONS)
    model.layers = nn.ModuleList([Summed(layer) for layer in model.layers])
    assert_equal_results(tracker.measure(model, x, **OPTIONS), expected)


@pytest.mark.filterwarnings("ignore:block 1 .* measured over the full sequence")
def test_states_that_the_model_adds_between_blocks_are_refused_and_measured_by_spans(x):
    model = Model("added").double()
    changed = "the model changes the hidden state between layers.0 and layers.1; .*, or spans that include the change"
    with refused(changed):
        tracker.measure(model, x, **OPTIONS)
    boundaries = ["input of layers.0", "input of layers.1", "input of layers.2", "input of norm"]
    expected = tracker.measure(plain(model), x, **OPTIONS)
    assert_equal_results(tracker.measure(model, x, blocks=boundaries, **OPTIONS), expected)


def test_a_second_output_that_is_not_handed_on_is_no_part_of_the_state(x):
    class Reporting(Fused):
        def forward(self, hidden):
            out = self.mix(hidden)
            return hidden + out, out

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Reporting() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model = First().double()
    seen, expected = (
        tracker.measure(m, x, **OPTIONS)
        for m in (model, Stack([Plain(layer) for layer in model.layers]))
    )
    assert_equal_results(seen, expected)
