"""Tensors that the model mixes into the hidden state between blocks, declared as fixed: which are proposed, and refused.

The Jacobians are compared in `test_spans`.
"""

import re

import pytest
from torch import nn

import tracker
from tests.support.loops import STARTS
from tests.support.models import tokens
from tests.support.nanochat import CHAIN, DEPTH, GPT, NEXT, WTE, H
from tests.support.refusals import lines, refusal
from tests.support.refused import refused
from tracker.blocks.find import find_blocks
from tracker.model.boundaries import as_python, read_spans
from tracker.training.probe import find_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:block 1 .* measured over the full sequence", "ignore:this is a language model"
)

PROPOSED = {
    "smear": ({"smear": True}, "transformer.h", [WTE]),
    # What the middle state is computed from, at a boundary
    "backout, at a boundary": ({"backout": True}, NEXT, [WTE, f"input of {H[DEPTH // 2]}"]),
}


@pytest.mark.parametrize("case", PROPOSED)
def test_without_the_declaration_the_message_proposes_it(case):
    options, blocks, fixed = PROPOSED[case]
    model = GPT(**options)
    message = refusal(model, blocks=blocks)
    (line,) = re.findall(r"^  blocks=(find_blocks.*?)  #", message, re.MULTILINE)
    proposed = eval(line)
    assert [str(place) for place in proposed.fixed] == fixed
    assert "each line was tried on these inputs" in message
    ds = tracker.measure(model, tokens(), blocks=proposed, k=2)
    assert ds.sizes["layer"] == DEPTH and ds.attrs["fixed"] == ", ".join(fixed)


def test_a_change_between_blocks_that_depends_on_nothing_else_needs_no_declaration():
    model = GPT()
    model.value_embeds = nn.ModuleDict()
    nn.init.zeros_(model.x0_lambdas)
    assert lines(refusal(model)) == [CHAIN]


def test_a_boundary_after_a_norm_is_not_made_right_by_a_declaration():
    message = refusal(GPT(), blocks=[f"input of {name}.attn" for name in H] + [CHAIN[-1]])
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
    "reached twice": ([WTE, f"output of {H[0]}.mlp"], f"reaches the output of {H[0]}.mlp twice; name fixed tensors"),
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
    model = GPT()
    first, second, *_ = model.transformer["h"]  # type: ignore[misc]
    second.mlp = first.mlp
    with refused(message):
        tracker.measure(model, tokens(), blocks=find_blocks(model, fixed=fixed), k=4)


def test_other_calls_of_find_blocks():
    model = GPT()
    found = find_blocks(model, fixed=WTE)
    assert f"fixed: {WTE};" in str(found) and [str(start) for start, _ in found.spans] == CHAIN[:-1]
    with refused("give `fixed` to the call that made it"):
        find_blocks(model, found, fixed=WTE)
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        mixer = nn.Module()
        mixer.first, mixer.second = block.mlp.up, block.mlp.down
        block.attn, block.mlp = nn.Identity(), mixer
    with refused("a guess .*; name the blocks, too"):
        find_blocks(model, fixed=WTE)


def test_places_are_named_as_they_are_in_the_training_module():
    holder = nn.ModuleDict({"net": GPT()})  # which has no forward
    blocks = find_blocks(holder, fixed="output of net.transformer.wte")
    target = find_target(holder, blocks, None)
    assert target.part == "net" and target.blocks == find_blocks(holder["net"], CHAIN, fixed=WTE)
    target = find_target(holder, blocks, lambda module, batch: module["net"](batch))
    assert str(target.blocks.spans[0][0]) == f"input of module.net.{H[0]}"
    holder.other = nn.Linear(2, 2)
    with refused("outside 'net'"):
        find_target(holder, ["input of net.transformer.wte", "input of other"], None)
