"""Tensors that the model mixes into the hidden state between blocks, declared as fixed: against their restatement in torch."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tracker
from tests.support.brute_force import in_one_graph
from tests.support.loops import STARTS, Loop, found_by_spans, ids, states_in_one_graph
from tests.support.models import tokens
from tests.support.nanochat import DEPTH, GPT, norm
from tests.support.refusals import lines, refusal
from tests.support.refused import refused
from tests.support.units import assert_same
from tracker.blocks.find import find_blocks
from tracker.jacobians.slicing import Rows
from tracker.model.boundaries import as_python, read_spans
from tracker.training.probe import find_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:block 1 .* measured over the full sequence", "ignore:this is a language model"
)

WTE, MIDDLE = "output of transformer.wte", f"output of transformer.h.{DEPTH // 2}"
H = [f"transformer.h.{i}" for i in range(DEPTH)]
CHAIN = [f"input of {H[0]}", *(f"output of {name}" for name in H)]
# A block, and what is mixed in after it
NEXT = [*(f"input of {name}" for name in H), f"output of {H[-1]}"]
OPTIONS = dict(k=4, dtype=torch.float64)

CASES = {
    "x0": ({}, WTE),
    "and a value embedding": ({}, [WTE, f"output of value_embeds.{DEPTH // 2}"]),
    "by the ids": ({}, "input of transformer.wte"),
    "smear": ({"smear": True}, WTE),
    "backout": ({"backout": True}, [WTE, MIDDLE]),
    "skip": ({"skip": True}, [WTE, f"output of {H[1]}"]),
}


def gpt(**options: bool) -> GPT:
    return GPT(**options).double().eval()


def restated(
    model: GPT, inputs: Tensor, skip: bool = False
) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Each span as a function of its start, with all other tensors constant, and its start. The first is block 0 alone."""
    blocks = list(model.transformer["h"])  # type: ignore[arg-type]
    given = {}
    with torch.no_grad():
        handles = [
            block.register_forward_pre_hook(lambda m, args, i=i: given.__setitem__(i, args[0]))
            for i, block in enumerate(blocks)
        ]
        handles.append(
            blocks[-1].register_forward_hook(lambda m, args, y: given.__setitem__(DEPTH, y))
        )
        model(inputs)
        for handle in handles:
            handle.remove()
        x0 = given[0] / (model.resid_lambdas[0] + model.x0_lambdas[0])
        values = {
            i: model.value_embeds[str(i)](inputs)
            for i in range(DEPTH)
            if str(i) in model.value_embeds
        }
        starts = [given[0]] + [blocks[i](given[i], values.get(i)) for i in range(DEPTH - 1)]

    def span(i: int) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            if i:
                x = model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0
                x = x + 0.3 * starts[2] if skip and i == DEPTH - 1 else x
            return blocks[i](x, values.get(i))

        return of

    spans = [span(i) for i in range(DEPTH)]
    with torch.no_grad():  # the restatement is the model
        for l in range(DEPTH):
            expected = starts[l + 1] if l + 1 < DEPTH else given[DEPTH]
            torch.testing.assert_close(spans[l](starts[l]), expected, rtol=1e-10, atol=1e-10)
    return list(zip(spans, starts, strict=True))


def jacobian(f: Callable[[Tensor], Tensor], X: Tensor, b: int, source: int, target: int) -> Tensor:
    """d (f(X) - X)_target / d x_source of a sample."""

    def row(x: Tensor) -> Tensor:
        full = X.clone()
        full[b, source] = x
        return f(full)[b, target]

    J = torch.func.jacrev(row)(X[b, source])
    return J - (source == target) * torch.eye(len(J), dtype=X.dtype)


@pytest.mark.parametrize("case", CASES)
def test_jacobians_hold_the_declared_tensors(case):
    options, fixed = CASES[case]
    model, inputs = gpt(**options), tokens()
    expected = restated(model, inputs, "skip" in options)
    sample, token, source = torch.tensor([0, 1]), torch.tensor([4, 6]), torch.tensor([1, 5])
    for rows in (Rows(sample, token), Rows(sample, token, source)):
        found = found_by_spans(model, inputs, find_blocks(model, fixed=fixed), rows)
        assert len(found) == DEPTH
        for J, (f, X) in zip(found, expected, strict=True):
            for r, (b, t2, t1) in enumerate(zip(rows.sample, rows.token, rows.live, strict=True)):
                of_block = jacobian(f, X, int(b), int(t1), int(t2))
                assert (J[r] - of_block).abs().max() < 1e-10 * of_block.abs().max()


def test_jacobians_of_spans_with_what_is_mixed_in_after_them():
    assert_between_tensors_of_one_graph(gpt(), tokens(), NEXT, WTE)


def assert_between_tensors_of_one_graph(model, inputs, boundaries, fixed):
    states = states_in_one_graph(model, inputs, boundaries)
    rows = Rows(torch.tensor([1]), torch.tensor([3]))
    found = found_by_spans(model, inputs, find_blocks(model, boundaries, fixed=fixed), rows)
    for J, x, y in zip(found, states[:-1], states[1:], strict=True):
        expected = in_one_graph(x, y, 1, 3, 3)
        assert (J[0] - expected).abs().max() < 1e-10 * expected.abs().max()


def test_a_state_that_is_fixed_varies_in_the_span_that_begins_with_it():
    model = Loop("first state again").double().eval()
    assert_between_tensors_of_one_graph(model, ids(), STARTS, STARTS[0])


def test_if_nothing_is_mixed_in_the_values_are_those_of_the_blocks():
    model = gpt()
    with torch.no_grad():
        model.resid_lambdas.fill_(1)
        model.x0_lambdas.fill_(0)
    of_blocks = tracker.measure(model, tokens(), **OPTIONS)
    of_spans = tracker.measure(model, tokens(), blocks=find_blocks(model, fixed=WTE), **OPTIONS)
    assert (of_blocks.attrs["fixed"], of_spans.attrs["fixed"]) == ("none", WTE)
    assert of_spans.attrs["blocks"].startswith(f"{CHAIN[0]} to {CHAIN[1]}, {CHAIN[1]} to ")
    names = ("miscoupling", "lss", "singular_value")
    assert_same(of_spans, of_blocks, names, rtol=1e-8, atol=1e-10)


# The refusal names the declaration


@pytest.mark.parametrize(
    ("case", "blocks"),
    [("x0", NEXT), ("smear", "transformer.h"), ("backout", None), ("backout", NEXT)],
)
def test_without_the_declaration_the_message_proposes_it(case, blocks):
    options, fixed = CASES[case]
    model = gpt(**options)
    message = refusal(model, blocks=blocks)
    (line,) = re.findall(r"^  blocks=(find_blocks.*?)  #", message, re.MULTILINE)
    proposed = eval(line)
    # What the middle state is computed from, at a boundary
    if case == "backout" and blocks == NEXT:
        fixed = [WTE, f"input of {H[DEPTH // 2]}"]
    assert [str(place) for place in proposed.fixed] == (
        [fixed] if isinstance(fixed, str) else fixed
    )
    assert "each line was tried on these inputs" in message
    assert tracker.measure(model, tokens(), blocks=proposed, k=2).sizes["layer"] == DEPTH


def test_a_constant_that_is_added_between_blocks_needs_no_declaration():
    class Shifted(GPT):
        def forward(self, idx):
            x = self.transformer["wte"](idx)
            for i, block in enumerate(self.transformer["h"]):  # type: ignore[arg-type]
                x = self.resid_lambdas[i] * block(x, None) + 1
            return self.lm_head(norm(x))

    model = Shifted().double().eval()
    model.value_embeds = nn.ModuleDict()
    assert lines(refusal(model)) == [CHAIN]


def test_a_boundary_after_a_norm_is_not_made_right_by_a_declaration():
    message = refusal(gpt(), blocks=[f"input of {name}.attn" for name in H] + [CHAIN[-1]])
    assert "is not the whole hidden state" in message and "  blocks=" not in message


def test_an_expression_of_spans_is_those_spans():
    for boundaries in (CHAIN, NEXT, STARTS, CHAIN[::2], [CHAIN[0], CHAIN[-1]]):
        spans = read_spans(boundaries)
        assert spans is not None and read_spans(eval(as_python(spans))) == spans
    pairs = read_spans([(CHAIN[0], CHAIN[1]), (NEXT[1], CHAIN[2])])
    assert pairs is not None and read_spans(eval(as_python(pairs))) == pairs


# What can not be held

WRONG = {
    "no such module": ("output of transformer.wpe", "no module named 'transformer.wpe'"),
    "no place": ("transformer.wte", "'transformer.wte' is no boundary; write 'input of NAME' or 'output of NAME'"),
    "a number": (0, "fixed=0; give 'output of NAME'"),
    "never reached": ([WTE, "output of transformer.h"], "never reached 1 of the fixed tensors: output of transformer.h"),
    "reached twice": ([WTE, "output of twice"], "reaches the output of twice twice; name fixed tensors"),
    "inside a span, from the state": (
        [WTE, f"output of {H[2]}.mlp"],
        rf"output of {H[2]}.mlp depends on the hidden state, .* at a boundary: {CHAIN[0]}, {CHAIN[1]}, ",
    ),
    "after the blocks": ([WTE, "output of lm_head"], "output of lm_head depends on the hidden state"),
    "another tensor": (
        f"output of value_embeds.{DEPTH // 2}",
        rf"start of span 2 .* not the whole hidden state.* also depends on {WTE}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_held_is_refused(case):
    fixed, message = WRONG[case]

    class Twice(GPT):
        def __init__(self):
            super().__init__()
            self.twice = nn.Identity()

        def forward(self, idx):
            self.twice(self.twice(self.resid_lambdas))
            return super().forward(idx)

    model = Twice().double().eval()
    with refused(message):
        tracker.measure(model, tokens(), blocks=find_blocks(model, fixed=fixed), **OPTIONS)


def test_other_calls_of_find_blocks():
    model = gpt()
    found = find_blocks(model, fixed=WTE)
    assert f"fixed: {WTE};" in str(found) and [str(start) for start, _ in found.spans] == CHAIN[:-1]
    with refused("give `fixed` to the call that made it"):
        find_blocks(model, found, fixed=WTE)
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        mixer = nn.Module()
        mixer.first, mixer.second = block.mlp.c_fc, block.mlp.c_proj
        block.attn, block.mlp = nn.Identity(), mixer
    with refused("a guess .*; name the blocks, too"):
        find_blocks(model, fixed=WTE)


def test_fixed_tensors_are_named_as_they_are_in_the_training_module():
    holder = nn.ModuleDict({"net": gpt()})  # which has no forward
    blocks = find_blocks(holder, fixed="output of net.transformer.wte")
    target = find_target(holder, blocks, None)
    assert target.part == "net" and target.blocks == find_blocks(holder["net"], CHAIN, fixed=WTE)
