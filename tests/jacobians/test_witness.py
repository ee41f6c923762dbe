"""The caller's own model is asked about its blocks: sound models agree, and the model stays as it was."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracker
from tests.models import FAMILIES, build
from tests.plain import CausalAttention
from tracker.common.errors import UsageError
from tracker.jacobians.witness import Witness

D = 16
IDS = torch.randint(30, (3, 7), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), CausalAttention(D), nn.Linear(D, D)

    def f(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return self.mlp(self.norm(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Model(nn.Module):
    """Blocks of one class; `step` says what one does to the state, in the model's forward."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(30, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.outside = nn.ModuleList(nn.Linear(D, 1) for _ in range(depth))

    def step(self, l: int, x: Tensor) -> Tensor:
        return self.blocks[l](x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for l in range(len(self.blocks)):
            x = self.step(l, x)
        return x


class Gated(Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.f(x)


class GateOfTheFirst(Model):
    """Block 1 alone is given something that is computed from its state."""

    def __init__(self):
        super().__init__(Gated)

    def step(self, l: int, x: Tensor) -> Tensor:
        return self.blocks[l](x, torch.ones_like(x) if l else (4 * self.outside[l](x)).sigmoid())


OTHER_WAY = "is not the derivative of what the model computes there"


class Unsteady(Block):
    """A rounding of the state changes its gradient by about a percent, as in the backward pass of a saturated softmax."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(D))

    def f(self, x: Tensor) -> Tensor:
        # The last two are equal but for rounding
        return super().f(x) + 3e5 * x * self.w - x * (3e5 * self.w)


@pytest.mark.parametrize(
    "block, error, found",
    [(Block, 0.02, "refused"), (Unsteady, 0.0, "told"), (Unsteady, 0.02, "refused")],
)
def test_an_error_that_rounding_explains_is_told_and_a_larger_one_refused(
    block, error, found, monkeypatch
):
    judge = Witness.judge

    def planted(self, call, rows, J, **options):
        return judge(self, call, rows, (1 + error) * J, **options)

    monkeypatch.setattr(Witness, "judge", planted)
    torch.manual_seed(0)
    model = Model(block).eval()
    if found == "refused":
        with pytest.raises(UsageError, match=OTHER_WAY):
            tracker.measure(model, IDS, k=4)
    else:
        assert (
            "in 3 blocks J^T u differs by up to"
            in tracker.measure(model, IDS, k=4).attrs["witness"]
        )


def at_one_token(y):
    y = y.clone()
    y[:, 2] *= 1.5
    return y


OF_SOME = {
    "at a token that is not measured": at_one_token,
    "in batches": lambda y: 1.5 * y if len(y) > 1 else y,
    "of few tokens": lambda y: torch.where(
        y[..., :1] > y[..., :1].flatten().kthvalue(2).values, y, 1.5 * y
    ),
}


@pytest.mark.parametrize("where", OF_SOME)
def test_a_copy_that_differs_is_refused_at_all_tokens_and_with_two_samples(where, monkeypatch):
    """It lacks a hook; the token that is measured is the last one."""

    def remove_hooks(replica, *_):
        replica.blocks[0]._forward_hooks.clear()

    torch.manual_seed(0)
    monkeypatch.setattr("tracker.model.replica.adjust_configs", remove_hooks)
    model = Model().eval()
    model.blocks[0].register_forward_hook(lambda module, args, y: OF_SOME[where](y))
    with pytest.raises(
        UsageError,
        match=r"block 1 \(blocks.0\): from the same state, the model computes another output",
    ):
        tracker.measure(model, IDS, k=4)


def errors_of(ds):
    return {
        name: float(size)
        for name, size in (part.split() for part in ds.attrs["witness"].split(": ")[1].split(", "))
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_sound_models_agree(name):
    """With the model, and with differences of their rows."""
    model, inputs = build(name)
    ds = tracker.measure(model, inputs, k=4, tokens=[1, -1])
    said = ds.attrs["witness"]
    assert said.startswith("agrees at one row of each block; errors: "), said
    errors = errors_of(ds)
    assert (
        errors["values"] < 1e-5 and errors["derivative"] < 1e-3 and 0 < errors["differences"] < 2e-2
    ), errors
    assert ds.attrs["independent_checks"] == "{}"
    assert ds.diagnostics_independent_error.max() < 3e-3


def llama(**options) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Checkpointed(Model):
    def step(self, l: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[l], x, use_reentrant=True)


class Mixing(Model):
    """The first state is mixed in by each block, as a constant."""

    def __init__(self):
        super().__init__(Gated)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embedding(ids)
        for block in self.blocks:
            x = block(x, first)
        return x


class Little(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + 0.05 * self.f(x) + 0.002 * first


class MixingLittle(Mixing):
    """As `Mixing`, with coefficients as small as those that trainings learn."""

    def __init__(self):
        Model.__init__(self, Little)


class ShiftedGate(GateOfTheFirst):
    """Block 1 alone is given a gate, which at each token depends on the token before: it is no part of J of one token."""

    def step(self, l: int, x: Tensor) -> Tensor:
        before = nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return self.blocks[l](
            x, torch.ones_like(x) if l else (4 * self.outside[l](before)).sigmoid()
        )


class Looped(Model):
    def __init__(self):
        super().__init__(depth=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)
        self.outside = self.outside[:1]


SOUND = {
    "float16": lambda: llama().half(),
    "bfloat16": lambda: llama().bfloat16(),
    "eager attention": lambda: llama(attn_implementation="eager"),
    "compiled": lambda: torch.compile(Model()),
    "compiled blocks": lambda: (model := Model(), [block.compile() for block in model.blocks])[0],
    "reentrant checkpoints": Checkpointed,
    "a first state mixed in": Mixing,
    "a little of the first state mixed in": MixingLittle,
    "a gate from the token before": ShiftedGate,
    "one module three times": Looped,
    "data parallel": lambda: nn.DataParallel(Model()),
    "weights that need no gradient": lambda: Model().requires_grad_(False),
}


@pytest.mark.parametrize("name", SOUND)
def test_models_in_many_forms_agree(name):
    torch.manual_seed(0)
    ds = tracker.measure(SOUND[name]().eval(), IDS, k=4)
    assert ds.attrs["witness"].startswith("agrees at one row of each block"), ds.attrs["witness"]


class Busy(Model):
    """Its forward writes to weights, buffers, attributes and lists, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))
        self.losses, self.count, self.generator = [], 0, torch.Generator().manual_seed(3)
        self.last: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        with torch.no_grad():
            self.scale.mul_(0.5)
        self.losses.append(torch.rand((), generator=self.generator))
        self.last = super().forward(ids)
        return self.last


class Merging(Model):
    """As loralib: `eval()` merges an update into the weights, `train()` takes it out again."""

    merged = False

    def train(self, mode: bool = True):
        if mode == self.merged:
            with torch.no_grad():
                self.blocks[0].mlp.weight.add_(1.0 if self.merged else -1.0)
            self.merged = not mode
        return super().train(mode)


def contents(model: nn.Module) -> list:
    """Return what the modules hold, by identity and by value."""
    held = [vars(part) for part in model.modules()]
    tensors = [(id(t), t._version, t.grad) for t in (*model.parameters(), *model.buffers())]
    generators = [
        value.get_state().tolist()
        for attributes in held
        for value in attributes.values()
        if isinstance(value, torch.Generator)
    ]
    return [str(held), [[*map(id, part.values())] for part in held], tensors, generators]


@pytest.mark.parametrize("make", [Busy, Merging, GateOfTheFirst])
def test_the_model_stays_as_it_was(make):
    torch.manual_seed(0)
    model = make().train()
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    before = contents(model)
    random = torch.get_rng_state()
    try:
        attribute = tracker.measure(model, IDS, k=4).attrs["witness"]
        assert attribute.startswith("agrees"), attribute
    except UsageError:
        assert make is GateOfTheFirst
    assert contents(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert seen == []  # what its hooks hold was copied, too


def test_the_copy_answers_where_the_caller_says_so():
    torch.manual_seed(0)
    model = Model()
    model.register_forward_hook(pytest.fail)
    attribute = tracker.measure(model, IDS, k=4, witness="off").attrs["witness"]
    assert attribute.startswith("not asked: the caller turned it off; its copy agrees")


def test_the_copy_answers_for_a_model_that_cannot_run():
    """Float64 weights, which transformers' grouped experts refuse."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
    )
    model = transformers.MixtralForCausalLM(config).eval().double()
    attribute = tracker.measure(model, IDS, k=4, dtype="float64").attrs["witness"]
    assert (
        attribute.startswith("not asked: RuntimeError: ")
        and "; its copy agrees at one row of each block" in attribute
    )
