"""Planted faults: the Jacobians are those by differences of the model in float64, or the measurement is refused with a reason."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import tracker
from tests.support.brute_force import in_one_graph
from tests.support.central_differences import (
    assert_right,
    by_differences,
)
from tests.support.draws import integers, normal
from tests.support.measured import jacobians_at
from tests.support.refused import refused
from tracker.common.errors import Note

D, L, N = 16, 3, 6
IDS = integers(0, 30, 4, N)
EQUAL = IDS[:, :1].repeat(1, N)
# Beside the first coordinate of the state of a token, as `Fault.model` draws it
BESIDE = float(normal(30, D, seed=0)[IDS[0, -1], 0]) + 1e-12
SINGLE, DOUBLE = torch.float32, torch.float64
CLOSE = {SINGLE: 1e-4, DOUBLE: 1e-7}

# What an error says
MIXES = "mixes the samples of a batch"
OTHER_WAY = "is not the derivative of what the model computes there"
NOT_GIVEN = "autograd does not give"
UNSTEADY = "it is random, keeps state between calls"
# Why the full sequence is used
OWN_CODE = "depends on the rest of the sequence by code of its own"
VALUES, DERIVATIVES = "failed its value check", "failed its derivative check"
MASK = "a mask of its attention depends on its state"
SHAPES = r"it returns \(8, 6, 16\) for single rows \(8, 16\)"
GIVEN = "how the block's argument 'given' divides into rows is not known"
OTHER_VALUES = "the derivative at single rows is not that of their values"
OTHER_MODEL = "its derivative at single rows is not that of the model"


class Block(nn.Module):
    """Attention and an MLP, and if it is open what `adds(block, x, *given)` returns."""

    shift: Any = 0  # that the model may set

    def __init__(self, fault: "Fault"):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp, self.gate = nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, 1)
        self.fault, self.is_open, self.calls = fault, True, 0

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (x.unflatten(-1, (2, -1)).transpose(1, 2),) * 3
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)

    def plain(self, x: Tensor) -> Tensor:
        y = x + self.mlp(x)
        if self.fault.attends:
            z = self.norm(x)
            y = y + self.attn(z, z, z, need_weights=False)[0]
        return y

    def forward(self, x: Tensor, *given: Any) -> Any:
        def compute(x: Tensor) -> Tensor:
            return self.plain(x) + self.fault.adds(self, x, *given)

        return self.fault.runs(compute, x) if self.is_open else self.plain(x)


class Model(nn.Module):
    """Blocks with one fault."""

    def __init__(self, fault: "Fault"):
        super().__init__()
        self.embedding, self.fault = nn.Embedding(30, D), fault
        self.blocks = nn.ModuleList(Block(fault) for _ in range(L))
        self.outside = nn.ModuleList(nn.Linear(D, 1) for _ in range(L))

    def step(self, l: int, x: Tensor) -> Tensor:
        y = self.blocks[l](x, *self.fault.gives(self, l, x))
        return y if isinstance(y, Tensor) else self.fault.takes(y)

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        return (partial(self.step, l) for l in range(L))

    def open(self, *layers: int) -> "Model":
        """Let these blocks alone add."""
        for l, block in enumerate(self.blocks):
            block.is_open = l + 1 in layers
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for step in self:
            x = step(x)
        return x


def nothing(block: Block, x: Tensor, *given: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class Fault:
    """What blocks do, and what a measurement says.

    Attributes:
        adds: what a block adds to what is plain.
        says: part of the error, which names the block; empty: the Jacobians are right.
        runs: how a block runs its code on the state.
        gives: what the model gives block l beside the state.
        takes: the state, of what a block returns.
        full: why the full sequence is used; empty: single rows are.
        attends: whether blocks attend beside what they add.
        exact: what a block adds as it would be without rounding.
        close: how far the Jacobians are from the true ones, relative to their largest entry, by dtype.
        positions: `tokens=` of the measurement.
        layers: the block that has the fault: one for each dtype, in turn.
    """

    adds: Callable[..., Any] = nothing
    says: str = ""
    runs: Callable[..., Any] = lambda compute, x: compute(x)
    gives: Callable[..., tuple] = lambda model, l, x: ()
    takes: Callable[[Any], Tensor] = lambda y: y
    full: str = ""
    attends: bool = True
    exact: Callable[..., Any] | None = None
    close: dict[torch.dtype, float] = field(default_factory=lambda: CLOSE)
    ids: Tensor = IDS
    positions: Sequence[int] = (0, -1)
    layers: Sequence[int] = range(1, L + 1)

    def model(self) -> Any:
        torch.manual_seed(0)
        return Model(self).eval()

    def measured(self, model: nn.Module, dtype: torch.dtype, **options: Any) -> Any:
        options = dict(k=3, keep="jacobian", measures="coupling") | options
        return tracker.measure(model, self.ids, dtype=dtype, tokens=self.positions, **options)


def states(model: Model, fault: Fault) -> Tensor:
    """Return the first state, in float64."""
    return model.double().embedding(fault.ids).detach()


class Scaled(torch.autograd.Function):
    """tanh whose backward is wrong by a factor; it fails where that is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if not ctx.factor:
            raise NotImplementedError("no derivative here")
        return ctx.factor * g[0] * (1 - x.tanh() ** 2), None


class Once(Scaled):
    backward = once_differentiable(Scaled.backward)


def little(x: Tensor) -> float:
    """Return what is a little in the dtype of a tensor."""
    return 1e-10 if x.dtype == torch.float64 else 1e-4


def at_last_coordinate(x: Tensor) -> Tensor:
    """Return the states with zeros in all but the last token's first coordinate."""
    only = torch.zeros_like(x)
    only[:, -1, 0] = x[:, -1, 0]
    return only


def by_order(block: Block, x: Tensor) -> Tensor:
    """Two experts that take half of the batch's tokens each, first come, first served."""
    chosen = F.one_hot((block.gate(x)[..., 0] > 0).long().flatten(), 2)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return (place <= len(place) // 2).view(*x.shape[:2], 1) * block.mlp(x)


def by_scores(block: Block, x: Tensor) -> Tensor:
    """An expert that takes the third of the batch's tokens with the highest scores."""
    scores = block.gate(x).flatten()
    return (scores >= scores.quantile(2 / 3)).view(*x.shape[:2], 1) * block.mlp(x)


def softmax_of_batch(block: Block, x: Tensor) -> Tensor:
    """Attention stabilized by the largest score of the batch, on which it does not depend."""
    scores = x @ x.mT / D**0.5
    weights = (scores - scores.max()).exp()
    return weights / weights.sum(-1, keepdim=True) @ x


def twice_with_a_global_token(block: Block, x: Tensor) -> Tensor:
    """Two attentions: a token reads a global one, which has read it."""
    seen = torch.eye(x.shape[1], dtype=torch.bool)
    seen[0] = seen[:, 0] = True
    return block.attend(x + block.attend(x, seen), seen)


def masked_by_state(block: Block, x: Tensor) -> Tensor:
    """A gate of each key, computed from its state and open at few tokens, is added to the logits of attention."""
    return block.attend(x, F.relu(4 * block.gate(x) - 3).mT[:, None])


def without_graph(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return compute(x)


def in_inference_mode(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = compute(x)
    return y.clone()


def in_16_bits(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return compute(x)


def in_single_alone(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return code that runs in float32 alone, as nanochat's does."""

    def computed(block: Block, x: Tensor) -> Tensor:
        assert x.dtype == SINGLE
        return compute(block, x)

    return computed


def raising(error: Exception) -> Callable[..., Tensor]:
    """Return how a block runs whose code fails as soon as gradients are on."""

    def run(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise error
        return compute(x)

    return run


def in_place(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    added = compute(x.clone()) - x
    x += added
    return x


def rough_gate(block: Block, x: Tensor) -> Tensor:
    """A gate in float32, as of many routers; that of a single row rounds otherwise, as by another kernel."""
    gate = F.linear(x.float(), block.gate.weight.float()).sigmoid()
    if x.shape[1] == 1:
        gate = gate * (1 + torch.finfo(SINGLE).eps)
    return gate.to(x) * x.tanh()


def gate(block: Block, x: Tensor) -> Tensor:
    return F.linear(x, block.gate.weight).sigmoid() * x.tanh()


def counted_roughly(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return rough_gate(block, x) + 1e-7 * block.calls * x.sin()


def counted(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return 0.1 * (block.calls % 3) * x.tanh()


def set_shift(model: Model, l: int, x: Tensor) -> tuple:
    model.blocks[l].shift = model.outside[l](x)
    return ()


CONTEXT = []  # what a model leaves for its blocks; no module holds it


def leave(model: Model, l: int, x: Tensor) -> tuple:
    CONTEXT[:] = [model.outside[l](x)]
    return ()


@dataclass(frozen=True, slots=True)
class Own:
    out: Tensor
    note: str = ""


IN_SINGLE = {SINGLE: 1e-4}
ROUNDED = {SINGLE: 1e-4, DOUBLE: 1e-5}
FAULTS = {
    "none": Fault(),
    # Samples of a batch
    "mean of the batch": Fault(lambda b, x: x.mean(0, keepdim=True), MIXES),
    "a little of that mean": Fault(lambda b, x: little(x) * x.mean(0, keepdim=True), MIXES),
    "last sample": Fault(lambda b, x: x[-1:].tanh() + 0 * x, MIXES),
    "sample before": Fault(lambda b, x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]), MIXES),
    "two samples": Fault(lambda b, x: x.flip(0), MIXES, ids=IDS[:2]),
    "one coordinate of other samples": Fault(
        lambda b, x: 0.1 * at_last_coordinate(x).mean(0) + 0 * x, MIXES, positions=[-1]
    ),
    "detached mean of the batch": Fault(lambda b, x: x.mean(0).detach().tanh() + 0 * x, MIXES),
    "a capacity, in order": Fault(by_order, MIXES),
    # Copies of the one token that is the last to pass change nothing: one draw in fifteen.
    "a capacity, by scores": Fault(by_scores, MIXES, layers=[1, 2]),
    "distance from one sample": Fault(
        lambda b, x: (x - 0.5 * x.mean(0, keepdim=True)).tanh(), ids=IDS[:1], full=VALUES
    ),
    "softmax less the largest score": Fault(softmax_of_batch, full=VALUES),
    "an axis of samples": Fault(
        lambda b, x, gains: gains * x.tanh(),
        gives=lambda m, l, x: (
            (torch.linspace(0.5, 1.5, len(x)).to(x)[:, None, None],) * m.blocks[l].is_open
        ),
        full=GIVEN,
    ),
    # Every step ahead crosses it
    "a jump beside a state": Fault(
        lambda b, x: torch.where(x[..., :1] > BESIDE, b.mlp(x), 1 - b.mlp(x)),
        exact=lambda b, x: torch.where(x[..., :1] > BESIDE + 1e-3, b.mlp(x), 1 - b.mlp(x)),
        layers=[1],
    ),
    # What autograd gives
    "wrong backward": Fault(lambda b, x: Scaled.apply(x, 0.5), f"{NOT_GIVEN}.*function Scaled"),
    "backward too large by a hundredth": Fault(lambda b, x: Scaled.apply(x, 1.01), NOT_GIVEN),
    "right backward": Fault(lambda b, x: Scaled.apply(x, 1.0)),
    "wrong backward at few tokens": Fault(
        lambda b, x: torch.where(b.gate(x) > 0.4, Scaled.apply(x, 0.5), x.tanh()),
        f"{NOT_GIVEN}.*function Scaled",
        positions=range(N),
    ),
    # A single row is the last one
    "wrong backward at the last token": Fault(
        lambda b, x: torch.cat([x[:, :-1].tanh(), Scaled.apply(x[:, -1:], 0.5)], 1),
        positions=(0, 2),
        full=OTHER_VALUES,
    ),
    "NumPy": Fault(lambda b, x: torch.from_numpy(x.detach().numpy()).tanh(), f"{NOT_GIVEN}.*numpy"),
    ".data": Fault(lambda b, x: x.data.tanh(), NOT_GIVEN),
    "item() of one sample": Fault(lambda b, x: x * x[0, -1].norm().item(), "item", ids=IDS[:1]),
    "item() of a batch": Fault(lambda b, x: x * x[0, -1].norm().item(), MIXES),
    "no_grad": Fault(runs=without_graph),
    "inference mode": Fault(runs=in_inference_mode),
    "gradients change values": Fault(
        runs=lambda compute, x: compute(x) * (1.01 if torch.is_grad_enabled() else 1),
        says="gives another output with gradients than without",
    ),
    "backward that fails": Fault(lambda b, x: Scaled.apply(x, 0), "no derivative here"),
    "backward of first order alone": Fault(lambda b, x: Once.apply(b.attend(x), 1.0)),
    ".data in float32 alone": Fault(
        in_single_alone(lambda b, x: x.data.tanh()), rf"{NOT_GIVEN}.*\.data", close=IN_SINGLE
    ),
    "float32 alone": Fault(
        in_single_alone(lambda b, x: x.tanh()), exact=lambda b, x: x.tanh(), close=IN_SINGLE
    ),
    "KeyError with gradients": Fault(runs=raising(KeyError()), says="KeyError"),
    "KeyError for single rows": Fault(
        lambda b, x: {N: x.tanh()}[x.shape[1]], full=r"does not run on single rows \(KeyError"
    ),
    "StopIteration for single rows": Fault(
        lambda b, x: next(x.tanh() for n in (N,) if n == x.shape[1]),
        full=r"does not run on single rows \(StopIteration",
    ),
    # What a block does with its state, and returns
    "in place": Fault(runs=in_place),
    **{
        f"checkpointed, {'' if reentrant else 'not '}reentrant": Fault(
            runs=partial(checkpoint, use_reentrant=reentrant)
        )
        for reentrant in (True, False)
    },
    "a mapping": Fault(
        runs=lambda compute, x: {"weights": x.mean((1, 2)), "hidden_states": compute(x)},
        takes=lambda y: y["hidden_states"],
    ),
    "an output": Fault(
        runs=lambda compute, x: BaseModelOutput(compute(x), hidden_states=(x,)),
        takes=lambda y: y.last_hidden_state,
    ),
    "a dataclass": Fault(runs=lambda compute, x: Own(compute(x)), takes=lambda y: y.out),
    # Numbers of fewer bytes inside
    "a gate in float32": Fault(rough_gate, exact=gate, close=ROUNDED),
    "a gate in float32 and a mean over tokens": Fault(
        lambda b, x: rough_gate(b, x) + 1e-4 * x.mean(1, keepdim=True).sin(),
        full=VALUES,
        exact=lambda b, x: gate(b, x) + 1e-4 * x.mean(1, keepdim=True).sin(),
        close={DOUBLE: 1e-5},
    ),
    "a gate in float32 and a counter": Fault(counted_roughly, UNSTEADY, close={DOUBLE: 1e-5}),
    "a norm in float32": Fault(
        lambda b, x: b.mlp(F.layer_norm(x.float(), (D,)).to(x)),
        exact=lambda b, x: b.mlp(F.layer_norm(x, (D,))),
        close=ROUNDED,
    ),
    "16 bits": Fault(
        lambda b, x: in_16_bits(b.mlp, x),
        exact=lambda b, x: b.mlp(x),
        close={SINGLE: 0.03, DOUBLE: 1e-7},
    ),
    "16 bits in attention": Fault(
        runs=in_16_bits,
        says="rounds to less than float32; remove that, or give dtype='float64'",
        close=IN_SINGLE,
    ),
    "16 bits in float64": Fault(runs=in_16_bits, close={DOUBLE: 1e-7}),
    # Tokens, by the block's own code
    "mean over tokens": Fault(lambda b, x: x.mean(1, keepdim=True) ** 2, full=VALUES),
    "mean over tokens without attention": Fault(
        lambda b, x: x.mean(1, keepdim=True) ** 2, full=OWN_CODE, attends=False
    ),
    # In block 1 there are none.
    "mean over tokens at few of them": Fault(
        lambda b, x: F.relu(4 * b.gate(x) - 3) * x.mean(1, keepdim=True),
        positions=range(N),
        full=VALUES,
        layers=[2, 3],
    ),
    "mean over equal tokens": Fault(
        lambda b, x: x.mean(1, keepdim=True).tanh() + 0 * x, ids=EQUAL, full=OTHER_MODEL
    ),
    "attention to equal tokens": Fault(
        lambda b, x: (x @ x.mT).softmax(-1) @ x, ids=EQUAL, full=OTHER_MODEL
    ),
    "identity over positions": Fault(
        lambda b, x: ((x @ x.mT).softmax(-1) + torch.eye(x.shape[1]).to(x)) @ x,
        full=f"{OTHER_MODEL}|{VALUES}",
    ),
    "a table of positions": Fault(lambda b, x: torch.ones(N, 1).to(x) * x.tanh(), full=SHAPES),
    "two attentions": Fault(twice_with_a_global_token, full=DERIVATIVES),
    "a mask from the state": Fault(masked_by_state, full=MASK, attends=False, positions=range(N)),
    # Other ways of the state to a block
    "given three times": Fault(
        lambda b, x, key, value: 0.3 * value.tanh() - 0.2 * key,
        OTHER_WAY,
        gives=lambda m, l, x: (x, x),
    ),
    "a memory": Fault(
        lambda b, x, memory: b.attn(x, memory, memory)[0],
        OTHER_WAY,
        gives=lambda m, l, x: (torch.cat([torch.ones_like(x[:, :1]), x], 1),),
    ),
    "a gate": Fault(
        lambda b, x, gate: gate * x.tanh(),
        OTHER_WAY,
        gives=lambda m, l, x: ((4 * m.outside[l](x)).sigmoid(),),
        layers=[1, 2],  # beside block 1 alone there is a way from a first state
    ),
    "a number": Fault(
        lambda b, x, number: number * x.tanh(),
        OTHER_WAY,
        gives=lambda m, l, x: (x[0, -1].norm().item(),),
        ids=IDS[:1],
        positions=[-1],
        layers=[2, 3],  # that of block 1 is computed before the state is set
    ),
    "an attribute": Fault(lambda b, x: b.shift + 0 * x, OTHER_WAY, gives=set_shift),
    "a context": Fault(lambda b, x: CONTEXT[0] + 0 * x, UNSTEADY, gives=leave),
    # State and chance
    "a counter": Fault(counted, UNSTEADY),
    "random numbers": Fault(lambda b, x: 0.1 * torch.randn_like(x), UNSTEADY),
}


# Differences alone show a number; numbers of two bytes are too coarse for them.
WAYS_OF_TENSORS = [
    name for name, fault in FAULTS.items() if fault.says == OTHER_WAY and name != "a number"
]
full_sequence = pytest.mark.filterwarnings("ignore:.*full sequence")


PLACES = [
    (name, dtype, fault.layers[(i + j) % len(fault.layers)])
    for i, (name, fault) in enumerate(FAULTS.items())
    for j, dtype in enumerate(fault.close)
]


@pytest.mark.parametrize(("name", "dtype", "layer"), PLACES, ids=str)
def test_a_fault_of_one_block_is_refused_or_measured_right(name, dtype, layer):
    fault = FAULTS[name]
    model = fault.model().to(dtype).open(layer)
    if fault.says:
        with refused(rf"(?s)block {layer} .*{fault.says}"):
            fault.measured(model, dtype)
        return
    said = rf"block {layer} .* measured over the full sequence.*({fault.full})"
    with pytest.warns(Note, match=said) if fault.full else nullcontext():
        ds = fault.measured(model, dtype)
    assert ds.attrs["independent_checks"] == "{}" and ds.attrs["witness"].startswith("agrees")
    fallbacks = json.loads(ds.attrs["fallbacks"])
    assert [*fallbacks] == [str(layer)] * bool(fault.full)
    assert ds.diagnostics_sliced.all(["prompt", "token"]).values.tolist() == [
        str(l) not in fallbacks for l in range(1, L + 1)
    ]
    true = model if fault.exact is None else exact(fault).open(layer)
    assert_right(ds, true, states(model, fault), fault.close[dtype], fault.positions)


def exact(fault: Fault) -> Any:
    """Return the model without rounding."""
    return replace(fault, adds=fault.exact).model().double()


def detached_branch(block: Block, x: Tensor) -> Tensor:
    return block.mlp(x.detach()) + 0.1 * x


def shrunk(block: Block, x: Tensor) -> Tensor:
    y = block.mlp(x)
    return 0.1 * y + 0.9 * y.detach()


def straight_through(block: Block, x: Tensor) -> Tensor:
    y = block.mlp(x)
    return y + ((8 * y).round() / 8 - y).detach()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("adds", [detached_branch, shrunk, straight_through])
def test_a_detached_branch_is_reported_with_its_size(adds, dtype):
    fault = Fault(adds)
    with pytest.warns(UserWarning, match="detaches tensors") as warned:
        ds = fault.measured(fault.model().to(dtype), dtype)
    assert ["detaches tensors" in str(one.message) for one in warned].count(True) == 1
    assert ds.diagnostics_sliced.all()
    errors = ds.diagnostics_independent_error.max(["prompt", "token"]).values
    checks = json.loads(ds.attrs["independent_checks"])
    model = fault.model().double()
    x = states(model, fault)
    for (l, step), reported in zip(enumerate(model), checks.values(), strict=True):
        size = float(reported.split("changes J v by ")[1])
        assert size == pytest.approx(float(errors[l]), rel=0.1) and size > 0.1
        J = torch.as_tensor(ds.jacobian.values[0, -1, l]).double()
        true = by_differences(step, x, (0, N - 1))
        assert size == pytest.approx(float((J - true).norm() / true.norm()), rel=1)
        x = step(x).detach()


def test_a_detached_branch_of_code_that_runs_in_float32_alone_is_reported():
    fault = Fault(in_single_alone(detached_branch))
    with pytest.warns(UserWarning, match="detaches tensors"):
        fault.measured(fault.model(), SINGLE)


def test_autograd_is_measured_on_request():
    fault = Fault(lambda b, x: x.data.tanh())
    ds = fault.measured(fault.model().double(), DOUBLE, derivative="autograd")
    assert ds.attrs["derivative"] == "autograd" and ds.diagnostics_independent_error.isnull().all()


@pytest.mark.parametrize("name", WAYS_OF_TENSORS)
def test_other_ways_are_refused_in_bfloat16(name):
    fault = FAULTS[name]
    with refused(OTHER_WAY):
        fault.measured(fault.model().bfloat16(), torch.float32)


@pytest.mark.parametrize("name", ["given three times", "a memory", "an attribute", "a context"])
def test_proposed_spans_give_the_true_jacobian(name):
    fault = FAULTS[name]
    model = fault.model().double()
    with refused("each line was tried on these inputs") as caught:
        fault.measured(model, torch.float64)
    line = str(caught.value).partition("blocks=")[2].partition("  #")[0]
    blocks = eval(line, {"model": model, "find_blocks": tracker.find_blocks})
    ds = fault.measured(model, torch.float64, blocks=blocks)
    assert ds.attrs["witness"].startswith("agrees")
    assert_right(ds, model, states(model, fault), 1e-7, fault.positions)


@pytest.mark.parametrize("name", ["mean of the batch", "wrong backward", "a gate"])
def test_what_begins_in_a_training_is_refused_at_each_of_its_steps(name):
    """Also where the same `Watch` has measured other steps, or another model of the same modules."""
    fault = FAULTS[name]
    watch = tracker.Watch(every_n_steps=1, probe=fault.ids, k=3, measures="coupling")
    model = fault.model().open()
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (watch(step, model.open(*[2] * (step > 0))) is None) == (step > 0)
    assert [*watch.skipped.reasons] == [1] and re.search(fault.says, watch.skipped.reasons[1])


@full_sequence
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_jacobian_that_was_formed_wrongly_in_one_row_is_not_used(dtype, monkeypatch):
    """All rows are formed together at single rows, and those of each position in the full sequence."""
    formed, fault = tracker.jacobians.rows.dense_jacobian, FAULTS["none"]

    def wrong(block, *given):
        J = formed(block, *given)
        if len(block.y) > len(fault.ids):
            J[3] += 0.1 * J[3].flip(0)
        return J

    monkeypatch.setattr("tracker.jacobians.rows.dense_jacobian", wrong)
    model = fault.model().to(dtype)
    ds = fault.measured(model, dtype)
    assert not ds.diagnostics_sliced.any()
    assert_right(ds, model, states(model, fault), CLOSE[dtype], fault.positions)


@full_sequence
@pytest.mark.parametrize("name", [name for name in FAULTS if "equal" in name])
def test_pairs_of_equal_tokens_are_right(name):
    fault = FAULTS[name]
    model, rows = fault.model().double(), [(0, 1, 4), (2, 0, 5)]
    found, x = jacobians_at(model, fault.ids, rows), states(model, fault)
    for (J, _), step in zip(found, model, strict=True):
        y = step(x.requires_grad_())
        expected = [in_one_graph(x, y, *row) for row in rows]
        torch.testing.assert_close(J, torch.stack(expected), atol=1e-9, rtol=0)
        x = y.detach()
