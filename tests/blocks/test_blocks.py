"""Which blocks are found: the right tower and the right token against brute force, or a refusal whose lines work."""

import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn

import tracker
from tests.support import home_made
from tests.support.compared import measured_as_by_brute_force
from tests.support.draws import perturbed
from tests.support.llava import (
    COMMON,
    IDS,
    SEEN,
    VISION,
    llava,
    of,
)
from tests.support.models import HEADS, VOCABULARY, WIDTH, Encoder, images, neox, tokens
from tests.support.refusals import K, lines, refusal
from tests.support.refused import refused
from tracker.blocks.find import find_blocks
from tracker.common.errors import UsageError
from tracker.model.hidden_state import floating_tensors


def of_timm(name: str, **settings: Any) -> nn.Module:
    return timm.create_model(name, num_classes=5, **settings)


PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]}


# A model, its input, and where its blocks are: container, final norm counted in (or None), position measured; and a part of what
# `find_blocks` prints
FOUND = {
    "llava": (
        llava,
        SEEN,
        "model.language_model.layers",
        "model.language_model.norm",
        8,
        "the text tower model.language_model (LlamaModel), which gives the logits",
    ),
    "llava, no head": (
        lambda: llava().model,
        IDS,
        "language_model.layers",
        "language_model.norm",
        8,
        "which gives the last hidden state",
    ),
    "clip, vision": (
        lambda: of("CLIPVisionModel", **VISION),
        images(),
        "encoder.layers",
        None,
        0,
        "class token: position 0",
    ),
    "siglip, vision": (
        lambda: of("SiglipVisionModel", **VISION),
        images(),
        "encoder.layers",
        None,
        3,
        "class token: none",
    ),
    "bart, its decoder alone": (
        lambda: of(
            "BartForCausalLM",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=3,
            decoder_layers=2,
            decoder_attention_heads=HEADS,
            decoder_ffn_dim=2 * WIDTH,
            max_position_embeddings=64,
        ),
        IDS,
        "model.decoder.layers",
        None,
        8,
        "the only list of blocks with attention, 2 x BartDecoderLayer",
    ),
    "beit, mean of the patches": (
        lambda: of("BeitModel", **VISION),
        images(),
        "layers",
        None,
        4,
        "",
    ),
    "beit, class token": (
        lambda: of("BeitForImageClassification", **VISION, use_mean_pooling=False),
        images(),
        "beit.layers",
        None,
        0,
        "class token: position 0",
    ),
    "timm vit, mean of the patches": (
        lambda: of_timm(
            "vit_tiny_patch16_224",
            img_size=16,
            patch_size=8,
            embed_dim=32,
            depth=3,
            num_heads=4,
            global_pool="avg",
        ),
        images(),
        "blocks",
        None,
        4,
        "class token: none",
    ),
    "xcit": (
        lambda: of_timm("xcit_nano_12_p8_224", img_size=32, embed_dim=32, depth=3, num_heads=4),
        images(2, 32),
        "blocks",
        None,
        15,
        "3 x XCABlock, before the class attention of cls_attn_blocks (2 x ClassAttentionBlock)",
    ),
    "cait": (
        lambda: of_timm(
            "cait_xxs24_224", img_size=16, patch_size=8, embed_dim=32, depth=3, num_heads=4
        ),
        images(),
        "blocks",
        None,
        3,
        "before the class attention of blocks_token_only (2 x LayerScaleBlockClassAttn)",
    ),
}


T5 = {
    "decoder_start_token_id": 0,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": HEADS,
    "num_layers": 3,
}
# A model of several chains, its input, final norm and position of each line that is offered, and a part of the message
REFUSED = {
    "t5": (
        lambda: of("T5ForConditionalGeneration", **T5),
        PAIR,
        {
            "encoder.block": ("encoder.final_layer_norm", 8),
            "decoder.block": ("decoder.final_layer_norm", 5),
        },
        "2 lists of blocks found (encoder.block, decoder.block) in T5ForConditionalGeneration",
    ),
    "clip": (
        lambda: of(
            "CLIPModel",
            text_config=COMMON
            | {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2},
            vision_config=VISION,
            projection_dim=8,
        ),
        {"input_ids": IDS, "pixel_values": images()},
        {
            "text_model.encoder.layers": ("text_model.final_layer_norm", 8),
            "vision_model.encoder.layers": (None, 0),
        },
        "blocks='vision_model.encoder.layers'  # 3 x CLIPEncoderLayer",
    ),
    "swin": (
        lambda: of(
            "SwinModel",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 3],
            num_heads=[2, 2],
            window_size=4,
        ),
        images(1, 32),
        {"encoder.layers.0.blocks": (None, 63), "encoder.layers.1.blocks": (None, 15)},
        "blocks='encoder.layers.1.blocks'  # 3 x SwinLayer",
    ),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(make().double().eval(), seed=2)


def assert_measured_as_by_brute_force(model, inputs, container, norm, position, **keywords):
    """Compare a measurement of blocks that are named by hand, at the position and with the norm that are taken by default."""
    names = [f"{container}.{name}" for name, _ in model.get_submodule(container).named_children()]
    ds = measured_as_by_brute_force(model, inputs, names, norm or "", final_norm="auto", **keywords)
    assert (ds.token_position == position).all()


@pytest.mark.parametrize("name", FOUND)
def test_the_blocks_that_reach_the_output_are_found(name):
    make, inputs, container, norm, position, message = FOUND[name]
    model = made(make)
    found = find_blocks(model)
    assert [model.get_submodule(block) for block in found.names] == list(
        model.get_submodule(container).children()
    )
    assert message in str(found)
    assert norm is None or found.final_norms[0] == norm
    assert_measured_as_by_brute_force(model, inputs, container, norm, position)


@pytest.mark.parametrize("name", REFUSED)
def test_no_guess_is_made_between_towers_or_stages_and_every_line_offered_works(name):
    make, inputs, offered, part = REFUSED[name]
    model = made(make)
    message = refusal(model, inputs)
    assert part in message and lines(message) == list(offered)
    for line, (norm, position) in offered.items():
        assert_measured_as_by_brute_force(model, inputs, line, norm, position, blocks=line)


def test_a_vision_tower_named_by_the_caller_keeps_to_its_own_norm_and_head():
    clip = find_blocks(made(llava), "model.vision_tower.encoder.layers")
    assert clip.unembedding is None and not clip.include_final_norm
    # Those after the blocks first
    assert clip.final_norms == tuple(
        f"model.vision_tower.{name}" for name in ("post_layernorm", "pre_layrnorm")
    )


def test_the_encoders_states_have_no_logits():
    model = made(lambda: of("T5ForConditionalGeneration", **T5))
    assert find_blocks(model, "encoder.block").unembedding is None
    assert find_blocks(model, "decoder.block").unembedding == "lm_head"
    probe = {"input_ids": IDS, "labels": IDS}  # of which it makes the decoder's input
    assert tracker.Watch(probe=probe, k=K, blocks="decoder.block")(0, model) is not None


def test_padding_beside_a_decoders_input_is_refused():
    model = made(lambda: of("T5Model", **T5))
    mask = torch.ones_like(IDS)
    mask[0, 6:] = 0
    with refused("padding among 9 tokens, but which of the blocks' 6 tokens"):
        tracker.measure(model, PAIR | {"attention_mask": mask}, blocks="decoder.block", k=K)


def test_two_language_models_in_one_module_are_ambiguous():
    distilled = nn.ModuleDict({"teacher": neox(), "student": neox(num_hidden_layers=2)})
    with pytest.raises(UsageError) as error:
        find_blocks(distilled)
    assert lines(str(error.value)) == ["teacher.gpt_neox.layers", "student.gpt_neox.layers"]


class AttentionHead(home_made.Head):
    """Attention by its name."""


def test_heads_inside_a_block_are_not_blocks():
    model = home_made.LM(home_made.LectureBlock)
    for block in model.blocks:
        for head in block.sa.heads:
            head.__class__ = AttentionHead
    assert find_blocks(model).names == ("blocks.0", "blocks.1", "blocks.2")


def test_blocks_among_other_modules_are_offered_by_their_names():
    layer = [nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layer[:2], nn.Linear(WIDTH, WIDTH), *layer[2:])
    with refused("2 lists of blocks found") as refusal:
        find_blocks(model)
    assert lines(str(refusal.value)) == [["1", "2"], ["4", "5"]]
    measured = tracker.measure(model, torch.randn(2, 4, WIDTH), blocks=["4", "5"], k=2)
    assert measured.sizes["layer"] == 2


class Unread(nn.Module):
    """The only blocks in a list feed an output that is thrown away."""

    def __init__(self, read: bool, returned: Callable[[Tensor], Any]):
        super().__init__()
        self.encoder, self.read, self.returned = Encoder(), read, returned
        self.head = nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)  # an untrained head must not hide what reaches it

    def forward(self, ids):
        seen = self.encoder(ids)
        return self.returned(self.head((seen if self.read else self.encoder.embed(ids)).mean(1)))


@dataclass(slots=True)
class Output:
    scores: Any


class NamedOutput(NamedTuple):
    scores: Any


FORMS = {
    "dataclass": Output,
    "a dataclass in another": lambda scores: {"nested": [Output({"of": Output(scores)})]},
    "named tuple": NamedOutput,
    "mapping": lambda scores: UserDict(scores=scores),
    "object": lambda scores: SimpleNamespace(scores={"of": scores}),
}
WITHOUT_TENSORS = {
    "generator": lambda scores: (score for score in scores),
    "NoneType": lambda scores: None,
    "Tensor": lambda scores: scores.argmax(-1),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_returns_is_found_in_any_form(form):
    scores = torch.ones(2)
    (found,) = floating_tensors(FORMS[form](scores))
    assert found is scores


def test_whether_blocks_reach_the_output_is_seen_in_what_a_model_returns():
    unread = Unread(False, Output)
    with refused("returns depends on its last block, encoder.*layers.2"):
        tracker.measure(unread, tokens(), k=2)
    # Blocks that the caller names may lead nowhere.
    for model, blocks in ((unread, "encoder.encoder.layers"), (Unread(True, Output), None)):
        assert tracker.measure(model, tokens(), k=2, blocks=blocks).sizes["layer"] == 3


@pytest.mark.parametrize("kind", WITHOUT_TENSORS)
def test_blocks_are_to_be_named_if_a_model_returns_nothing_that_shows_them(kind):
    model = Unread(True, WITHOUT_TENSORS[kind])
    with refused(rf"returns a {kind} without a floating tensor") as refusal:
        tracker.measure(model, tokens(), k=2)
    names = eval(re.findall(r"say what to measure: blocks=(.*)", str(refusal.value))[0])
    assert tracker.measure(model, tokens(), k=2, blocks=names).sizes["layer"] == 3


class Pooled(nn.Module):
    """An image model that says nothing of where its class token stands, nor of whether it is read."""

    def __init__(self, at: int | None, reads: int | None):
        super().__init__()
        self.patch, self.cls_token = (
            nn.Conv2d(3, WIDTH, 8, 8),
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
        )
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.at, self.reads = nn.Linear(WIDTH, 5), at, reads

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        token = self.cls_token.expand(len(x), -1, -1)
        states = {0: [token, x], 4: [x, token], None: [x]}[self.at]
        x = self.encoder(torch.cat(states, 1))
        return self.head(x[:, 1:].mean(1) if self.reads is None else x[:, self.reads])


def test_a_class_token_is_confirmed_by_what_reaches_the_output():
    assert tracker.measure(Pooled(0, 0), images(1), k=2).attrs["tokens"] == "cls"
    with refused(r"output does not depend on it \(position 0 after encoder.layers.1\)"):
        tracker.measure(Pooled(0, None), images(1), k=2)
    last = Pooled(4, 4)
    with refused("cls_token enters the first block at position 4, not at 0") as refusal:
        tracker.measure(last, images(1), k=2)
    line = re.findall(r"blocks=(find_blocks\(.*\))", str(refusal.value))[0]
    found = eval(line, {"find_blocks": find_blocks, "model": last})
    assert (tracker.measure(last, images(1), blocks=found, k=2).token_position == 4).all()
    with refused("first block at no position, not at 0 alone.*or positions"):
        tracker.measure(Pooled(None, None), images(1), k=2)
    for choice in ("last", "cls", "all", [0, 1]):
        assert tracker.measure(
            Pooled(0, None), images(1), tokens=choice, k=2
        ).diagnostics_complete.all()


def test_detection_tokens_are_read_and_the_class_token_is_not():
    settings = VISION | {"image_size": [16, 16], "num_detection_tokens": 3}
    with refused("YolosForObjectDetection has a class token, but its output does not depend"):
        tracker.measure(of("YolosForObjectDetection", **settings), images(), k=2)
