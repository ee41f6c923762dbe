"""Blocks run again outside of their model: arithmetic in two precisions, what their code may raise."""

import json
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import tracker
from tests.support.attention import attend
from tests.support.brute_force import Truth
from tests.support.measured import jacobians_at
from tests.support.models import random, tokens
from tests.support.refused import refused
from tests.support.rounding import rounding
from tests.support.stacks import Attention, Stack


class Block(nn.Module):
    """x + attention + tanh of a linear layer, and what a subclass adds."""

    def __init__(self):
        super().__init__()
        self.qkv, self.linear = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attention = Attention()

    def attend(self, x):
        return attend(self.qkv(x))

    def plain(self, x):
        x = x + self.attend(x)
        return x + self.linear(x).tanh()

    def forward(self, x):
        return self.plain(x)


def stack(block, *arguments):
    torch.manual_seed(0)
    return Stack([block(*arguments) for _ in range(2)]).double()


# Arithmetic in float32 inside a block that is measured in float64


SINGLE = rounding(torch.float32, operations=10)  # some ten are in float32; of entries up to 1

SIZES = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=50
)
SIZES |= dict(
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
)
GROUPS = dict(n_group=1, topk_group=1, n_shared_experts=1)
INDEXED = dict(index_n_heads=2, index_head_dim=8, index_topk=4)
FAMILIES = {
    "DeepseekV2ForCausalLM": LATENT | ROUTED | GROUPS | dict(head_dim=4),
    "GlmMoeDsaForCausalLM": LATENT | ROUTED | GROUPS | INDEXED,
}


def family(name, **more):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SIZES, **more, **FAMILIES.get(name, {})})).eval()
    model.config._experts_implementation = "eager"  # the others know no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def jacobians(model, inputs):
    """Of every block, final norm left out, at the last row of the first sample."""
    return [(J[0], checks) for J, checks in jacobians_at(model, inputs, [(0, inputs.shape[1] - 1)])]


def measured(model, samples=1):
    return tracker.measure(model, random(samples, 5, 8), k=2, dtype="float64")


def rights(model, blocks, inputs, width=8):
    """Return J of every block, final norm left out, at the last row of the first sample."""
    names = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
    return Truth(model, inputs, names, width).jacobians(-1)[0].double()


def assert_right(seen, right, atol=SINGLE):
    torch.testing.assert_close(torch.stack([J for J, _ in seen]), right, atol=atol, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_round_to_float32_inside_are_measured_in_float64(name):
    """Before: refused as random or stateful at 2e-8, or measured over the full sequence for the same reason."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model, ids = family(name), tokens()
    seen = jacobians(model, ids)
    right = rights(model.double(), "model.layers", ids, 32)
    for (J, checks), expected in zip(seen, right, strict=True):
        assert float((J - expected).abs().max()) < SINGLE * max(1.0, float(expected.abs().max()))
        assert checks.value_error < SINGLE
    # Its blocks are handed which tokens the one before looked up
    if name != "GlmMoeDsaForCausalLM":
        assert all(checks.sliced for _, checks in seen)


class Routed(Block):
    """A gate computed in float32, as many routers are; that of a single row rounds otherwise, as by another kernel."""

    def forward(self, x):
        gate = F.linear(x.float(), self.linear.weight.float()).sigmoid()
        if x.shape[1] == 1:
            gate = gate * (1 + torch.finfo(torch.float32).eps)
        return x + self.attend(x) + gate.to(x.dtype) * self.linear(x)


class CountingGate(Routed):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + 1e-7 * self.calls * x.sin()


class OverTokens(Routed):
    """Rows that mix outside attention by 1e-4 of what they do: more than the gate rounds."""

    def forward(self, x):
        return super().forward(x) + 1e-4 * x.mean(1, keepdim=True).sin()


class ByGradient(Block):
    def forward(self, x):
        return self.plain(x) * (1.01 if torch.is_grad_enabled() else 1)


class Narrow(Stack):
    """Keeps its stream in float32, whatever its blocks compute in."""

    def forward(self, x):
        return super().forward(x.float())


class Widening(Routed):
    """Its gate is computed in the precision of the state that it is given."""

    def forward(self, x):
        gate = F.linear(x, self.linear.weight.to(x.dtype)).sigmoid()
        x = x.to(self.linear.weight.dtype)
        return (x + self.attend(x) + gate * self.linear(x)).float()


@pytest.mark.parametrize(
    "make",
    [lambda: stack(Routed), lambda: Narrow([Widening(), Widening()]).double()],
    ids=["gate", "stream"],
)
def test_a_gate_or_stream_in_float32_is_sliced_and_its_error_told(make):
    model, x = make(), random(2, 40, 8)
    seen = jacobians(model, x)
    assert all(checks.sliced and checks.value_error < SINGLE for _, checks in seen)
    assert_right(seen, rights(model, "blocks", x))


@pytest.mark.parametrize("samples", [1, 2])
def test_what_a_count_changes_as_little_as_rounding_is_refused_all_the_same(samples):
    with refused("it is random or keeps state between calls"):
        measured(stack(CountingGate), samples)


def test_a_gate_in_float32_hides_no_mixing_of_rows():
    model, x = stack(OverTokens), random(1, 5, 8)
    with pytest.warns(UserWarning, match="value check"):  # once for all blocks
        seen = jacobians(model, x)
        ds = measured(model)
    reasons = json.loads(ds.attrs["fallbacks"])
    assert len(reasons) == len(seen) and all("value check" in reason for reason in reasons.values())
    assert not any(checks.sliced for _, checks in seen)
    assert_right(seen, rights(model, "blocks", x))


def test_a_block_that_asks_for_the_gradient_mode_is_refused():
    with refused("another output with gradients than without"):
        measured(stack(ByGradient))


class SmallNorm(Block):
    """A small update behind a norm that rounds to float32, as RMSNorm does."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return x + 1e-4 * self.linear(self.attend(wide.to(x.dtype)))


def test_small_jacobians_behind_a_norm_in_float32_are_sliced():
    """They are found again in float64, where the norm's own rounding counts as such."""
    model, x = stack(SmallNorm), random(1, 12, 8)
    x[:, 0] *= 1000
    exact = tracker.measure(model, x, k=4, tokens="all", dtype="float64")
    seen = tracker.measure(model.float(), x.float(), k=4, tokens="all")
    assert seen.diagnostics_sliced.all() and exact.diagnostics_sliced.all()
    ratio = seen.singular_value.values[..., :3] / exact.singular_value.values[..., :3]
    assert abs(ratio - 1).max() < 1e-4


# What a block returns, and what its code may raise


class Returning(Block):
    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    def forward(self, x):
        return self.returned(x, self.plain(x))


@dataclass(frozen=True, slots=True)
class Own:
    out: torch.Tensor
    note: str = ""


class Unpacking(Stack):
    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = (
                y.out
                if isinstance(y, Own)
                else y["hidden_states"]
                if type(y) is dict
                else y.last_hidden_state
            )
        return x


RETURNED = {
    "mapping": lambda x, y: {"weights": x.mean((1, 2)), "hidden_states": y},
    "output": lambda x, y: BaseModelOutput(last_hidden_state=y, hidden_states=(x,)),
    "dataclass": lambda x, y: Own(y),
}


@pytest.mark.parametrize("name", RETURNED)
def test_blocks_that_return_mappings_and_dataclasses(name):
    model = Unpacking([Returning(RETURNED[name]) for _ in range(2)]).double()
    seen, plain = measured(model, 2), measured(stack(Block), 2)
    assert seen.diagnostics_sliced.all()
    assert float(abs(seen.miscoupling - plain.miscoupling).max()) < 1e-12


@pytest.mark.parametrize(
    "returned, described",
    [
        (lambda x, y: {"first": x, "second": y}, r"dict\(first: \(1, 5, 8\), second"),
        (lambda x, y: None, "NoneType"),
        (lambda x, y: (None, x), r"tuple\(0: NoneType, 1"),
    ],
)
def test_what_holds_no_hidden_state_is_named(returned, described):
    with refused(f"block blocks.0 returns {described}.*it must return the hidden state"):
        measured(stack(Returning, returned))


class Checkpointed(Block):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.plain, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant):
    """`checkpoint` is imported by name here, as most modules do."""
    seen, plain = measured(stack(Checkpointed, reentrant), 2), measured(stack(Block), 2)
    assert seen.diagnostics_sliced.all() and seen.attrs["witness"].startswith("agrees")
    assert float(abs(seen.miscoupling - plain.miscoupling).max()) < 1e-10


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_as_they_were_after_measuring(reentrant):
    model = stack(Checkpointed, reentrant)
    measured(model)
    runs = []
    model.blocks[0].linear.register_forward_hook(lambda *_: runs.append(1))
    model(random(1, 5, 8).requires_grad_()).sum().backward()
    assert len(runs) == 2  # forward, and again backward


class Raising(Block):
    """Its code fails as soon as gradients are on."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if torch.is_grad_enabled():
            raise self.error
        return self.plain(x)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize(
    "error", [KeyError("cache"), AttributeError("gone"), RuntimeError("no"), StopIteration()]
)
def test_what_a_blocks_code_raises_names_the_block(error, B):
    with refused(rf"block 1 \(blocks.0\) .*{type(error).__name__}") as caught:
        measured(stack(Raising, error), B)
    assert isinstance(caught.value.__cause__, type(error))


class Backward(torch.autograd.Function):
    """A function whose derivative fails, or can't be differentiated again."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        if ctx.fails:
            raise NotImplementedError("no derivative here")
        return 2 * gradient, None


class Custom(Block):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def forward(self, x):
        return x + Backward.apply(self.attend(x), self.fails)


def test_a_derivative_that_fails_names_the_block():
    with refused(r"block 1 \(blocks.0\) .*no derivative here"):
        measured(stack(Custom, True))


def test_a_derivative_that_has_none_itself():
    model, x = stack(Custom, False), random(1, 5, 8)
    assert_right(jacobians(model, x), rights(model, "blocks", x), 1e-10)


@pytest.mark.parametrize(
    "attention, n", [("original_full", 9), ("block_sparse", 9), ("block_sparse", 48)]
)
@pytest.mark.parametrize("name", ["BigBirdModel", "BigBirdForCausalLM"])
def test_big_bird(name, attention, n):
    """On short sequences its sparse attention is replaced by a new module while the model runs."""
    model = family(
        name,
        attention_type=attention,
        is_decoder=name == "BigBirdForCausalLM",
        sep_token_id=2,
        block_size=4,
    )
    blocks = "encoder.layer" if name == "BigBirdModel" else "bert.encoder.layer"
    modules = {key: type(module) for key, module in model.named_modules()}
    ids = tokens(2, n)
    seen = jacobians(model, ids)
    assert {key: type(module) for key, module in model.named_modules()} == modules
    assert_right(seen, rights(model.double(), blocks, ids, 32), 1e-9)
