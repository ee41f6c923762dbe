"""Jacobians are compared with differences of values: what is no fault is measured. Planted faults: `test_faults`."""

import pytest
import torch
from torch import nn

import tracker
from tests.support.central_differences import assert_right
from tests.support.refused import refused
from tests.support.sequences import DTYPES, Block, D, detached_branch, measured, network, states

STATES = states()


class Reversible(nn.Module):
    """A block of a reversible network: it builds no graph, because its sequence computes it again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.f, self.g = (
            nn.MultiheadAttention(D // 2, 2, batch_first=True),
            nn.Linear(D // 2, D // 2),
        )

    def forward(self, x):
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            a = a + self.f(b, b, b, need_weights=False)[0]
            b = b + self.g(a).tanh()
        return torch.cat([a, b], -1)


def in_inference_mode(mlp, x):
    with torch.inference_mode():
        y = mlp(x)
    return y.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [lambda: network(in_inference_mode), lambda: network(block=Reversible)],
    ids=["inference_mode", "reversible"],
)
def test_blocks_that_switch_gradients_off_are_measured_as_what_they_compute(make, dtype):
    net = make()
    ds = measured(net, STATES, dtype)
    assert ds.attrs["derivative"] == "checked" and ds.attrs["independent_checks"] == "{}"
    assert_right(ds, net, STATES, 1e-8 if dtype == "float64" else 1e-4)


def hidden(mlp, x):
    return mlp(x.data)


def single(added):
    """Return code that runs in float32 alone, as nanochat's does."""

    def in_float32(mlp, x):
        assert x.dtype == torch.float32
        return added(mlp, x)

    return in_float32


def test_code_that_does_not_run_in_float64_is_compared_in_float32():
    plain = measured(network(single(lambda mlp, x: mlp(x))), STATES, "float32")
    assert plain.attrs["independent_checks"] == "{}"
    with pytest.warns(UserWarning, match="detaches tensors"):
        measured(network(single(detached_branch)), STATES, "float32")
    with refused(r"block 1 \(0\): autograd does not give .*\.data"):
        measured(network(single(hidden)), STATES, "float32")


def test_autograd_is_measured_on_request():
    ds = measured(network(hidden), STATES, derivative="autograd")
    assert ds.attrs["derivative"] == "autograd" and ds.diagnostics_independent_error.isnull().all()


def rounding_inside(mlp, x):
    """Code that computes in float32, whatever it is given."""
    return 3 * mlp(nn.functional.layer_norm(x.float(), (D,)).to(x))


def test_rounding_inside_is_no_disagreement():
    ds = measured(network(rounding_inside), STATES)
    assert ds.attrs["independent_checks"] == "{}" and ds.diagnostics_independent_error.max() < 3e-3


def test_kinks_are_no_disagreement():
    """The units of a ReLU change their sign between the points of a difference with too large a step."""
    torch.manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        for _ in range(4)
    ]
    ds = tracker.measure(nn.Sequential(*layers), torch.randn(2, 20, 64), k=4)
    assert ds.attrs["independent_checks"] == "{}" and ds.diagnostics_independent_error.max() < 3e-3


class Kinked(Block):
    """A block with some ReLUs whose arguments are 0 at one state, but for rounding."""

    def __init__(self, units):
        super().__init__()
        self.units, self.out, self.at = units, nn.Linear(units, D, bias=False), torch.zeros(D)

    def forward(self, x):
        x = super().forward(x)
        arguments = (x - self.at) @ self.other.weight[: self.units].mT
        return x + self.out(arguments.relu())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("units", "how"), [(1, "{}"), (D, "forward mode")])
def test_a_state_at_a_kink_is_no_disagreement(units, how, seed):
    """Central differences of any step are the mean of two derivatives there, and J is that of one side for each unit."""
    torch.manual_seed(seed)
    net = nn.Sequential(*(Kinked(units) for _ in range(2))).double().eval()
    x = STATES.double()
    with torch.no_grad():
        for block in net:
            block.at = Block.forward(block, x)[0, -1]
            x = block(x)
    assert how in measured(net, STATES.double()).attrs["independent_checks"]
