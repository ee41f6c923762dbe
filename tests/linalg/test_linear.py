"""Linear layers by oneDNN and rows of an identity against the same in float64, and what is left alone."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.dtypes import EACH_DTYPE
from tests.support.rounding import rounding
from tracker.linalg import linear
from tracker.linalg.jacobian import dense_jacobian, linearize
from tracker.linalg.linear import FrozenLinear, identity_matrix, rows_of_identity

# Two layers and what is between them, of values up to 1 or 2
LAYERS = rounding(torch.float32, operations=10)


@pytest.fixture
def products(monkeypatch):
    """How many products oneDNN was given."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    count = []
    product = linear.onednn_linear
    monkeypatch.setattr(linear, "onednn_linear", lambda *a: count.append(1) or product(*a))
    return count


@pytest.fixture
def picked(monkeypatch):
    """Which rows of an identity each product was found to be of, or None."""
    found = []
    find = linear.rows_of_identity
    monkeypatch.setattr(linear, "rows_of_identity", lambda x: found.append(find(x)) or found[-1])
    return found


def network(dtype=torch.float32):
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12, bias=False)).to(dtype)
    return made.requires_grad_(False)


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_values_products_and_jacobians(chunk, products):
    x = torch.randn(3, 12)
    exact = linearize(network(torch.float64), x.double())
    with FrozenLinear():
        found = linearize(network(), x)
    before = len(products)
    assert before == 2, "both layers"
    torch.testing.assert_close(found.y.double(), exact.y, atol=LAYERS, rtol=0)
    J = dense_jacobian(exact, 12)
    torch.testing.assert_close(dense_jacobian(found, chunk).double(), J, atol=LAYERS, rtol=0)
    assert len(products) > before, "also backward"


@pytest.mark.parametrize("rows", [8, 16, 30])
def test_few_rows(rows, products, monkeypatch):
    """As few rows as `FEW` are multiplied by the weights' rows."""
    monkeypatch.setattr(linear, "LARGE", 1)
    x, u = torch.randn(rows, 12), torch.randn(2, rows, 12)
    exact = linearize(network(torch.float64), x.double())
    J = dense_jacobian(exact, 12)
    with FrozenLinear():
        found = linearize(network(), x)
    torch.testing.assert_close(found.y.double(), exact.y, atol=LAYERS, rtol=0)
    expected = torch.einsum("rij,cri->crj", J, u.double())
    torch.testing.assert_close(found.pullback(u).double(), expected, atol=LAYERS, rtol=0)


@pytest.mark.alone
def test_strides_that_onednn_is_slow_with():
    """Columns of a wider weight: handed on as they are, they take over a second."""
    W, x = torch.randn(2048, 4096), torch.randn(16, 4096)
    started = time.perf_counter()
    with FrozenLinear():
        product = F.linear(x[:, ::2], W[:, 1000:3048])
    assert time.perf_counter() - started < 0.5
    torch.testing.assert_close(product, x[:, ::2] @ W[:, 1000:3048].T, atol=1e-3, rtol=1e-4)


def test_rows_and_weights_that_are_not_contiguous(products):
    x = torch.randn(7, 5, 2).movedim(0, -1).movedim(0, -2)[..., ::2]
    W = torch.randn(9, x.shape[-1] * 2)[:, ::2]
    with FrozenLinear():
        torch.testing.assert_close(F.linear(x, W), torch.einsum("...i,oi->...o", x, W))
    assert products


def ones(dtype=None, **of_weight):
    return torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype, **of_weight)


# Operands, and what else differs; not by oneDNN's context manager, which leaves the precision's switches changed
NOT_ONEDNNS = {
    "float64": (ones(torch.float64), {}),
    "bfloat16": (ones(torch.bfloat16), {}),
    "a weight that learns": (ones(requires_grad=True), {}),
    "a vector": ((torch.ones(2, 3), torch.ones(3)), {}),
    "autocast": (ones(), {}),
    "turned off": (ones(), {"enabled": False}),
    "built without": (ones(), {"is_available": lambda: False}),
}


@pytest.mark.parametrize("what", NOT_ONEDNNS)
def test_what_is_not_onednns(what, products, monkeypatch):
    (x, weight), changes = NOT_ONEDNNS[what]
    for name, value in changes.items():
        monkeypatch.setattr(torch.backends.mkldnn, name, value)
    expected = x @ (weight.T if weight.dim() == 2 else weight)
    with FrozenLinear(), torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        product = F.linear(x, weight)
    assert (product.dtype == torch.bfloat16) == (what in ("autocast", "bfloat16"))
    torch.testing.assert_close(product, expected.to(product))
    assert not products


@EACH_DTYPE
def test_products_of_rows(dtype, products, monkeypatch):
    monkeypatch.setattr(linear, "LARGE", 1)
    M = torch.randn(9, 7, dtype=dtype)
    x = torch.randn(16, 7, dtype=dtype)
    y = torch.randn(16, 9, dtype=dtype)
    forward, back = linear.row_products(M)
    for _ in range(3):
        torch.testing.assert_close(forward(x), x @ M.T)
        torch.testing.assert_close(back(y), y @ M)
    X, Y = torch.randn(2, 3, 8, dtype=dtype), torch.randn(2, 5, 8, dtype=dtype)
    torch.testing.assert_close(linear.inner_products(X, Y), torch.einsum("bmd,bkd->bmk", X, Y))
    assert bool(products) == (dtype == torch.float32)


class Residual(nn.Module):
    """Two branches and what they are added to, as in GPT-NeoX; or one after the other."""

    def __init__(self, d: int, parallel: bool, conv1d: bool, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(5)
        layer = (lambda i, o: Conv1D(o, i)) if conv1d else nn.Linear
        self.branches = nn.ModuleList(
            nn.Sequential(layer(d, 20), nn.GELU(), layer(20, d)) for _ in range(2)
        )
        self.parallel = parallel
        self.to(dtype).requires_grad_(False)

    def forward(self, x):
        first, second = self.branches
        return x + first(x) + second(x) if self.parallel else (y := x + first(x)) + second(y)


@EACH_DTYPE
@pytest.mark.parametrize("conv1d", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("parallel, saved", [(True, 2), (False, 1)], ids=["parallel", "in turn"])
@pytest.mark.parametrize("rows, chunk", [(1, 12), (1, 5), (1, 1), (3, 12), (3, 5)])
def test_an_identity_passes_the_last_layers_without_arithmetic(
    rows, chunk, parallel, saved, conv1d, dtype, picked
):
    x = torch.randn(rows, 12, dtype=dtype)
    exact = linearize(Residual(12, parallel, conv1d, torch.float64), x.double())
    expected = dense_jacobian(exact, 12)
    assert not any(picked)
    with FrozenLinear():
        found = linearize(Residual(12, parallel, conv1d, dtype), x)
    J = dense_jacobian(found, chunk)
    torch.testing.assert_close(J.double(), expected, atol=rounding(dtype), rtol=0)
    chunks = [slice(start, min(start + chunk, 12)) for start in range(0, 12, chunk)]
    assert [rows for rows in picked if rows] == [rows for rows in chunks for _ in range(saved)]


class Doubled(torch.autograd.Function):
    """Writes into the gradient that it is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_are_not_lent_out_as_gradients(rows):
    W = torch.randn(6, 6)
    before = W.clone()
    with FrozenLinear():
        found = linearize(lambda x: x + F.linear(Doubled.apply(x), W), torch.randn(rows, 6))
    J = dense_jacobian(found, 6)
    assert torch.equal(W, before)
    torch.testing.assert_close(J, (torch.eye(6) + 2 * W).expand(rows, -1, -1))


def test_addmm_is_as_strict_as_it_was():
    x, W = torch.randn(2, 3), torch.randn(3, 4)
    with FrozenLinear():
        for bias in (torch.randn(4), torch.randn(2, 4)):
            torch.testing.assert_close(torch.addmm(bias, x, W), x @ W + bias)
        for bias, x_ in (
            (torch.randn(5, 4), x),
            (torch.randn(4), x[None]),
            (torch.randn(1, 2, 4), x),
        ):
            with pytest.raises(RuntimeError):
                torch.addmm(bias, x_, W)


def test_complex_and_meta_are_left_alone(monkeypatch):
    monkeypatch.setattr(linear.FrozenProduct, "forward", None)
    with FrozenLinear():
        x, W = torch.randn(2, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
        torch.testing.assert_close(F.linear(x, W), x @ W.T)
        assert F.linear(x.to("meta"), W.to("meta")).shape == (2, 4)


def test_rows_of_an_identity_are_told_from_others():
    I = identity_matrix(6, torch.ones(1, dtype=torch.float64))
    assert rows_of_identity(I) == slice(0, 6) and rows_of_identity(I[2:5]) == slice(2, 5)
    assert rows_of_identity(I[1:3, None].expand(-1, 4, -1)) == slice(1, 3)
    assert rows_of_identity(I[4:5].expand(1, 6)) == slice(4, 5)
    others = [
        I[:, :5],
        I[:, 1:],
        I[::2],
        I[:2].expand(3, 2, 6),
        I.T,
        I.view(-1)[1:31].view(5, 6),
        I[0],
        I.clone(),
        I + 0,
    ]
    others += [
        I.view(torch.int64),
        torch.eye(6),
        I[:, None].expand(-1, 2, -1).transpose(0, 1),
        torch._neg_view(I),
    ]
    assert [rows_of_identity(x) for x in others] == [None] * len(others)
    I[0, 1] = 1
    assert rows_of_identity(I) is None, "no longer one"
    address = I.untyped_storage().data_ptr()
    del I, others
    assert address not in linear.identities, "forgotten with its memory"


@pytest.mark.parametrize(
    "axes",
    [(1, None, None), (None, 2, None), (None, None, 0), (1, 2, 0), (None, 2, 0), (1, None, 0)],
    ids=str,
)
def test_batches_of_inputs_weights_and_biases(axes):
    """Weights of their own for each are those of experts that a block runs side by side."""
    batches = (torch.randn(5, 3, 4), 1), (torch.randn(6, 4, 3), 2), (torch.randn(3, 6), 0)
    given = [
        t if axis is not None else t.select(of_batch, 0)
        for (t, of_batch), axis in zip(batches, axes, strict=True)
    ]
    expected = torch.vmap(F.linear, axes)(*given)
    with FrozenLinear():
        torch.testing.assert_close(torch.vmap(F.linear, axes)(*given), expected)


@pytest.mark.parametrize("from_x", [False, True], ids=["constant", "from x"])
def test_bias(from_x):
    W, constant = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def f(x):
        return F.linear(x, W, x[0].sin() if from_x else constant)

    x, v = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(f, x)[0, :, 0]
    with FrozenLinear():
        found = linearize(f, x, v)
    torch.testing.assert_close(found.y, f(x))
    torch.testing.assert_close(dense_jacobian(found, 6)[0], expected)
    torch.testing.assert_close(found.tangent, v @ expected.T)


def test_a_tangent_allocates_nothing_of_a_weights_size():
    W, x = torch.randn(512, 512), torch.randn(1, 512)
    with torch.profiler.profile(profile_memory=True) as profile, FrozenLinear():
        linearize(lambda x: F.linear(x, W), x, torch.randn(1, 512))
    assert max(event.cpu_memory_usage for event in profile.events()) < W.nbytes
