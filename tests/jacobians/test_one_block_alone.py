"""The derivative is checked in the first block of a class; what one block alone does is found, whichever block it is."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import tracker
import tracker.jacobians.rows
from tests.central_differences import assert_right
from tests.jacobians.test_every_row import CLOSE, Block, D, Wrong, states
from tracker.common.errors import UsageError

L = 5
NAMES = [str(l) for l in range(L)]
DTYPES = ["float32", "float64"]


class Gated(Block):
    """A block whose gate lets in `added(state)`."""

    def __init__(self, added, gate=0.0):
        super().__init__()
        self.what, self.gate = [added], nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        return super().forward(x) + self.gate * self.what[0](x)


def gated(added, opened):
    """Return blocks of which one alone has its gate open."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Gated(added) for _ in range(L))).eval()
    blocks[opened].gate.data.fill_(1.0)
    return blocks


def measured(net, x, dtype, **options):
    return tracker.measure(net, x, dtype=dtype, k=3, blocks=NAMES, keep="jacobian", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [2, 6])
@pytest.mark.parametrize("opened", range(L))
def test_one_block_alone_that_mixes_samples_is_found(opened, samples, dtype):
    net = gated(lambda x: x.mean(0, keepdim=True), opened)
    with pytest.raises(UsageError, match=rf"block {opened + 1} \({opened}\) mixes the samples"):
        measured(net, states(samples), dtype, witness="off")


@pytest.mark.parametrize("opened", range(L))
def test_one_block_alone_that_mixes_a_little_is_found(opened):
    net = gated(lambda x: 1e-4 * x.flip(0), opened)
    with pytest.raises(UsageError, match=rf"block {opened + 1} \({opened}\) mixes the samples"):
        measured(net, states(4), "float32", witness="off")


class Counting(Block):
    """A block that mixes samples in its second call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = self.calls % 2 + 1
        return super().forward(x) + (self.calls == 2) * x.mean(0, keepdim=True)


class Looped(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        return self.blocks[0](self.blocks[0](x))


def test_the_second_call_of_a_module_that_mixes_samples_is_found():
    torch.manual_seed(0)
    with pytest.raises(UsageError):
        tracker.measure(Looped(Counting()).eval(), states(4), k=3, blocks=["blocks.0"])


class Flagged(Block):
    def forward(self, x, mix=False):
        return super().forward(x) + (x.mean(0, keepdim=True) if mix else 0)


class WithFlags(nn.Module):
    def __init__(self, mixing):
        super().__init__()
        self.blocks, self.mixing = nn.ModuleList([Flagged() for _ in range(L)]), mixing

    def forward(self, x):
        for l, block in enumerate(self.blocks):
            x = block(x, mix=l == self.mixing)
        return x


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("mixing", range(L))
def test_a_flag_among_the_arguments_that_mixes_samples_is_found(mixing, samples):
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=rf"block {mixing + 1} .* mixes the samples"):
        tracker.measure(WithFlags(mixing).eval(), states(samples), k=3, witness="off")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opened", range(L))
def test_one_block_alone_with_a_wrong_derivative_is_found(opened, dtype):
    net = gated(Wrong.apply, opened)
    with pytest.raises(UsageError, match=rf"block {opened + 1} .*autograd does not give"):
        measured(net, states(2), dtype, witness="off")


class Excessive(torch.autograd.Function):
    """The identity, whose backward is too large by a twentieth."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 1.05 * g


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", range(D))
def test_a_wrong_derivative_by_one_coordinate_is_found(at, dtype):
    only = torch.eye(D)[at]
    net = gated(lambda x: x + Excessive.apply(x * only) - x * only, 2)
    with pytest.raises(UsageError, match=r"block 3 .*autograd does not give"):
        measured(net, states(2), dtype, witness="off")


PATHS = {
    "mean over tokens": lambda x: x.mean(1, keepdim=True) ** 2,
    "first token": lambda x: torch.tanh(x[:, :1] * x),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("opened", range(L))
def test_one_block_alone_with_a_path_through_other_tokens_is_right(opened, path):
    assert_measured_right(gated(PATHS[path], opened), states(3), "float64")


def equal_tokens():
    """Return states that are the same at each token, as those of a prompt of one word without positions."""
    return states(3)[:, :1].repeat(1, 6, 1)


def assert_measured_right(net, x, dtype):
    ds = measured(net, x, dtype, witness="off", tokens=[0, -1])
    assert_right(ds, net, x, CLOSE[dtype], [0, -1])
    return ds


# A row alone has their values where all tokens are equal, and not their derivative.
OF_EQUAL_TOKENS = {
    "mean": lambda x: torch.tanh(x.mean(1, keepdim=True)) + 0 * x,
    "distance from the mean": lambda x: x - x.mean(1, keepdim=True),
    "token before": lambda x: torch.tanh(x.roll(1, 1)),
    "attention": lambda x: (x @ x.mT).softmax(-1) @ x,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", OF_EQUAL_TOKENS)
@pytest.mark.parametrize("opened", range(L))
def test_one_block_alone_that_mixes_equal_tokens_is_right(opened, path, dtype):
    ds = assert_measured_right(gated(OF_EQUAL_TOKENS[path], opened), equal_tokens(), dtype)
    assert str(opened + 1) in json.loads(ds.attrs["fallbacks"])


class Numbered(Block):
    """A block that mixes tokens where `mixes(block)`."""

    def __init__(self, mixes, number):
        super().__init__()
        self.what, self.layer_idx, self.scale = [mixes], number, 0.6 + 0.2 * number

    def forward(self, x):
        x = super().forward(x)
        return x + torch.tanh(x.mean(1, keepdim=True)) if self.what[0](self) else x


# What the code of one class reads
READS = {
    "its number": lambda block: block.layer_idx == 3,
    "whether its number is even": lambda block: block.layer_idx % 2 == 1,
    "whether a floating number is above a threshold": lambda block: block.scale > 1.1,
    "its number, from a variable of the module": lambda block: block.layer_idx in SPECIAL,
}
SPECIAL = {2}


@pytest.mark.parametrize("reads", READS)
def test_blocks_of_a_class_whose_code_reads_what_differs_are_right(reads):
    torch.manual_seed(0)
    net = nn.Sequential(*(Numbered(READS[reads], l) for l in range(L))).eval()
    assert_measured_right(net, equal_tokens(), "float64")


@pytest.mark.parametrize("opened", range(L))
def test_pairs_of_rows_of_one_block_alone_that_mixes_equal_tokens_are_right(monkeypatch, opened):
    options = dict(
        measures=("coupling", "trajectory", "tokenwise"), witness="off", pair_tokens=[1, 4]
    )
    net, x = gated(OF_EQUAL_TOKENS["token before"], opened), equal_tokens()
    found = measured(net, x, "float64", **options)
    monkeypatch.setattr(tracker.jacobians.rows, "PATHS", {})
    expected = measured(net, x, "float64", **options)
    assert not expected.diagnostics_sliced.any()
    for name in found.data_vars:
        if "tokenwise" in name:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-9)
