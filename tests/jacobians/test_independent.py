"""Jacobians are compared with differences of values: planted faults are detected, right blocks pass."""

import re

import pytest
import torch
from torch import nn

import tracker
from tests.central_differences import assert_right
from tests.models import FAMILIES, build
from tracker.common.errors import UsageError
from tracker.jacobians.independent import _error, differ_from_values

D = 16
STATES = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return self.attn(y, y, y, need_weights=False)[0]


class Block(nn.Module):
    """A block whose MLP goes through `through`."""

    def __init__(self, through):
        super().__init__()
        self.attention, self.norm, self.mlp, self.through = (
            Attention(),
            nn.LayerNorm(D),
            nn.Linear(D, D),
            through,
        )

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.through(self.mlp, self.norm(x))


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


def without_gradients(f, x):
    with torch.no_grad():
        return f(x).tanh()


def in_inference_mode(f, x):
    with torch.inference_mode():
        y = f(x).tanh()
    return y.clone()


class Right(torch.autograd.Function):
    """A right backward, and no forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class Wrong(Right):
    """tanh with a backward that is 1 % too large."""

    @staticmethod
    def backward(ctx, g):
        return 1.01 * g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class WrongWithRightForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        return 1.01 * g * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, t):
        return t * (1 - ctx.saved_tensors[0] ** 2)


class WrongInBothModes(WrongWithRightForwardMode):
    @staticmethod
    def backward(ctx, g):
        return 2 * g * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, t):
        return 2 * t * (1 - ctx.saved_tensors[0] ** 2)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx, g):
        return g


def rounded(f, x):
    y = f(x)
    return y + ((8 * y).round() / 8 - y).detach()


FAULTS = {  # what the message has to name
    "wrong backward": (lambda f, x: Wrong.apply(f(x)), "autograd function Wrong"),
    "wrong backward, right forward mode": (
        lambda f, x: WrongWithRightForwardMode.apply(f(x)),
        "function WrongWithRightForwardMode",
    ),
    "wrong in both modes": (lambda f, x: WrongInBothModes.apply(f(x)), "function WrongInBothModes"),
    "straight through": (lambda f, x: StraightThrough.apply(f(x)), "function StraightThrough"),
    "data": (lambda f, x: f(x.data).tanh(), ".data"),
    "NumPy": (lambda f, x: f(torch.from_numpy(x.detach().numpy())).tanh(), "numpy"),
    "item": (lambda f, x: f(x) * x.abs().mean().item(), "item()"),
}
RIGHT = {  # how it is known, if not by differences
    "plain": (lambda f, x: f(x).tanh(), None),
    "no gradients": (without_gradients, None),
    "inference mode": (in_inference_mode, None),
    "right backward": (lambda f, x: Right.apply(f(x)), None),
    "detached branch": (lambda f, x: f(x.detach()).tanh(), "differences, detached"),
    "rounded, straight through by detach": (rounded, "differences, detached"),
}
DTYPES = ["float32", "float64"]


def model(through):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(through) for _ in range(2))).eval()


def measured(net, dtype="float64", **options):
    return tracker.measure(
        net, STATES, dtype=dtype, k=3, blocks=["0", "1"], keep="jacobian", **options
    )


def assert_known(ds, how):
    """Assert how derivatives were checked; None: all by differences."""
    assert (
        (how in ds.attrs["independent_checks"]) if how else ds.attrs["independent_checks"] == "{}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_and_named(name, dtype):
    through, cause = FAULTS[name]
    with pytest.raises(UsageError, match=r"block 1 \(0\)") as refused:
        measured(model(through), dtype)
    assert cause in str(refused.value)


# A step of a rounding makes the value depend on the arithmetic
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_no_fault_is_measured(name, dtype):
    through, how = RIGHT[name]
    ds = measured(model(through), dtype)
    assert ds.attrs["derivative"] == "checked"
    assert_known(ds, how)
    if how is None:
        assert ds.diagnostics_independent_error.max() < (3e-3 if dtype == "float32" else 1e-5)


def single(through):
    """Return code that runs in float32 alone, as nanochat's does."""

    def in_float32(f, x):
        assert x.dtype == torch.float32
        return through(f, x)

    return in_float32


def rounding_inside(f, x):
    """Code that computes in float32, whatever it is given."""
    return 3 * f(nn.functional.layer_norm(x.float(), (D,)).to(x))


def test_rounding_inside_is_no_disagreement():
    ds = measured(model(rounding_inside), "float64")
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
        super().__init__(lambda mlp, x: mlp(x))
        self.units, self.out, self.at = units, nn.Linear(units, D, bias=False), torch.zeros(D)

    def forward(self, x):
        x = super().forward(x)
        arguments = (x - self.at) @ self.mlp.weight[: self.units].mT
        return x + self.out(arguments.relu())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("units", "how"), [(1, None), (D, "forward mode")])
def test_a_state_at_a_kink_is_no_disagreement(units, how, seed):
    """Central differences of any step are the mean of two derivatives there, and J is that of one side for each unit."""
    torch.manual_seed(seed)
    net = nn.Sequential(*(Kinked(units) for _ in range(2))).double().eval()
    x = states = STATES.double()
    with torch.no_grad():
        for block in net:
            block.at = Block.forward(block, x)[0, -1]
            x = block(x)
    ds = tracker.measure(net, states, k=3, tokens="last", dtype="float64")
    assert_known(ds, how)


SMALL = {
    "wrong backward",
    "wrong backward, right forward mode",
    "item",
}  # errors of 1 %; differences in float32 show 5 %


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted((RIGHT | FAULTS).keys() - SMALL))
def test_code_that_does_not_run_in_float64_is_compared_in_float32(name):
    through, how = (RIGHT | FAULTS)[name]
    if name in FAULTS:
        with pytest.raises(
            UsageError, match=r"block 1 \(0\): autograd does not give .*" + re.escape(how)
        ):
            measured(model(single(through)), "float32")
        return
    ds = measured(model(single(through)), "float32")
    assert_known(ds, how)


@pytest.mark.parametrize(
    "net",
    [
        lambda: model(without_gradients),
        lambda: model(in_inference_mode),
        lambda: nn.Sequential(Reversible(), Reversible()),
    ],
    ids=["no_grad", "inference_mode", "reversible"],
)
def test_blocks_that_switch_gradients_off_are_measured_as_what_they_compute(net):
    net = net()
    assert_right(measured(net), net, STATES, 1e-8)


@pytest.mark.parametrize("name", ["wrong backward", "data"])
def test_autograd_is_measured_on_request(name):
    ds = measured(model(FAULTS[name][0]), derivative="autograd")
    assert ds.attrs["derivative"] == "autograd" and ds.diagnostics_independent_error.isnull().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_with_differences(name):
    net, inputs = build(name)
    ds = tracker.measure(net, inputs, k=2, tokens=[1, -1])
    assert ds.attrs["independent_checks"] == "{}"
    assert ds.diagnostics_independent_error.max() < 3e-3


@pytest.mark.parametrize("residual", [True, False])
def test_errors_are_relative_to_the_jacobian_without_an_identity_that_another_token_does_not_have(
    residual,
):
    x = torch.randn(2, D, generator=torch.Generator().manual_seed(2)).double()
    J = 1e-4 * torch.randn(2, D, D, generator=torch.Generator().manual_seed(3)).double()
    whole = J + residual * torch.eye(D)
    f = lambda x: (whole @ x[..., None]).squeeze(-1)  # noqa: E731
    off = J * torch.tensor([1, 1.01])[:, None, None]
    errors = differ_from_values(f, x, off, residual, 1e-4)
    assert errors[0] < 1e-6 and float(errors[1]) == pytest.approx(0.01 / 1.01, rel=1e-3)


def test_the_error_is_relative_to_the_derivative_without_the_identity():
    """With an identity beside a small J, whose derivative along v is wrong by a known vector."""
    random = torch.Generator().manual_seed(2)
    u, v, wrong = (
        torch.randn(size, generator=random, dtype=torch.float64)
        for size in ((4, 3, D), (3, D), (3, D))
    )
    J = 0.01 * torch.randn(3, D, D, generator=random, dtype=torch.float64)
    Jv, JTu = torch.einsum("rde,re->rd", J, v), torch.einsum("prd,rde->pre", u, J)
    found = _error(v + Jv + 1e-3 * wrong, u, v, u + JTu, True)
    sizes = torch.maximum((Jv + 1e-3 * wrong).norm(dim=-1), JTu.square().sum(-1).mean(0).sqrt())
    expected = (1e-3 * u * wrong).sum(-1).square().mean(0).sqrt() / sizes
    torch.testing.assert_close(found, expected)
