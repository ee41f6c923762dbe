"""The differentiable penalty: exact against measured Jacobians, unbiased parts, gradients, and what it leaves alone."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tracker
from tests.models import FAMILIES, Size, images, neox, silence
from tests.models import WIDTH as D
from tests.rounding import rounding
from tracker.common.errors import UsageError
from tracker.training.penalty import Jacobian, pair_penalty

IDS = torch.tensor([[5, 3, 8, 1, 9, 4], [2, 7, 1, 8, 2, 8]])


def exact_penalty(Ja, Jb):
    C, R = Ja.mT @ Jb, Ja @ Jb.mT
    asymmetric = (C - C.mT).square().sum() + (R - R.mT).square().sum()
    return asymmetric / (2 * C.square().sum() + 2 * R.square().sum())


def operators(J):
    """Products with one matrix for each sample, (B, d, d)."""
    return Jacobian(lambda v: torch.einsum("bij,bj->bi", J, v), lambda u: torch.einsum("bij,bi->bj", J, u))


def exactly(Ja, Jb):
    return pair_penalty(operators(Ja[None]), operators(Jb[None]), torch.eye(len(Ja), dtype=Ja.dtype)[:, None])


def untrained(name):
    """Return a model in float64, an input, and the token that is measured."""
    if name == "llama":  # at a width of 32 its norms' rounding to float32 shows
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        config = LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=16)
        return LlamaForCausalLM(config).double(), IDS, [-1]
    model = FAMILIES[name].make(Size()).double()
    return (model, images().double(), [0]) if FAMILIES[name].sees == "images" else (model, IDS, [-1])


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "llama", "stablelm", "bert", "timm vit"])
def test_orthonormal_probes_give_the_penalty_of_the_measured_jacobians(name):
    torch.manual_seed(0)
    model, inputs, token = untrained(name)
    J = tracker.measure(
        model, inputs, tokens=token, keep="jacobian", dtype="float64", final_norm="exclude", measures="coupling"
    )["jacobian"]
    J = torch.tensor(J.values)[:, 0]  # (B, L, d, d)
    pairs = [(1, 3), (2, 3)]
    expected = torch.stack([exact_penalty(J[i, a - 1], J[i, b - 1]) for i in range(2) for a, b in pairs]).mean()
    got = tracker.coupling_penalty(model, inputs, tokens=token, pairs=pairs, probes=torch.eye(J.shape[-1]))
    dtype = torch.float32 if name == "llama" else torch.float64  # its norms round to float32
    # Numerator and denominator are squares of products of two Jacobians, and the numerator's are differences.
    torch.testing.assert_close(got.detach(), expected, rtol=rounding(dtype, amplified=10), atol=0)


def test_numerator_and_denominator_are_unbiased():
    torch.manual_seed(0)
    Ja, Jb = torch.randn(2, D, D, dtype=torch.float64)
    v = torch.randn(20_000, 1, D, dtype=torch.float64)
    C = Ja.T @ Jb
    x, y = v @ C.T, v @ C
    for estimate, value in (
        ((x - y).square().sum(-1), (C - C.T).square().sum()),
        ((x.square() + y.square()).sum(-1), 2 * C.square().sum()),
    ):
        standard_error = estimate.std() / len(estimate) ** 0.5
        assert abs(estimate.mean() - value) < 4 * standard_error


def test_shared_bases_give_zero_whatever_the_signs():
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0] for _ in range(2))
    S, T = torch.rand(D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    assert exactly(U * S @ V.T, U * T @ V.T) < 1e-28
    assert exactly(U * S @ V.T, V * T @ U.T) > 0.5  # the roles of input and output bases exchanged


def test_unrelated_bases_give_the_null_level():
    torch.manual_seed(0)
    values = []
    for _ in range(400):
        S, T = torch.rand(2, D, dtype=torch.float64)
        U, V, P, Q = (nn.init.orthogonal_(torch.empty(D, D, dtype=torch.float64)) for _ in range(4))
        C, R = (U * S @ V.T).T @ (P * T @ Q.T), (U * S @ V.T) @ (P * T @ Q.T).T
        values.append(
            [(C - C.T).square().sum() + (R - R.T).square().sum(), 2 * C.square().sum() + 2 * R.square().sum()]
        )
    numerator, denominator = torch.tensor(values).mean(0)
    assert abs(numerator / denominator - (1 - 1 / D)) < 0.01


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_rotations_and_scales_change_nothing(seed, scale):
    torch.manual_seed(seed)
    Ja, Jb = torch.randn(2, D, D, dtype=torch.float64)
    Q, P = (torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0] for _ in range(2))
    value = exactly(Ja, Jb)
    torch.testing.assert_close(exactly(Q @ Ja @ P.T, scale * Q @ Jb @ P.T), value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(exactly(Jb, Ja), value, rtol=1e-9, atol=1e-12)
    assert 0 <= value <= 2


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "timm vit"])
def test_the_gradient_is_that_of_the_value(name):
    """Compare with central differences along a random direction of all weights, states included."""
    torch.manual_seed(1)
    model, inputs, token = untrained(name)
    penalty = partial(tracker.coupling_penalty, model, inputs, tokens=token, pairs=[(1, 3)], probes=2)

    def value():
        return penalty(generator=torch.Generator().manual_seed(7))

    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value(), weights, allow_unused=True, materialize_grads=True)
    directions = [torch.randn_like(p) * p.std().nan_to_num(1).clamp_min(1e-2) for p in weights]
    slope = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))

    def moved(step):
        with torch.no_grad():
            for p, v in zip(weights, directions, strict=True):
                p.add_(v, alpha=step)
        there = value().detach()
        with torch.no_grad():
            for p, v in zip(weights, directions, strict=True):
                p.sub_(v, alpha=step)
        return there

    h = 1e-4
    difference = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    assert abs(slope) > 1e-4
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-9)


def test_the_first_blocks_gradient_includes_the_states_that_it_changes():
    torch.manual_seed(0)
    model = neox()
    penalty = tracker.coupling_penalty(model, IDS, pairs=[(2, 3)])
    (gradient,) = torch.autograd.grad(penalty, model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight)
    assert gradient.abs().max() > 0


def test_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model = neox(hidden_dropout=0.5, attention_dropout=0.5).train()
    model.gpt_neox.layers[1].eval()
    config, modes = model.config, [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    values = {
        float(tracker.coupling_penalty(model, IDS, pairs=[(1, 2)], generator=torch.Generator().manual_seed(0)))
        for _ in range(3)
    }
    assert len(values) == 1  # dropout is off
    assert [module.training for module in model.modules()] == modes
    assert model.config is config and config.use_cache is True
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_failing_forward_pass_leaves_no_hooks_and_modes():
    model = neox().train()
    with pytest.raises(UsageError, match="vocabulary"):
        tracker.coupling_penalty(model, torch.full((1, 4), 99))
    model.gpt_neox.layers[0].mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tracker.coupling_penalty(model, IDS, pairs=[(1, 3)])
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_blocks_that_add_nothing_have_a_penalty_of_zero_and_finite_gradients():
    model = neox()
    silence(model, range(3))
    penalty = tracker.coupling_penalty(model, IDS)
    penalty.backward()
    assert float(penalty) == 0
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_plain_encoder_with_gradient_checkpoints_and_a_mask():
    torch.manual_seed(0)
    model = neox()
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    padded = {"input_ids": IDS, "attention_mask": mask}
    cut = tracker.coupling_penalty(model, IDS[:1, :4], pairs=[(1, 2)], probes=torch.eye(D))
    both = tracker.coupling_penalty(model, padded, pairs=[(1, 2)], probes=torch.eye(D))
    other = tracker.coupling_penalty(model, IDS[1:], pairs=[(1, 2)], probes=torch.eye(D))
    torch.testing.assert_close(both, (cut + other) / 2)
    model.gradient_checkpointing_enable()
    model.train()
    again = tracker.coupling_penalty(model, padded, pairs=[(1, 2)], probes=torch.eye(D))
    torch.testing.assert_close(again, both)


@pytest.mark.slow
def test_a_few_steps_of_gradient_descent_lower_it():
    torch.manual_seed(0)
    model = neox(initializer_range=0.1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    exact = partial(tracker.coupling_penalty, model, IDS, pairs=3, probes=torch.eye(D))
    before = float(exact())
    for _ in range(40):
        optimizer.zero_grad()
        tracker.coupling_penalty(model, IDS, pairs=3).backward()
        optimizer.step()
    assert float(exact()) < 0.8 * before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "pairs=0; 3 blocks have 1 to 3 pairs"),
        ({"pairs": 4}, "pairs=4; 3 blocks have 1 to 3 pairs"),
        ({"pairs": [(1, 1)]}, "two different layers from 1 to 3"),
        ({"pairs": [(0, 2)]}, "two different layers from 1 to 3"),
        ({"pairs": []}, "two different layers from 1 to 3"),
        ({"probes": 0}, "probes=0; give at least 1"),
        ({"probes": torch.eye(3)}, r"probes of shape \(3, 3\); give a number, or vectors of shape \(number, 32\)"),
        ({"tokens": [0, 1]}, "selects 2 tokens of a sample; coupling_penalty takes one"),
        ({"tokens": [9]}, "out of range"),
        ({"blocks": [("input of gpt_neox.layers.0", "output of gpt_neox.layers.0")]}, "blocks that are modules"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        tracker.coupling_penalty(neox(), IDS, **options)


def test_prompts_are_refused():
    with pytest.raises(UsageError, match="prompts"):
        tracker.coupling_penalty(neox(), ["a prompt"])
