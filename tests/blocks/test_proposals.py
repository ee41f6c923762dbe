"""The lines that a refusal proposes: each is tried, and only those that measure are proposed."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import x_transformers
from torch import nn
from vit_pytorch.simple_vit_with_hyper_connections import SimpleViT
from vit_pytorch.vit_with_patch_merger import ViT

import tracker
from tests.support import home_made
from tests.support.home_made import LM, TwoTowers, called
from tests.support.models import WIDTH, tokens
from tests.support.refusals import K, lines, refusal
from tests.support.refused import refused
from tracker.common.errors import UsageError

KINDS = [home_made.Torch, home_made.Flat]  # with attention that has a name, and without


@pytest.mark.parametrize("block", KINDS)
def test_a_block_that_is_in_a_list_several_times_is_measured_at_each_call(block):
    one, other = block(), block()
    shared = LM([one, other, one, other])
    copies = copy.deepcopy(shared)
    copies.blocks = nn.ModuleList(map(copy.deepcopy, shared.blocks))
    assert "4 times 2 x" in str(tracker.find_blocks(shared))
    found, expected = (tracker.measure(m, tokens(), k=K, dtype="float64") for m in (shared, copies))
    assert found.attrs["blocks"] == "blocks.0, blocks.1, blocks.0, blocks.1"
    np.testing.assert_array_equal(found.miscoupling, expected.miscoupling)
    alone = tracker.measure(LM([one] * 3), tokens(), k=K)
    assert alone.attrs["blocks"] == "blocks.0, blocks.0, blocks.0"


def test_blocks_that_two_lists_hold_are_those_of_the_first():
    model = LM(home_made.Torch)
    model.again = nn.ModuleList(model.blocks)
    assert tracker.find_blocks(model).names == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize("block", KINDS)
def test_blocks_in_a_list_of_lists_are_proposed_as_one_chain(block):
    chunks = LM([nn.ModuleList([block(), block()]) for _ in range(2)])
    flat = copy.deepcopy(chunks)
    flat.blocks = nn.ModuleList(b for chunk in flat.blocks for b in chunk)
    proposed = lines(refusal(chunks))
    assert proposed == [
        ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"],
        "blocks.0",
        "blocks.1",
    ]
    found = tracker.measure(chunks, tokens(), blocks=proposed[0], k=K)
    np.testing.assert_array_equal(
        found.miscoupling, tracker.measure(flat, tokens(), k=K).miscoupling
    )
    with refused("These lines were not tried, which takes inputs; tracker.measure"):
        tracker.find_blocks(chunks)


class NoGradients(home_made.Torch):
    """A block that the model can run, and nothing can linearize."""

    def forward(self, x):
        if torch.is_grad_enabled():
            raise NotImplementedError("no backward on this device")
        return super().forward(x)


def test_a_line_whose_derivative_fails_is_not_proposed():
    message = refusal(TwoTowers(NoGradients), torch.randn(2, 4, WIDTH))
    assert lines(message) == ["second"]
    assert re.search(
        r"^  spans from the input of first.*no backward on this device", message, re.MULTILINE
    )
    assert "Name the blocks to measure; each line was tried on these inputs" in message


def test_a_line_that_needs_more_memory_than_the_budget_is_not_proposed():
    model, x = TwoTowers(home_made.Torch), torch.randn(2, 300, WIDTH)
    assert "second" in lines(refusal(model, x))
    with refused(r"second \(3 x Torch.*needs more than 0\.1 MB of memory") as error:
        tracker.measure(model, x, k=K, memory_budget=400_000)
    assert not lines(str(error.value))


def test_where_no_line_works_the_message_says_why_for_each():
    class OnlyFirst(TwoTowers):
        def forward(self, x):
            first = x
            for block in (*self.first, *self.second):
                x = block(x) + first
            return x

    message = refusal(OnlyFirst(home_made.Torch), torch.randn(2, 4, WIDTH))
    assert not lines(message) and message.count("is not the whole hidden state") == 2
    assert (
        message.endswith("blocks=[('input of A', 'output of B'), ...]")
        and message.count("Name the blocks") == 1
    )


def test_a_refusal_can_be_sent_between_processes():
    with pytest.raises(UsageError) as error:
        tracker.find_blocks(TwoTowers(home_made.Torch))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


class Joint(nn.Module):
    """Attention over two streams, as in SD3 and Flux: image tokens first or last in what the block returns."""

    def __init__(self, image_first: bool):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.image_first = image_first

    def forward(self, image, text):
        x = torch.cat([image, text], 1)
        y = self.attn(x, x, x, need_weights=False)[0]
        image, text = (
            image + self.image(y[:, : image.shape[1]]),
            text + self.text(y[:, image.shape[1] :]),
        )
        return (image, text) if self.image_first else (text, image)


class Diffusion(nn.Module):
    def __init__(self, image_first: bool, single: int):
        super().__init__()
        self.joint = nn.ModuleList(Joint(image_first) for _ in range(3))
        self.single = nn.ModuleList(home_made.Torch() for _ in range(single))
        self.image_first = image_first

    def forward(self, image, text):
        for block in self.joint:
            out = block(image=image, text=text)
            image, text = out if self.image_first else out[::-1]
        x = torch.cat([text, image], 1)
        return called(self.single, x)[:, text.shape[1] :]


@pytest.mark.parametrize(("image_first", "words"), [(True, 4), (False, 4), (False, 6)])
def test_blocks_with_two_streams_are_refused_for_that_reason(image_first, words):
    inputs = {"image": torch.randn(2, 6, WIDTH), "text": torch.randn(2, words, WIDTH)}
    assert "two streams" in refusal(Diffusion(image_first, 0), inputs)
    message = refusal(Diffusion(image_first, 2), inputs)
    assert lines(message) == ["single"] and re.search(
        r"^  joint \(3 x Joint.*two streams", message, re.MULTILINE
    )


def decoder(**options) -> nn.Module:
    """Return a small language model of x-transformers."""
    layers = x_transformers.Decoder(dim=32, depth=3, heads=2, **options)
    return x_transformers.TransformerWrapper(num_tokens=40, max_seq_len=32, attn_layers=layers)


OF_VIT = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 3, "heads": 2, "mlp_dim": 64}
IMAGES = torch.randn(2, 3, 32, 32)
NO_CHAIN = {
    "hyper-connections": (
        lambda: SimpleViT(num_residual_streams=2, num_classes=5, **OF_VIT),
        IMAGES,
    ),
    "patches merged": (lambda: ViT(num_classes=5, **OF_VIT), IMAGES),
    "skips": (lambda: decoder(unet_skips=True), tokens()),
}


@pytest.mark.parametrize("case", NO_CHAIN)
def test_packages_whose_blocks_form_no_chain_are_refused_without_a_line(case):
    build, inputs = NO_CHAIN[case]
    message = refusal(build().eval(), inputs)
    assert "Tried on these inputs, and not measurable" in message
    assert not lines(message)


def test_a_package_whose_blocks_have_no_module_is_measured_by_the_proposed_line():
    model = decoder(macaron=True).eval()
    (blocks,) = lines(refusal(model))
    assert tracker.measure(model, tokens(), k=K, blocks=blocks).sizes["layer"] >= 3
