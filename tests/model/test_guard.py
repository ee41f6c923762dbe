"""Measuring never changes the model: forward passes that write to weights, buffers, attributes and inputs.

Each model below writes to tensors that it contains. They must keep their bytes, version counters and memory,
whether measuring succeeds or raises.
"""

import pytest
import torch
from torch import nn

import tracker
from tests.support.models import random
from tests.support.rounding import rounding
from tests.support.stacks import Attention, Stack, measured
from tests.support.unchanged import assert_unchanged, snapshot


class Writer(nn.Module):
    """Returns x + x W^T after writing to its own tensors; most writes have no effect the second time."""

    def __init__(self, write, seed=0):
        super().__init__()
        self.attention = Attention()
        self.weight = nn.Parameter(random(8, 8, seed=seed) / 3)
        self.tied = self.weight
        self.register_buffer("statistics", torch.ones(8).double())
        self.table = torch.ones(8).double()
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return x + x @ self.weight.T


def clamp(block):
    block.weight.clamp_(-0.1, 0.1)


WRITES = {
    "a weight": clamp,
    "a view": lambda block: block.weight[2:5].view(-1).clamp_(-0.1, 0.1),
    "data": lambda block: block.weight.data.clamp_(-0.1, 0.1),
    "the tied": lambda block: block.tied.data.clamp_(-0.1, 0.1),
    "out": lambda block: torch.clamp(block.weight, -0.1, 0.1, out=block.weight),
    "many": lambda block: torch._foreach_clamp_max_([block.weight, block.statistics], 0.1),
    # Measured as the first call computes it
    "halved": lambda block: block.weight.div_(2),
    "a buffer": lambda block: block.statistics.fill_(3.0),
    "a table": lambda block: block.table.fill_(3.0),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["as stored", "converted"])
def test_what_a_forward_pass_writes_stays_with_the_replica(name, dtype):
    write = WRITES[name]
    model = Stack([Writer(write, seed) for seed in range(3)])
    before = snapshot(model)
    ds = tracker.measure(model, random(1, 4, 8), k=3, dtype=dtype, tokens=[0, -1])
    expected = Stack([Writer(write, seed) for seed in range(3)])
    expected(random(1, 4, 8))  # writes for good
    for l, block in enumerate(expected.blocks):
        s = torch.linalg.svdvals(block.weight.detach())[:3]
        seen = torch.from_numpy(ds.singular_value.values[0, 0, l]).double()
        torch.testing.assert_close(seen, s, atol=rounding(dtype) * float(s[0]), rtol=0)
    assert_unchanged(model, before)


def test_nothing_is_changed_where_measuring_raises():
    def write_and_fail(block):
        clamp(block)
        block.statistics.fill_(3.0)
        raise RuntimeError("planted")

    model = Stack([Writer(clamp), Writer(write_and_fail)])
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="planted"):
        measured(model)
    assert_unchanged(model, before)


class Merging(Writer):
    """As loralib: `eval()` merges an update into the weights, `train()` takes it out again."""

    merged = False

    def train(self, mode=True):
        if mode == self.merged:
            with torch.no_grad():
                self.weight.add_(1.0 if self.merged else -1.0)
            self.merged = not mode
        return super().train(mode)


def test_what_a_change_of_mode_writes_stays_with_the_replica():
    model = Stack([Merging(clamp), Merging(clamp)]).train()
    before = snapshot(model)
    measured(model)
    assert_unchanged(model, before)
    assert not any(block.merged for block in model.blocks)


def test_inputs_are_not_written_to():
    class Writing(Stack):
        def forward(self, x, seen):
            x.mul_(2)
            seen[0].append(1)
            return super().forward(x)

    x, seen = random(1, 4, 8), [[]]
    value, version = x.clone(), x._version
    tracker.measure(
        Writing([Writer(clamp), Writer(clamp)]), {"x": x, "seen": seen}, k=3, dtype="float64"
    )
    assert torch.equal(x, value) and x._version == version and seen == [[]]


def test_a_module_outside_the_tree_is_not_run():
    """A module in a plain list is no submodule; the replica copies it, too."""
    ran = []

    class Listed(nn.Module):
        def forward(self, x):
            ran.append(self)
            return x

    model = Stack([Writer(lambda block: block.listed[0](block.weight)) for _ in range(2)])
    for block in model.blocks:
        block.listed = [Listed()]
    tracker.measure(model, random(1, 4, 8), k=3, dtype="float64", witness="off")
    assert ran and not {id(block.listed[0]) for block in model.blocks} & set(map(id, ran))
