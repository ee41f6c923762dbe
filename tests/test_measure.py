"""Tests of `tracker.measure`: the Dataset, the unchanged model, and one clear message for bad input."""

import re
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
import timm
import torch
from torch import nn
from transformers import ASTConfig, ASTModel, BatchEncoding

import tracker
from tests.support import home_made
from tests.support.models import (
    DEPTH,
    WIDTH,
    Encoder,
    Size,
    build,
    images,
    neox,
    timm_vit,
    tokens,
    torchvision_vit,
    vision,
)
from tests.support.refused import refused
from tests.support.rounding import of_miscouplings
from tests.support.unchanged import assert_unchanged, snapshot
from tests.support.units import assert_same
from tests.support.words import tokenizer
from tracker.blocks.find import find_blocks
from tracker.common.errors import Note


class OfOne(nn.Module):
    """A model whose forward takes one mapping, or a list of ids and mask."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        given = (
            batch
            if isinstance(batch, Mapping)
            else dict(zip(("input_ids", "attention_mask"), batch, strict=True))
        )
        return self.net(**given)


def test_a_mapping_or_list_as_the_one_argument_is_measured():
    """As the tensors in it, with their mask."""
    net, _ = build("llama, grouped keys")
    given = {
        "input_ids": tokens(2, 5),
        "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
    }
    expected = tracker.measure(net, given, k=4)
    for batch in (given, BatchEncoding(given)):
        _assert_equal_measures(tracker.measure(OfOne(net), {"batch": batch}, k=4), expected)
    unpadded = tracker.measure(net, given["input_ids"], k=4)
    without_mask = OfOne(net)
    without_mask.forward = lambda batch: net(batch["input_ids"])
    positions = tracker.measure(without_mask, {"batch": given}, k=4).token_position
    assert positions.values.tolist() == [[4], [2]]  # the last token that the caller's mask leaves
    listed = [given["input_ids"], torch.ones(2, 5, dtype=torch.long)]
    _assert_equal_measures(tracker.measure(OfOne(net), {"batch": listed}, k=4), unpadded)
    with refused(
        r"missing .*'batch'; if batch is one mapping of them, give {'batch': {'input_ids': ...}}"
    ):
        tracker.measure(OfOne(net), given)
    with refused(r"holds no tensor for the model, .* but \['batch'\]"):
        tracker.measure(OfOne(net), {"batch": {"attention_mask": torch.ones(2, 5)}})


def _assert_equal_measures(ds, expected):
    assert_same(ds, expected, ("miscoupling", "lss", "token_position"), rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_measured_in_float32(stored):
    model, inputs = build("gpt_neox")
    model = model.to(stored)
    seen = tracker.measure(model, inputs, k=4)
    assert {p.dtype for p in model.parameters()} == {stored}
    assert seen.attrs["witness"].startswith("agrees")
    expected = tracker.measure(model.float(), inputs, k=4)
    assert_same(seen, expected, ("miscoupling", "lss", "norm_normed"))
    assert (
        seen.attrs["weights_dtype"] == str(stored).removeprefix("torch.")
        and seen.attrs["dtype"] == "float32"
    )


def test_states_are_those_that_transformers_gives():
    """It applies the final norm to the last one; "exclude" leaves this out."""
    model, inputs = build("gpt_neox")
    ds = tracker.measure(model, inputs, k=4, dtype="float64")
    assert ds.attrs["final_norm_module"] == "gpt_neox.final_layer_norm"
    with torch.no_grad():
        hidden = model.double()(inputs, output_hidden_states=True, use_cache=False).hidden_states
    norms = torch.stack([h.norm(dim=-1) for h in hidden], 1)
    np.testing.assert_allclose(ds.norm_normed, norms, rtol=1e-9)
    excluded = tracker.measure(model, inputs, k=4, dtype="float64", final_norm="exclude")
    assert_same(excluded, ds, ("norm", "expodistance", "miscoupling"), rtol=1e-12)
    assert not any(name.endswith("_normed") for name in excluded)


def test_the_last_block_is_left_out_where_the_others_are_named():
    """As in an older script of the paper's authors."""
    model, inputs = build("gpt_neox")
    whole = tracker.measure(model, inputs, k=4, dtype="float64")
    blocks = [f"gpt_neox.layers.{l}" for l in range(DEPTH - 1)]
    others = tracker.measure(model, inputs, k=4, dtype="float64", blocks=blocks)
    inner = {"layer": slice(0, DEPTH - 1), "layer_other": slice(0, DEPTH - 1)}
    np.testing.assert_allclose(others.miscoupling, whole.miscoupling.isel(inner), atol=1e-12)
    np.testing.assert_array_equal(others.norm, whole.norm[:, :DEPTH])
    assert "norm_normed" not in others and others.attrs["final_norm"] == "exclude"


def test_default_tokens_and_k():
    assert tracker.measure(timm_vit(), images()).attrs["tokens"] == "cls"
    assert tracker.measure(torchvision_vit(), images()).attrs["tokens"] == "cls"
    ds = tracker.measure(neox(), tokens())
    assert ds.attrs["tokens"] == "last" and list(ds.k.values) == [10, 30]
    assert (ds.token_position == 6).all()
    every = tracker.measure(timm_vit(), images(), tokens="all", k=2)
    assert every.sizes["token"] == 5


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox, eager", "timm vit"])
def test_model_is_unchanged_when_measuring_raises(name):
    model, inputs = build(name)
    model.train()
    blocks = [model.get_submodule(block) for block in find_blocks(model).names]
    with torch.no_grad():
        next(p for n, p in blocks[1].named_parameters() if "norm" not in n).fill_(float("nan"))
    before = snapshot(model)
    before["parameters"] = {n: v for n, v in before["parameters"].items() if not v[1].isnan().any()}
    with pytest.raises(
        FloatingPointError, match=r"block 2 \(.*1\) gives values that are not finite"
    ):
        tracker.measure(model, inputs)
    assert_unchanged(model, before)


def test_measured_within_inference_mode_and_autocast():
    model, inputs = build("gpt_neox")
    expected = tracker.measure(model, inputs, k=4)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        seen = tracker.measure(model, inputs, k=4)
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
    np.testing.assert_array_equal(seen.miscoupling, expected.miscoupling)


class Wrapped(nn.Module):
    """A Hugging Face model inside a user's module, as in a LightningModule."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, ids):
        return self.inner(ids).logits


def test_the_message_for_a_sequence_first_model_gives_a_wrapper_that_works():
    def encoder(batch_first):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, WIDTH, norm_first=True, batch_first=batch_first
        )
        return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False).eval()

    model, x = encoder(False), torch.randn(10, 2, WIDTH)
    for blocks in (None, find_blocks(model, batch_first=False)):
        with refused("2 samples of 10 tokens, but 10 were given. The blocks are seq") as error:
            tracker.measure(model, x, blocks=blocks)
    definition, call = re.findall(
        r"^  (class .*\n.*)\nThen give (.*?)\. ", str(error.value), re.MULTILINE
    )[0]
    assert "batch_first=False" not in str(error.value)
    names = {"nn": nn, "tracker": tracker, "model": model, "x": x}
    exec(definition, names)
    found, expected = eval(call, names), tracker.measure(encoder(True), x.transpose(0, 1))
    np.testing.assert_allclose(
        found.miscoupling, expected.miscoupling, atol=of_miscouplings(expected)
    )


class TwoEncoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Encoder(), Encoder()


BAD = {
    "k above d": (dict(k=WIDTH + 1), rf"k={WIDTH + 1}.*1 to the model's width d = {WIDTH}"),
    "token out of range": (dict(tokens=[0, 7]), r"\[7\] are out of range.*7 tokens"),
    "unknown token choice": (dict(tokens="first"), "give last, cls, all or positions"),
    "no class token": (dict(tokens="cls"), "state the class token"),
    "window too wide": (
        dict(window=99),
        "window=99 states, but a trajectory through this model has 4",
    ),
    "a block twice": (dict(blocks=["gpt_neox.layers.0"] * 2), "names a module twice"),
    "blocks by a wrong name": (dict(blocks="gpt_neox.layer"), "no module named 'gpt_neox.layer'"),
    "every second block": (
        dict(blocks=["gpt_neox.layers.0", "gpt_neox.layers.2"]),
        "name consecutive blocks",
    ),
    "a generator of blocks": (
        dict(blocks=(str(i) for i in range(2))),
        "blocks=<generator.*; give the name of the list",
    ),
    "a tokenizer's name": (
        dict(tokenizer="gpt2"),
        r"'gpt2' \(str\).*itself: AutoTokenizer.from_pretrained\('gpt2'\)",
    ),
    "an object as tokenizer": (
        dict(tokenizer=object()),
        r"\(object\), which can't be called.*AutoTokenizer",
    ),
    "not a block": (dict(blocks=["gpt_neox.layers.0.mlp.dense_h_to_4h"]), "keeps the shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings(case):
    keywords, message = BAD[case]
    with refused(message):
        tracker.measure(neox(), tokens(), **keywords)


@pytest.mark.parametrize(
    "model, name", [("gpt2-xl", "gpt2-xl"), (None, "gpt2"), (nn.Linear, "gpt2")]
)
def test_what_is_no_model_is_refused(model, name):
    message = rf"model is .* \((str|NoneType|type)\); give the loaded model, .*\.from_pretrained\('{name}'\)"
    with refused(message):
        tracker.measure(model, tokens())
    with refused(message):
        find_blocks(model)


@pytest.mark.parametrize(
    "container", [nn.ModuleList, tuple, lambda blocks: dict(enumerate(blocks)).values()]
)
def test_blocks_in_any_container(container):
    model = neox()
    assert find_blocks(model, container(model.gpt_neox.layers)).names == find_blocks(model).names


BAD_INPUTS = {
    "empty prompt": ("", "prompt 0 is empty"),
    "no prompts": ([], "at least one prompt"),
    "a number": (3, "inputs of type int"),
    "too long": (["the " * 40], "40 tokens, more than the model's context of 32.*max_tokens=32"),
    "beyond the vocabulary": (torch.tensor([[1, 50]]), "ids from 1 to 50.*vocabulary has 50"),
    "negative id": (torch.tensor([[-1, 3]]), "ids from -1"),
    "no batch axis": (torch.tensor([1, 2, 3]), "first axis must be the batch"),
    "no tokens": (torch.zeros(1, 0, dtype=torch.long), "no tokens"),
    "lists of ids": (
        [[1, 2, 3]],
        r"inputs of type list.*a tensor .*of token ids.*torch.as_tensor\(inputs\)",
    ),
    "a list of tensors": ([torch.tensor([1, 2])], r"inputs of shape \(2,\)"),
    "empty mapping": ({}, "holds no tensor"),
    "a mask alone": (
        {"attention_mask": torch.ones(1, 3)},
        r"holds no tensor .* but \['attention_mask'\]",
    ),
    "masked out": (
        {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3)},
        "no token",
    ),
}


BAD_LENGTHS = {
    **{
        f"{given!r} tokens": (["the cat"], given, f"max_tokens={given!r}; give a whole number")
        for given in (0, "8", True)
    },
    "ids": (tokens(), 5, r"max_tokens=5 cuts prompts.*cut them: inputs\[:, :5\]"),
    "a mapping": ({"input_ids": tokens()}, 5, "max_tokens=5 cuts prompts"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(case):
    inputs, message = BAD_INPUTS[case]
    with refused(message):
        tracker.measure(neox(), inputs, tokenizer=tokenizer())


@pytest.mark.parametrize("case", BAD_LENGTHS)
def test_bad_lengths(case):
    inputs, max_tokens, message = BAD_LENGTHS[case]
    with refused(message):
        tracker.measure(neox(), inputs, tokenizer=tokenizer(), max_tokens=max_tokens)


def test_a_mask_before_embeddings_is_not_taken_for_token_ids():
    model, mask = neox(), torch.ones(1, 5, dtype=torch.long)
    embeddings = torch.randn(1, 5, Size().width)
    ds = [
        tracker.measure(model, given, k=2)
        for given in (
            {"attention_mask": 60 * mask, "inputs_embeds": embeddings},  # 60: beyond the vocabulary
            {"inputs_embeds": embeddings, "attention_mask": 60 * mask},
        )
    ]
    np.testing.assert_array_equal(ds[0].miscoupling, ds[1].miscoupling)
    padded = {"inputs_embeds": embeddings, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    assert np.isnan(tracker.measure(model, padded, k=2).norm[0, 0]).values.tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_tokenizer_without_ids_and_a_class_token_out_of_range_are_named():
    with refused("tokenizer="):
        tracker.measure(neox(), ["the cat"])
    with refused(r"the tokenizer returns \['ids'\]; it has to return .* input_ids"):
        tracker.measure(neox(), ["the"], tokenizer=lambda text, **_: {"ids": [1]})
    blocks = find_blocks(timm_vit(), class_token=500)
    with refused("class_token=500, but the shortest sample has 5 tokens"):
        tracker.measure(timm_vit(), images(), blocks=blocks, tokens="cls")


IMAGE_MODELS = {
    "timm": (timm_vit, 3),
    "Hugging Face, one channel": (lambda: vision("ViTModel", num_channels=1)(Size()), 1),
    "home-made": (home_made.ViT, 3),
}


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_an_image_without_a_batch_axis_is_refused(name):
    make, channels = IMAGE_MODELS[name]
    model, image = make(), torch.randn(channels, Size().pixels, Size().pixels)
    with refused(r"a single image without a batch axis.*measure\(model, image\[None\]\)"):
        tracker.measure(model, image)
    assert tracker.measure(model, image[None], measures="trajectory").sizes["prompt"] == 1


def test_a_batch_of_one_spectrogram_is_no_image():
    size = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "intermediate_size": WIDTH,
    }
    model = ASTModel(ASTConfig(**size, max_length=32, num_mel_bins=32))
    assert (
        tracker.measure(model, torch.randn(1, 32, 32), measures="trajectory").sizes["prompt"] == 1
    )


def test_inputs_that_the_forward_does_not_accept_are_refused():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2
    )
    images = torch.randn(1, 3, 32, 32)
    with refused("forward of VisionTransformer does not take these inputs: missing.*'x'"):
        tracker.measure(model, {"pixels": images})
    with pytest.warns(Note, match="a batch of a training, .float32 .1, 3.*first entry"):
        of_loader = tracker.measure(model, [images, torch.zeros(1)])
    assert_same(of_loader, tracker.measure(model, images), ["miscoupling"])


def test_prompts_for_a_forward_that_calls_its_tokens_something_else():
    model = Wrapped(neox())
    ds = tracker.measure(model, ["the cat"], tokenizer=tokenizer(), k=2)
    inner = tracker.measure(model.inner, ["the cat"], tokenizer=tokenizer(), k=2)
    np.testing.assert_array_equal(ds.miscoupling, inner.miscoupling)
    with refused("vocabulary has 50"):
        tracker.measure(model, torch.tensor([[1, 50]]))


def test_long_prompts_are_cut_with_one_warning():
    prompts = ["the cat " * 3, "the " * 7, "the " * 5, "the"]
    with pytest.warns(UserWarning) as caught:
        ds = tracker.measure(neox(), prompts, tokenizer=tokenizer(), max_tokens=np.int64(5), k=2)
    assert [str(one.message) for one in caught] == [
        "2 of 4 prompts have up to 7 tokens; each is cut to its first 5 (max_tokens)"
    ]
    assert ds.lss.notnull().sum("position").values.tolist() == [5, 5, 5, 1]
    assert bool(ds.miscoupling.notnull().all())


def test_models_without_one_list_of_blocks_are_refused():
    with refused(
        r"(?s)no residual blocks found in Sequential.*'attention'.*no list of such modules.*0 \(Linear\)"
    ):
        tracker.measure(
            nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 4, 3)
        )
    with refused(r"2 lists of blocks found \(left.encoder.layers, right.encoder.layers\)"):
        find_blocks(TwoEncoders())
    assert len(find_blocks(TwoEncoders(), "left.encoder.layers").names) == DEPTH
    assert "gpt_neox.layers.0" in str(find_blocks(neox()))


@pytest.mark.slow
def test_import_loads_no_heavy_module():
    heavy = (
        "{'torch', 'lightning', 'transformers', 'wandb', 'matplotlib', 'xarray'} & set(sys.modules)"
    )
    code = f"import sys, tracker; assert not {heavy}, {heavy}; tracker.measure; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
