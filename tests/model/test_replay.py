"""Blocks run again outside of their model: arithmetic in two precisions, what their code may raise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tracker
from tests.support.attention import attend
from tests.support.brute_force import Truth
from tests.support.draws import perturbed
from tests.support.measured import jacobians_at
from tests.support.models import WIDTH, Size, language, random, tokens
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


class Narrow(Stack):
    """Keeps its stream in float32, whatever its blocks compute in."""

    def forward(self, x):
        return super().forward(x.float())


class Widening(Block):
    """Its gate is computed in the precision of the state that it is given."""

    def forward(self, x):
        gate = F.linear(x, self.linear.weight.to(x.dtype)).sigmoid()
        x = x.to(self.linear.weight.dtype)
        return (x + self.attend(x) + gate * self.linear(x)).float()


def test_a_stream_in_float32_is_sliced_and_its_error_told():
    torch.manual_seed(0)
    model, x = Narrow([Widening(), Widening()]).double(), random(2, 40, 8)
    seen = jacobians(model, x)
    assert all(checks.sliced and checks.value_error < SINGLE for _, checks in seen)
    assert_right(seen, rights(model, "blocks", x))


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
def test_checkpoints_are_as_they_were_after_measuring(reentrant):
    model = stack(Checkpointed, reentrant)
    measured(model)
    runs = []
    model.blocks[0].linear.register_forward_hook(lambda *_: runs.append(1))
    model(random(1, 5, 8).requires_grad_()).sum().backward()
    assert len(runs) == 2  # forward, and again backward


@pytest.mark.parametrize(
    "name, n", [("BigBirdModel", 9), ("BigBirdModel", 48), ("BigBirdForCausalLM", 9)]
)
def test_big_bird(name, n):
    """On short sequences its sparse attention is replaced by a new module while the model runs."""
    make = language(
        name,
        attention_type="block_sparse",
        is_decoder=name == "BigBirdForCausalLM",
        sep_token_id=2,
        block_size=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = perturbed(make(Size()).eval(), seed=1)
    blocks = "encoder.layer" if name == "BigBirdModel" else "bert.encoder.layer"
    modules = {key: type(module) for key, module in model.named_modules()}
    ids = tokens(2, n)
    seen = jacobians(model, ids)
    assert {key: type(module) for key, module in model.named_modules()} == modules
    assert_right(seen, rights(model.double(), blocks, ids, WIDTH), 1e-9)
