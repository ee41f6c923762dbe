"""Planted faults: the Jacobians are those by differences of the model in float64, or the measurement is refused with a reason."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import tracker
from tests.support.central_differences import assert_measured_as_it_runs, assert_right
from tests.support.draws import integers
from tests.support.measured import jacobians_at
from tests.support.refused import refused

D, L, N = 16, 3, 6
IDS = integers(0, 30, 4, N)
EQUAL = IDS[:, :1].repeat(1, N)
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-7}

MIXES = "mixes the samples of a batch"
OTHER_WAY = "is not the derivative of what the model computes there"
NOT_GIVEN = "autograd does not give"
UNSTEADY = "it is random or keeps state between calls"


class Block(nn.Module):
    """Attention and an MLP, and if it is open what `adds(block, x, *given)` returns."""

    shift: Any = 0  # that the model may set

    def __init__(self, adds: Callable[..., Any]):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp, self.gate = nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, 1)
        self.adds, self.is_open, self.calls = adds, True, 0
        self.attends = adds is not masked_by_state  # which attends by itself

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (x.unflatten(-1, (2, -1)).transpose(1, 2),) * 3
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        y = x + self.mlp(x)
        if self.attends:
            z = self.norm(x)
            y = y + self.attn(z, z, z, need_weights=False)[0]
        return y + self.adds(self, x, *given) if self.is_open else y


class Model(nn.Module):
    """Blocks of one class; `gives(model, l, x)` returns what block l is given beside the state."""

    def __init__(self, adds: Callable[..., Any], gives: Callable[..., tuple]):
        super().__init__()
        self.embedding, self.gives = nn.Embedding(30, D), gives
        self.blocks = nn.ModuleList(Block(adds) for _ in range(L))
        self.outside = nn.ModuleList(nn.Linear(D, 1) for _ in range(L))

    def step(self, l: int, x: Tensor) -> Tensor:
        return self.blocks[l](x, *self.gives(self, l, x))

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


@dataclass(frozen=True)
class Fault:
    """What blocks add, and what a measurement says.

    Attributes:
        says: part of the error, which names the block; empty: the Jacobians are right.
        gives: what the model gives the blocks beside the state.
        positions: `tokens=` of the measurement.
        layers: where it can be seen.
    """

    adds: Callable[..., Any]
    says: str = ""
    gives: Callable[..., tuple] = lambda model, l, x: ()
    ids: Tensor = IDS
    positions: Sequence[int] = (0, -1)
    layers: Sequence[int] = range(1, L + 1)

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return Model(self.adds, self.gives).eval()

    def measured(self, model: nn.Module, dtype: torch.dtype, **options: Any) -> Any:
        options = dict(k=3, keep="jacobian", measures="coupling") | options
        return tracker.measure(model, self.ids, dtype=dtype, tokens=self.positions, **options)


def states(model: Model, fault: Fault) -> Tensor:
    """Return the first state, in float64."""
    return model.double().embedding(fault.ids).detach()


class Wrong(torch.autograd.Function):
    """tanh whose backward is wrong by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.factor * g[0] * (1 - x.tanh() ** 2), None


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


def without_graph(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        return block.mlp(x)


def counted(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return 0.1 * (block.calls % 3) * x.tanh()


def set_shift(model: Model, l: int, x: Tensor) -> tuple:
    model.blocks[l].shift = model.outside[l](x)
    return ()


CONTEXT: list[Tensor] = []  # what a model leaves for its blocks; no module holds it


def leave(model: Model, l: int, x: Tensor) -> tuple:
    CONTEXT[:] = [model.outside[l](x)]
    return ()


FAULTS = {
    "none": Fault(lambda b, x: 0),
    # Samples of a batch
    "mean of the batch": Fault(lambda b, x: x.mean(0, keepdim=True), MIXES),
    "a little of that mean": Fault(lambda b, x: little(x) * x.mean(0, keepdim=True), MIXES),
    "first sample": Fault(lambda b, x: x[:1].tanh() + 0 * x, MIXES),
    "last sample": Fault(lambda b, x: x[-1:].tanh() + 0 * x, MIXES),
    "sample before": Fault(lambda b, x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]), MIXES),
    "two samples": Fault(lambda b, x: x.flip(0), MIXES, ids=IDS[:2]),
    "one coordinate of other samples": Fault(
        lambda b, x: 0.1 * at_last_coordinate(x).mean(0) + 0 * x, MIXES, positions=[-1]
    ),
    "batch norm": Fault(lambda b, x: F.batch_norm(x.mT, None, None, training=True).mT, MIXES),
    "attention across the batch": Fault(
        lambda b, x: b.attend(x.transpose(0, 1)).transpose(0, 1), MIXES
    ),
    "detached mean of the batch": Fault(lambda b, x: x.mean(0).detach().tanh() + 0 * x, MIXES),
    "a capacity, in order": Fault(by_order, MIXES),
    # Copies of the one token that is the last to pass change nothing: one draw in fifteen.
    "a capacity, by scores": Fault(by_scores, MIXES, layers=[1, 2]),
    "distance from one sample": Fault(
        lambda b, x: (x - 0.5 * x.mean(0, keepdim=True)).tanh(), ids=IDS[:1]
    ),
    "softmax less the largest score": Fault(softmax_of_batch),
    "an axis of samples": Fault(
        lambda b, x, gains: gains * x.tanh(),
        gives=lambda m, l, x: (torch.linspace(0.5, 1.5, len(x)).to(x)[:, None, None],),
    ),
    # What autograd gives
    "wrong backward": Fault(lambda b, x: Wrong.apply(x, 0.5), f"{NOT_GIVEN}.*function Wrong"),
    "backward too large by a twentieth": Fault(lambda b, x: Wrong.apply(x, 1.05), NOT_GIVEN),
    "backward too large by a hundredth": Fault(lambda b, x: Wrong.apply(x, 1.01), NOT_GIVEN),
    "right backward": Fault(lambda b, x: Wrong.apply(x, 1.0)),
    "wrong backward at few tokens": Fault(
        lambda b, x: torch.where(b.gate(x) > 0.4, Wrong.apply(x, 0.5), x.tanh()),
        f"{NOT_GIVEN}.*function Wrong",
        positions=range(N),
    ),
    # A single row is the last one
    "wrong backward at the last token": Fault(
        lambda b, x: torch.cat([x[:, :-1].tanh(), Wrong.apply(x[:, -1:], 0.5)], 1), positions=(0, 2)
    ),
    "NumPy": Fault(lambda b, x: torch.from_numpy(x.detach().numpy()).tanh(), f"{NOT_GIVEN}.*numpy"),
    ".data": Fault(lambda b, x: x.data.tanh(), NOT_GIVEN),
    "item() of one sample": Fault(lambda b, x: x * x[0, -1].norm().item(), "item", ids=IDS[:1]),
    "item() of a batch": Fault(lambda b, x: x * x[0, -1].norm().item(), MIXES),
    "no_grad": Fault(without_graph),
    # Tokens, by the block's own code
    "mean over tokens": Fault(lambda b, x: x.mean(1, keepdim=True) ** 2),
    "mean over tokens at few of them": Fault(
        lambda b, x: F.relu(4 * b.gate(x) - 3) * x.mean(1, keepdim=True), positions=range(N)
    ),
    "first token": Fault(lambda b, x: (x[:, :1] * x).tanh()),
    "mean over equal tokens": Fault(lambda b, x: x.mean(1, keepdim=True).tanh() + 0 * x, ids=EQUAL),
    "distance of equal tokens": Fault(lambda b, x: x - x.mean(1, keepdim=True), ids=EQUAL),
    "equal token before": Fault(lambda b, x: x.roll(1, 1).tanh(), ids=EQUAL),
    "attention to equal tokens": Fault(lambda b, x: (x @ x.mT).softmax(-1) @ x, ids=EQUAL),
    "identity over positions": Fault(
        lambda b, x: ((x @ x.mT).softmax(-1) + torch.eye(x.shape[1]).to(x)) @ x
    ),
    "two attentions": Fault(twice_with_a_global_token),
    "a mask from the state": Fault(masked_by_state, positions=range(N)),
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


@full_sequence
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("name", "layer"), [(name, layer) for name, fault in FAULTS.items() for layer in fault.layers]
)
def test_a_fault_of_one_block_is_refused_or_measured_right(name, layer, dtype):
    fault = FAULTS[name]
    model = fault.model().to(dtype).open(layer)
    if fault.says:
        with refused(rf"(?s)block {layer} .*{fault.says}"):
            fault.measured(model, dtype)
        return
    ds = fault.measured(model, dtype)
    assert ds.attrs["independent_checks"] == "{}"
    assert_right(ds, model, states(model, fault), CLOSE[dtype], fault.positions)


@pytest.mark.parametrize("name", WAYS_OF_TENSORS)
def test_other_ways_are_refused_in_bfloat16(name):
    fault = FAULTS[name]
    with refused(OTHER_WAY):
        fault.measured(fault.model().bfloat16(), torch.float32)


@pytest.mark.parametrize("name", [*WAYS_OF_TENSORS, "a context"])
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
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (watch(step, model.open(*[2] * (step > 0))) is None) == (step > 0)
    assert [*watch.skipped.reasons] == [1, 2]
    assert all(re.search(fault.says, reason) for reason in watch.skipped.reasons.values())


@full_sequence
@pytest.mark.parametrize("name", [name for name in FAULTS if "equal" in name])
def test_pairs_of_equal_tokens_are_right(name):
    fault = FAULTS[name]
    model, rows = fault.model().double(), [(0, 1, 4), (2, 0, 5)]
    found, x = jacobians_at(model, fault.ids, rows), states(model, fault)
    for (J, _), step in zip(found, model, strict=True):
        for J_of_row, (sample, source, token) in zip(J, rows, strict=True):

            def of_source(row, x=x, step=step, at=(sample, source), to=(sample, token)):
                moved = x.clone()
                moved[at] = row
                return step(moved)[to]

            expected = torch.autograd.functional.jacobian(of_source, x[sample, source])
            torch.testing.assert_close(J_of_row, expected, atol=1e-9, rtol=0)
        x = step(x).detach()


def from_state(name: str, seed: int) -> Any:
    """Return a model of transformers that computes a mask or a choice of keys from the state."""
    torch.manual_seed(seed)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SIZES, **MASKED_BY_STATE[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.double()


SIZES: Any = dict(
    vocab_size=30,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=16,
)
MASKED_BY_STATE: dict[str, Any] = {
    "DogeForCausalLM": dict(keep_window_size=2),
}


@full_sequence
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", MASKED_BY_STATE)
def test_masks_from_states_are_measured_right(name, seed):
    model = from_state(name, seed)
    # Its norms compute in float32.
    assert_measured_as_it_runs(model, IDS, model.model.layers, step=1e-3, tolerance=1e-3)
