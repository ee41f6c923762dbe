"""Every requested row is compared with differences of its own values: faults of single rows are found, sound ones measured."""

import json

import pytest
import torch
import transformers
from torch import nn

import tracker
import tracker.jacobians.rows
from tests.support.central_differences import assert_right, by_differences
from tests.support.draws import integers
from tests.support.refused import refused
from tests.support.sequences import DTYPES, Block, D, detached_branch, measured, network, states

CLOSE = {"float32": 1e-4, "float64": 1e-7}


def near_a_tie(distance):
    """Return a router whose score, the first coordinate, is so far from a tie in a state's last row, and the state.

    The score is below 0, and the step of the difference, whose first coordinate is positive, crosses the tie.
    """
    x = states()
    x[0, -1, 0] = -distance
    return lambda mlp, x: torch.where(x[..., :1] > 0, mlp(x), 1 - mlp(x)), x


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7, 1e-12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jump_beside_a_row_convicts_nothing(distance, dtype):
    route, x = near_a_tie(distance)

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.mlp = nn.Identity(), nn.Sequential(nn.Linear(D, D), nn.Tanh())

        def forward(self, x):
            return x + route(self.mlp, x)

    net = network(block=Routed)
    ds = measured(net, x, dtype)
    # Where every step ahead crosses the jump, the difference behind agrees.
    assert ds.attrs["independent_checks"] == "{}"
    if distance < 1e-9:
        x[0, -1, 0] = -1e-3  # for the central differences of this test
    assert_right(ds, net, x, 1e-3, h=1e-9)


@pytest.mark.parametrize("positions", [[-1], "all"], ids=str)
@pytest.mark.parametrize(("scale", "reason"), [(1, "{}"), (300, "its code amplifies rounding")])
def test_weights_too_large_for_differences_are_measured(scale, positions, reason):
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(scale)
    ids = integers(3, 97, 4, 9)
    ds = tracker.measure(model, ids, k=4, tokens=positions)
    assert reason in ds.attrs["independent_checks"] and ds.diagnostics_sliced.all()


def shrunk(mlp, x):
    y = mlp(x)
    return 0.1 * y + 0.9 * y.detach()


def straight_through(mlp, x):
    y = mlp(x)
    return y + ((8 * y).round() / 8 - y).detach()


DETACHING = [detached_branch, shrunk, straight_through]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", DETACHING)
@pytest.mark.parametrize("positions", [[-1], "all"], ids=str)
def test_a_detached_branch_is_reported_with_its_size(added, positions, dtype):
    net, x = network(added), states(2)
    with pytest.warns(UserWarning, match="detaches tensors") as warned:
        ds = measured(net, x, dtype, tokens=positions)
    assert (
        sum("detaches tensors" in str(one.message) for one in warned) == 1
        and ds.diagnostics_sliced.all()
    )
    checks = json.loads(ds.attrs["independent_checks"])
    assert set(checks) == {"1", "2"}
    errors = ds.diagnostics_independent_error
    for l, reported in enumerate(checks.values()):
        size = float(reported.split("changes J v by ")[1])
        found = float(errors.isel(layer=l).max())
        assert size == pytest.approx(found, rel=0.1)
        J = torch.as_tensor(ds.jacobian.values[0, -1, l]).double()
        net = net.double()
        true = by_differences(net[l], net[:l](x.double()), (0, -1))
        assert size == pytest.approx(float((J - true).norm() / true.norm()), rel=1) and size > 0.1
        net = net.float()


class Shaped(nn.Module):
    """Adds the identity over positions to the weights of attention: a single row has all of its rows."""

    def __init__(self):
        super().__init__()
        self.attention, self.qk = nn.Identity(), nn.Linear(D, 2 * D)
        self.register_buffer("diagonal", torch.eye(6))

    def forward(self, x):
        query, key = self.qk(x).unsqueeze(1).chunk(2, -1)
        return x + self._attn(query, key, x.unsqueeze(1))[0].squeeze(1)

    def _attn(self, query, key, value, attention_mask=None, head_mask=None):  # as in GPT-2
        weights = (query @ key.mT).softmax(-1)
        weights = weights + self.diagonal[: key.shape[-2], : key.shape[-2]]
        return weights @ value, weights


@pytest.mark.filterwarnings("ignore:.*full sequence")
@pytest.mark.parametrize("samples", [1, 2])
def test_an_attention_that_adds_a_matrix_over_positions(samples):
    net, x = network(block=Shaped), states(samples)
    assert_right(measured(net, x), net, x, 1e-7)


class Autocast(Block):
    """Computes in 16 bits inside: all of it, its last part, or nothing."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.first):
            y = self.norm(x)
            x = x + self.attn(y, y, y, need_weights=False)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.last):
            return x + torch.tanh(x @ self.other.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_autocast_in_a_block_is_measured_or_refused_with_a_reason(samples, whole, dtype):
    net, x = network(whole, True, block=Autocast), states(samples)
    if whole and dtype == "float32":  # its attention differs from kernel to kernel
        with refused("rounds to less than float32; remove that, or give dtype='float64'"):
            measured(net, x, dtype)
        return
    ds = measured(net, x, dtype)
    exact = network(False, False, block=Autocast)
    assert_right(ds, exact, x, 0.03 if dtype == "float32" else 1e-7)


@pytest.mark.filterwarnings("ignore:.*full sequence")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jacobian_that_was_formed_wrongly_in_one_row_is_not_used(dtype, monkeypatch):
    formed = tracker.jacobians.rows.dense_jacobian

    def wrong(pullback, y, *given):
        J = formed(pullback, y, *given)
        if len(y) == 6:  # single rows: in the full sequence they are formed one by one
            J[3] += 0.1 * J[3].flip(0)
        return J

    net, x = network(), states()
    monkeypatch.setattr("tracker.jacobians.rows.dense_jacobian", wrong)
    ds = measured(net, x, dtype, tokens="all")
    assert not ds.diagnostics_sliced.any()
    assert_right(ds, net, x, CLOSE[dtype], "all")
