"""Every requested row is compared with differences of its own values: sound rows are measured, others are not used."""

import pytest
import torch
import transformers
from torch import nn

import tracker
import tracker.jacobians.rows
from tests.support.central_differences import assert_right
from tests.support.draws import integers, normal
from tests.support.home_made import WIDTH, Flat

CLOSE = {"float32": 1e-4, "float64": 1e-7}
STATES = normal(1, 6, WIDTH)


class Routed(nn.Module):
    """Jumps where the first coordinate is 0."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Identity(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return x + torch.where(x[..., :1] > 0, self.mlp(x), 1 - self.mlp(x))


class Kinked(Flat):
    """A block with some ReLUs whose arguments are 0 at one state, but for rounding."""

    def __init__(self, units):
        super().__init__()
        self.at = torch.zeros(WIDTH)
        self.kink, self.to_units = nn.Linear(units, WIDTH, bias=False), nn.Linear(WIDTH, units)

    def forward(self, x):
        x = super().forward(x)
        arguments = (x - self.at) @ self.to_units.weight.mT
        return x + self.kink(arguments.relu())


def network(make, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(make() for _ in range(2))).eval()


def measured(net, x, dtype="float64", **options):
    return tracker.measure(net, x, dtype=dtype, k=3, blocks=["0", "1"], keep="jacobian", **options)


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7, 1e-12])
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_jump_beside_a_row_convicts_nothing(distance, dtype):
    """The step of the difference, whose first coordinate is positive, crosses the jump."""
    net, x = network(Routed), STATES.clone()
    x[0, -1, 0] = -distance
    ds = measured(net, x, dtype)
    # Where every step ahead crosses the jump, the difference behind agrees.
    assert ds.attrs["independent_checks"] == "{}"
    if distance < 1e-9:
        x[0, -1, 0] = -1e-3  # for the central differences of this test
    assert_right(ds, net, x, 1e-3, h=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("units", "how"), [(1, "{}"), (WIDTH, "forward mode")])
def test_a_state_at_a_kink_is_no_disagreement(units, how, seed):
    """Central differences of any step are the mean of two derivatives there, and J is that of one side for each unit."""
    net, x = network(lambda: Kinked(units), seed).double(), STATES.double()
    with torch.no_grad():
        for block in net:
            block.at = Flat.forward(block, x)[0, -1]
            x = block(x)
    assert how in measured(net, STATES.double()).attrs["independent_checks"]


@pytest.mark.parametrize(("scale", "reason"), [(1, "{}"), (300, "its code amplifies rounding")])
def test_weights_too_large_for_differences_are_measured(scale, reason):
    """Whatever the weights are; whether rounding hides a row depends on them."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    reasons = []
    for seed in range(10):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(scale if "proj" in name else 1)
        ds = tracker.measure(model, integers(3, 97, 2, 9), k=4, tokens="all")
        assert ds.diagnostics_sliced.all()
        reasons.append(reason in ds.attrs["independent_checks"])
    assert all(reasons) if scale == 1 else any(reasons)


@pytest.mark.filterwarnings("ignore:.*full sequence")
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_jacobian_that_was_formed_wrongly_in_one_row_is_not_used(dtype, monkeypatch):
    formed = tracker.jacobians.rows.dense_jacobian

    def wrong(pullback, y, *given):
        J = formed(pullback, y, *given)
        if len(y) == 6:  # single rows: in the full sequence they are formed one by one
            J[3] += 0.1 * J[3].flip(0)
        return J

    net = network(Flat)
    monkeypatch.setattr("tracker.jacobians.rows.dense_jacobian", wrong)
    ds = measured(net, STATES, dtype, tokens="all")
    assert not ds.diagnostics_sliced.any()
    assert_right(ds, net, STATES, CLOSE[dtype], "all")
