"""Linear layers by oneDNN against the same in float64, and what is left alone."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tracker import linear
from tracker.jacobian import dense_jacobian, linearize
from tracker.linear import LinearByOneDNN

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture
def products(monkeypatch):
    """How many products oneDNN was given."""
    count = []
    forward = linear._Product.forward
    monkeypatch.setattr(linear._Product, "forward", staticmethod(lambda *a: count.append(1) or forward(*a)))
    return count


def network(dtype=torch.float32):
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12, bias=False)).to(dtype)
    return made.requires_grad_(False)


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_values_products_and_jacobians(chunk, products):
    x = torch.randn(3, 12)
    exact = linearize(network(torch.float64), x.double())
    with LinearByOneDNN():
        found = linearize(network(), x)
    before = len(products)
    assert before == 2, "both layers"
    torch.testing.assert_close(found.y.double(), exact.y, atol=1e-6, rtol=0)
    J = dense_jacobian(exact.pullback, exact.y, 12)
    torch.testing.assert_close(dense_jacobian(found.pullback, found.y, chunk).double(), J, atol=1e-6, rtol=0)
    v = torch.randn(chunk, 3, 12)
    expected = torch.einsum("rij,crj->cri", J, v.double())
    torch.testing.assert_close(found.pushforward(v).double(), expected, atol=2e-6, rtol=0)
    assert len(products) > before, "also backward"


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_few_rows(rows, products, monkeypatch):
    """Up to `FEW` rows, by the weights' rows, which backward are copied, to where earlier copies were."""
    monkeypatch.setattr(linear, "LARGE", 1)
    x, spare, addresses = torch.randn(rows, 12), [], []
    exact = linearize(network(torch.float64), x.double())
    J = dense_jacobian(exact.pullback, exact.y, 12)
    for _ in range(2):
        with LinearByOneDNN(spare):
            found = linearize(network(), x)
        torch.testing.assert_close(found.y.double(), exact.y, atol=1e-6, rtol=0)
        for _ in range(3):
            u = torch.randn(2, rows, 12)
            expected = torch.einsum("rij,cri->crj", J, u.double())
            torch.testing.assert_close(found.pullback(u).double(), expected, atol=2e-6, rtol=0)
            expected = torch.einsum("rij,crj->cri", J, u.double())
            torch.testing.assert_close(found.pushforward(u).double(), expected, atol=2e-6, rtol=0)
        assert not spare, "in use"
        del found
        addresses.append({memory.data_ptr() for memory in spare})
    assert len(addresses[0]) == 2 and addresses[0] == addresses[1], "W^T of both layers, and again there"


def test_strides_that_onednn_is_slow_with():
    """Columns of a wider weight: handed on as they are, they take over a second."""
    W, x = torch.randn(2048, 4096), torch.randn(16, 4096)
    started = time.perf_counter()
    with LinearByOneDNN():
        product = F.linear(x[:, ::2], W[:, 1000:3048])
    assert time.perf_counter() - started < 0.5
    torch.testing.assert_close(product, x[:, ::2] @ W[:, 1000:3048].T, atol=1e-3, rtol=1e-4)


def test_rows_and_weights_that_are_not_contiguous(products):
    x = torch.randn(7, 5, 2).movedim(0, -1).movedim(0, -2)[..., ::2]
    W = torch.randn(9, x.shape[-1] * 2)[:, ::2]
    with LinearByOneDNN():
        torch.testing.assert_close(F.linear(x, W), torch.einsum("...i,oi->...o", x, W))
    assert products


@pytest.mark.parametrize(
    "x, weight",
    [
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)),
        (torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)),
        (torch.ones(2, 3), torch.ones(3)),
    ],
    ids=["float64", "bfloat16", "a weight that learns", "a vector"],
)
def test_what_is_left_alone(x, weight, products):
    with LinearByOneDNN():
        torch.testing.assert_close(F.linear(x, weight), x @ (weight.T if weight.dim() == 2 else weight))
    assert not products


def test_weights_of_their_own_for_each():
    """As of experts that a block runs side by side."""
    W, x = torch.randn(5, 4, 3), torch.randn(5, 2, 3)
    with LinearByOneDNN():
        both = torch.vmap(F.linear)(x, W)
        one = torch.vmap(F.linear, in_dims=(None, 0))(x[0], W)
        last = torch.vmap(F.linear, in_dims=(1, 2))(x.movedim(0, 1), W.movedim(0, 2))
    torch.testing.assert_close(both, torch.einsum("bni,boi->bno", x, W))
    torch.testing.assert_close(one, torch.einsum("ni,boi->bno", x[0], W))
    torch.testing.assert_close(last, both)


def test_derivatives_of_other_kinds(products):
    x, W = torch.randn(2, 3), torch.randn(4, 3)
    with LinearByOneDNN():
        for derivative in (torch.func.jacfwd, torch.func.jacrev):
            J = derivative(lambda x: F.linear(x, W))(x)
            torch.testing.assert_close(J, torch.einsum("ab,oi->aobi", torch.eye(2), W))
    assert products


@pytest.mark.parametrize("off", ["flags", "built without"])
def test_without_onednn(off, products, monkeypatch):
    x, W = torch.randn(2, 3), torch.randn(4, 3)
    if off == "flags":  # the context manager of the same name leaves the precision's switches changed
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    else:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with LinearByOneDNN():
        torch.testing.assert_close(F.linear(x, W), x @ W.T)
    assert not products


def test_autocast_keeps_its_precision(products):
    with LinearByOneDNN(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.ones(2, 3), torch.ones(4, 3)).dtype == torch.bfloat16
    assert not products
