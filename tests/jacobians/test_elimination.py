"""Jacobians by the cheapest order of products against reverse mode; which forms are recognised; wrong guesses are noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, silu

import tracker
import tracker.jacobians.rows
from tests.models import build
from tests.rounding import of_miscouplings
from tracker.jacobians import elimination
from tracker.jacobians.elimination import Elimination, Heads
from tracker.linalg.jacobian import dense_jacobian, linearize

R, D, F = 3, 12, 20
GENERATOR = torch.Generator().manual_seed(0)
W = {
    shape: torch.randn(*shape, generator=GENERATOR, dtype=torch.float64) / shape[1] ** 0.5
    for shape in ((F, D), (D, F), (2 * F, D), (D, D))
}
X = torch.randn(R, D, generator=GENERATOR, dtype=torch.float64)


def rms_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def two_layers(x: Tensor) -> Tensor:
    return x + linear(gelu(linear(layer_norm(x, (D,)), W[F, D])), W[D, F])


def gated(x: Tensor) -> Tensor:
    h = rms_norm(x)
    return x + linear(silu(linear(h, W[F, D])) * linear(h, 2 * W[F, D]), W[D, F])


def gated_in_halves(x: Tensor) -> Tensor:
    gate, up = linear(rms_norm(x), W[2 * F, D]).chunk(2, -1)
    return x + linear(silu(gate) * up, W[D, F])


def gated_interleaved(x: Tensor) -> Tensor:
    z = linear(rms_norm(x), W[2 * F, D])
    return x + linear(silu(z[..., ::2]) * z[..., 1::2], W[D, F])


def in_sequence(x: Tensor) -> Tensor:
    x = x + linear(layer_norm(x, (D,)), W[D, D])
    return x + linear(gelu(linear(layer_norm(x, (D,)), W[F, D])), W[D, F])


def post_norm(x: Tensor) -> Tensor:
    return layer_norm(x + linear(gelu(linear(x, W[F, D])), W[D, F]), (D,))


class Halved(torch.autograd.Function):
    """Differentiable once, as kernels for norms often are."""

    @staticmethod
    def forward(ctx, x):
        return 0.5 * x.flip(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 0.5 * g.flip(-1)


def differentiable_once(x: Tensor) -> Tensor:
    return x + linear(gelu(linear(Halved.apply(x), W[F, D])), W[D, F])  # type: ignore[arg-type]


def scaled(x: Tensor) -> Tensor:
    return x + 0.1 * torch.arange(D) * linear(relu(linear(x, W[F, D])), W[D, F])


def in_place(x: Tensor) -> Tensor:
    z = linear(x, W[F, D])
    z.mul_(2)
    return linear(z.relu_(), W[D, F]).add_(x)


def of_no_form(x: Tensor) -> Tensor:
    return x + linear(linear(x, W[F, D]).softmax(-1) * linear(x, W[F, D]).cumsum(-1), W[D, F]).sin()


def of_other_rows(x: Tensor) -> Tensor:
    """Experts that take rows of another order are part of a map: a permutation of rows would be none."""
    order = torch.tensor([2, 0, 1])
    inner = linear(x[order].unsqueeze(1).expand(-1, 2, -1), W[F, D])
    return x + linear(inner[order.argsort(), 0], W[D, F])


def without_layers(x: Tensor) -> Tensor:
    return x + x.sin() * x.sum(-1, keepdim=True)


def constant(x: Tensor) -> Tensor:
    return torch.ones_like(x)


@pytest.fixture(autouse=True)
def for_small_models(monkeypatch):
    monkeypatch.setattr(tracker.jacobians.rows, "WORTHWHILE", dict.fromkeys((True, False), 0))


FUNCTIONS = (
    two_layers,
    gated,
    gated_in_halves,
    gated_interleaved,
    in_sequence,
    post_norm,
    differentiable_once,
    scaled,
    in_place,
    of_no_form,
    of_other_rows,
    without_layers,
    constant,
)


def eliminate(f: Callable[[Tensor], Tensor], memory: int = 1 << 30) -> Elimination:
    return Elimination(lambda attention: f, X, {}, memory)


@pytest.mark.parametrize("chunk", [5, D])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_jacobian_is_that_of_reverse_mode(f, chunk):
    reverse, found = linearize(f, X), eliminate(f)
    J = dense_jacobian(reverse.pullback, reverse.y, D)
    torch.testing.assert_close(
        dense_jacobian(found.pullback, found.y, chunk), J, atol=1e-12, rtol=0
    )
    u = torch.randn(4, R, D, generator=GENERATOR, dtype=torch.float64)
    torch.testing.assert_close(found.pullback(u), reverse.pullback(u), atol=1e-12, rtol=0)
    assert torch.equal(found.y, reverse.y) and float(found.error(J, identity=False)) < 1e-12
    assert float(found.error(J * 1.001, identity=False)) > 1e-4 or f is constant


def test_merged_layers_that_do_not_fit_the_memory_are_multiplied_one_by_one():
    for memory, merged in ((1 << 30, True), (R * F * D * 8 - 1, False)):
        found = eliminate(gated, memory)
        J = dense_jacobian(found.pullback, found.y, D)
        assert any(map.merges for map in found._maps or ()) == merged
        assert float(found.error(J, identity=False)) < 1e-12


@pytest.mark.parametrize(
    "name", ["gpt_neox", "llama, grouped keys", "gpt2", "timm vit", "phi3", "qwen3, q/k norms"]
)
def test_no_map_of_these_families_takes_products(name, monkeypatch):
    seen = []
    differentiate = Elimination._differentiate
    monkeypatch.setattr(
        Elimination, "_differentiate", lambda self: seen.append(differentiate(self)) or seen[-1]
    )
    model, inputs = build(name)
    tracker.measure(model, inputs, k=2, measures="coupling", final_norm="exclude")
    assert seen and all(not map.others for maps in seen for map in maps)
    assert all(any(map.merges for map in maps) for maps in seen)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16], ids=str)
def test_a_wrong_guess_is_noticed_and_the_jacobian_formed_by_reverse_mode(monkeypatch, weights):
    model, inputs = build("gpt_neox")
    model = model.to(weights)
    options = {"k": 2, "measures": "coupling", "final_norm": "exclude", "svd": "full"}
    expected = tracker.measure(model, inputs, **options)
    heads = Elimination._heads

    def turned(self: Elimination, *given: object) -> Heads | None:
        found = heads(self, *given)  # type: ignore[arg-type]
        return found and Heads(found.entries.roll(1, 0), found.selects)

    monkeypatch.setattr(Elimination, "_heads", turned)
    errors = []
    error = Elimination.error
    monkeypatch.setattr(
        Elimination, "error", lambda self, *given: errors.append(error(self, *given)) or errors[-1]
    )
    seen = tracker.measure(model, inputs, **options)
    assert errors and min(map(float, errors)) > 1e-2
    assert float(abs(seen.miscoupling - expected.miscoupling).max()) < of_miscouplings(expected)


def test_a_norm_is_found_from_four_products():
    h = X.clone().requires_grad_()
    y = nn.functional.layer_norm(h, (D,), weight=torch.arange(1.0, D + 1).double())
    # (R, D, D)
    J = torch.stack(
        [torch.autograd.grad(y[:, i].sum(), h, retain_graph=True)[0] for i in range(D)], 1
    )
    norm = elimination.find_normalization(
        lambda u: (u[:, None] @ J)[:, 0], lambda v: (J @ v[..., None])[..., 0], X
    )
    torch.testing.assert_close(norm.pull(torch.eye(D).double()[None]), J, atol=1e-12, rtol=0)
