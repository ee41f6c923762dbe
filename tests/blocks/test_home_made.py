"""Models written by hand, whose attention has any name or none: blocks are found by what they do."""

import numpy as np
import pytest
import torch
from torch import nn

import tracker
from tests.support import home_made
from tests.support.compared import measured_as_by_brute_force
from tests.support.home_made import DEPTH, LM, MLP, Flat, MultiHead, PreNorm, TwoTowers
from tests.support.models import WIDTH, images, random, tokens
from tests.support.refusals import K, lines, refusal
from tests.support.refused import refused


def halves():
    return nn.Sequential(PreNorm(MultiHead()), PreNorm(MLP()))


# A model, its input, the names of its blocks with {i} for the number.
FOUND = {
    "a list of heads, softmax by hand": (
        lambda: LM(home_made.LectureBlock, "Sequential"),
        tokens(),
        "blocks.{i}",
    ),
    "functional attention in the block": (lambda: LM(Flat), tokens(), "blocks.{i}"),
    "forward(*args, **kwargs)": (lambda: LM(home_made.Wrapped), tokens(), "blocks.{i}"),
    "a ModuleDict": (lambda: LM(Flat, "ModuleDict"), tokens(), "blocks.{i}th"),
    "numbered attributes": (home_made.Numbered, tokens(), "block{i}"),
    "a Sequential of Sequentials": (lambda: LM(halves, "Sequential"), tokens(), "blocks.{i}"),
    "sequence first": (
        lambda: LM(lambda: Flat(sequence_first=True), sequence_first=True),
        tokens(),
        "blocks.{i}",
    ),
    "between convolutions and MLPs": (home_made.ViT, images(), "layers.{i}"),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found_whatever_their_attention_is_called(name):
    make, inputs, pattern = FOUND[name]
    names = [pattern.format(i=i) for i in range(DEPTH)]
    measured_as_by_brute_force(make().double().eval(), inputs, names)


def test_attention_with_a_name_needs_no_further_pass(monkeypatch):
    monkeypatch.setattr("tracker.blocks.prepare.judge", None)
    named = tracker.measure(LM(home_made.Torch), tokens(), measures="trajectory")
    assert named.attrs["blocks"].startswith("blocks.0")
    with pytest.raises(TypeError):
        tracker.measure(LM(Flat), tokens(), measures="trajectory")


def test_blocks_that_add_to_their_state_in_place():
    model = LM(home_made.InPlace)
    expected = LM(Flat)
    expected.load_state_dict(model.state_dict())
    of_model, of_expected = (
        tracker.measure(m, tokens(), measures="trajectory").norm for m in (model, expected)
    )
    np.testing.assert_allclose(of_model, of_expected, rtol=1e-5)


class Parallel(LM):
    def states(self, x):
        return x + sum(block(x) - x for block in self.blocks)


def test_projections_that_start_at_zero_hide_nothing():
    """A chain of blocks is found, and branches side by side are refused."""
    models = LM(Flat), Parallel(Flat)
    for model in models:
        for block in model.blocks:
            for parameter in (*block.out.parameters(), *block.down.parameters()):
                nn.init.zeros_(parameter)
    chain, branches = models
    ds = tracker.measure(chain, tokens(), measures="trajectory")
    assert ds.attrs["blocks"] == "blocks.0, blocks.1, blocks.2"
    between = "the model changes the hidden state between blocks.0 and blocks.1"
    assert between in refusal(branches)


def test_several_chains_are_offered_not_chosen_from():
    towers, x = TwoTowers(Flat, Flat), random(2, 4, WIDTH).float()
    message = refusal(towers, x)
    assert "2 lists of blocks found in TwoTowers by a forward pass" in message
    assert lines(message) == ["first", "second"]
    for line, depth in (("first", 2), ("second", 3)):
        assert tracker.measure(towers, x, blocks=line, k=K).sizes["layer"] == depth
    stages = LM(lambda: nn.Sequential(Flat(), Flat()))
    assert lines(refusal(stages)) == ["blocks", *(f"blocks.{i}" for i in range(DEPTH))]


def test_stacks_of_mlps_are_no_blocks_and_the_message_says_what_was_seen():
    message = refusal(LM(lambda: PreNorm(MLP())))
    assert (
        "  blocks (3 x PreNorm): they move no information between tokens" in message
        and not lines(message)
    )
    assert "a class whose name contains 'attention' or 'attn', or an attribute attn" in message
    stem = nn.Sequential(
        nn.Conv2d(3, WIDTH, 1), nn.Sequential(*(home_made.Residual2d() for _ in range(3)))
    )
    assert (
        "The model has no list of such modules; its parts are 0 (Conv2d), 1 (Sequential)"
        in refusal(stem, images())
    )
    message = refusal(
        nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(*(MLP() for _ in range(3)))),
        torch.randn(2, 8),
    )
    assert (
        "block 1.0 takes (2, 32); a residual block takes a hidden state (batch, tokens" in message
    )


@pytest.mark.parametrize(
    "part, where",
    [
        ("blocks.1", r"block 2 \(blocks.1\)"),
        ("embed", r"the model, before its first block \(blocks.0\),"),
    ],
)
def test_what_gives_nan_is_named(part, where):
    model = LM(Flat)
    with torch.no_grad():
        next(model.get_submodule(part).parameters()).fill_(torch.nan)
    with pytest.raises(
        FloatingPointError, match=f"^{where} gives values that are not finite .*check the weights"
    ):
        tracker.measure(model, tokens(), k=K)


def test_one_token_decides_nothing():
    assert "blocks (3 x Flat): not decided: with one token" in refusal(LM(Flat), tokens(1, 1))
    assert tracker.measure(LM(Flat), tokens(1, 1), k=K, blocks="blocks").sizes["layer"] == DEPTH


def test_attention_and_mlp_as_modules_of_one_list_are_offered_as_pairs():
    model = LM([part for _ in range(DEPTH) for part in halves()], "Sequential")
    message = refusal(model)
    assert "blocks (6 x PreNorm): 3 of them move no information between tokens" in message
    (blocks,) = lines(message)
    assert blocks == [
        "input of blocks.0",
        "input of blocks.2",
        "input of blocks.4",
        "output of blocks.5",
    ]
    assert tracker.measure(model, tokens(), blocks=blocks, k=K).sizes["layer"] == DEPTH


def test_without_a_forward_pass_one_list_is_assumed_and_several_are_listed():
    found = tracker.find_blocks(LM(Flat))
    assert "a list of modules, 3 x Flat; assumed, and checked when measuring" in str(found)
    assert tracker.measure(LM(Flat), tokens(), blocks=found, k=K).sizes["layer"] == DEPTH
    assert tracker.measure(LM(Flat), tokens(), blocks=found, dry_run=True).peak_bytes
    mlps = LM(lambda: PreNorm(MLP()))
    for dry_run in (True, False):
        message = refusal(mlps, blocks=tracker.find_blocks(mlps), dry_run=dry_run)
        assert "they move no information between tokens" in message
    with refused("These lines were not tried.*:\n  blocks='first'  # 2 x Flat\n"):
        tracker.find_blocks(TwoTowers(Flat, Flat))
    turned = LM(lambda: Flat(sequence_first=True), sequence_first=True)
    ds = tracker.measure(turned, tokens(), blocks=tracker.find_blocks(turned), k=K)
    assert ds.sizes["prompt"] == 2


class WithLengths(LM):
    """A model that checks a list, which does not divide into samples as tensors do."""

    def forward(self, ids, lengths):
        assert len(lengths) == len(ids)
        return super().forward(ids)


def test_inputs_that_do_not_divide_into_samples_are_checked_together():
    ids = tokens(2)
    ds = tracker.measure(WithLengths(Flat), {"ids": ids, "lengths": [ids.shape[1]] * 2}, k=2)
    assert ds.sizes["prompt"] == 2
