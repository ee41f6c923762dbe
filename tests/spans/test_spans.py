"""Blocks that are no modules, measured between boundaries: against one graph, and against the same function in modules."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import tracker
from tests.support.brute_force import in_one_graph
from tests.support.loops import STARTS, WIDTH, L, Loop, found_by_spans, ids, states_in_one_graph
from tests.support.models import random, tokens
from tests.support.nanochat import CHAIN, DEPTH, GPT, NEXT, WTE, H
from tests.support.refused import refused
from tests.support.rounding import of_miscouplings
from tests.support.unchanged import assert_unchanged, snapshot
from tests.support.units import assert_same, assert_same_units
from tracker.blocks.find import find_blocks
from tracker.jacobians.slicing import Rows

pytestmark = pytest.mark.filterwarnings("ignore:block 1 .* measured over the full sequence")

OUTER = [f"input of norms.{i}.0" for i in range(L)] + ["input of norm"]
POST = ["output of embed"] + [f"output of norms.{i}.1" for i in range(L)]
# Each begins at another name of the tensor that the one before ends with.
PAIRS = [(POST[0], POST[1]), *((f"input of layers.{i}.0", POST[i + 1]) for i in range(1, L))]


def loop(way: str = "pre-norm") -> Loop:
    return Loop(way).double().eval()


def measured(model: nn.Module, blocks=STARTS, inputs: Tensor | None = None, **options):
    inputs = ids() if inputs is None else inputs
    return tracker.measure(
        model, inputs, **{"blocks": blocks, "k": 4, "dtype": "float64"} | options
    )


def vit(pool: str = "cls") -> nn.Module:
    from vit_pytorch import ViT

    torch.manual_seed(0)
    sizes = dict(
        image_size=16, patch_size=8, num_classes=5, dim=16, depth=L, heads=2, mlp_dim=32, dim_head=8
    )
    return ViT(**sizes, pool=pool).double().eval()


def x_transformer(**options) -> nn.Module:
    import x_transformers

    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=16, depth=L, heads=2, attn_dim_head=8, **options)
    return (
        x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
        .double()
        .eval()
    )


IMAGES = random(2, 3, 16, 16, seed=1)
OF_VIT = [f"input of transformer.layers.{i}.0" for i in range(L)] + ["input of transformer.norm"]
OF_X = [f"input of attn_layers.layers.{i}.0.0" for i in range(0, 2 * L, 2)] + [
    "input of attn_layers.final_norm"
]
POST_NORMED = ["output of emb_dropout"] + [
    f"output of attn_layers.layers.{i}.0.2" for i in range(1, 2 * L, 2)
]
HALVES = [f"input of layers.{i}.{part}" for i in range(L) for part in (0, 1)] + ["input of norm"]

# A model, its input, the boundaries, and what else describes its spans
CASES = {
    "vit-pytorch": (vit, IMAGES, OF_VIT, {}),
    "x-transformers": (lambda: x_transformer(rotary_pos_emb=True), ids(), OF_X, {}),
    "x-transformers, post-norm": (lambda: x_transformer(pre_norm=False), ids(), POST_NORMED, {}),
    "pre-norm": (loop, ids(), STARTS, {}),
    "attention and MLP apart": (loop, ids(), HALVES, {}),
    "pairs": (lambda: loop("post-norm"), ids(), POST, {"blocks": PAIRS}),
    "nanochat": (GPT, tokens(), CHAIN, {"fixed": WTE}),
    "nanochat, what is mixed in after a block": (GPT, tokens(), NEXT, {"fixed": WTE}),
    "nanochat, a value embedding held": (
        GPT,
        tokens(),
        CHAIN,
        {"fixed": [WTE, f"output of value_embeds.{DEPTH // 2}"]},
    ),
    "nanochat, by the ids": (GPT, tokens(), CHAIN, {"fixed": "input of transformer.wte"}),
    "nanochat, smear": (lambda: GPT(smear=True), tokens(), CHAIN, {"fixed": WTE}),
    "nanochat, backout": (
        lambda: GPT(backout=True),
        tokens(),
        CHAIN,
        {"fixed": [WTE, f"output of {H[DEPTH // 2]}"]},
    ),
    "nanochat, skip": (
        lambda: GPT(skip=True),
        tokens(),
        CHAIN,
        {"fixed": [WTE, f"output of {H[1]}"]},
    ),
    # A state that is fixed varies in the span that begins with it.
    "first state again": (
        lambda: loop("first state again"),
        ids(),
        STARTS,
        {"fixed": STARTS[0]},
    ),
    **{
        way: (lambda way=way: loop(way), ids(), STARTS, {})
        for way in (
            "checkpointed",
            "expanded",
            "returns a mask",
            "returns an early state",
            "returns the update",
            "returns what depends on an early state, too",
        )
    },
    "outer norm": (lambda: loop("outer norm"), ids(), OUTER, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_jacobians_are_those_between_two_tensors_of_one_graph(case):
    make, inputs, boundaries, described = CASES[case]
    model = make()
    before = snapshot(model)
    states = states_in_one_graph(model, inputs, boundaries)
    blocks = find_blocks(model, **{"blocks": boundaries} | described)
    at = torch.tensor([0, 1]), torch.tensor([4, 3])
    for rows in (Rows(*at), Rows(*at, torch.tensor([1, 2]))):
        found = found_by_spans(model, inputs, blocks, rows)
        assert len(found) == len(boundaries) - 1
        for J, (x, y) in zip(found, pairwise(states), strict=True):
            for r, (b, t2, t1) in enumerate(zip(rows.sample, rows.token, rows.live, strict=True)):
                expected = in_one_graph(x, y, int(b), int(t1), int(t2))
                assert (J[r] - expected).abs().max() < 1e-10 * expected.abs().max().clamp(min=1e-3)
    assert_unchanged(model, before)


@pytest.mark.parametrize("final_norm", ["include", "exclude"])
def test_everything_is_as_of_the_same_function_in_modules(final_norm):
    options = dict(
        k=(2, 4),
        measures="all,tokenwise",
        final_norm=final_norm,
        tokens=[1, -1],
        pair_tokens=3,
    )
    of_spans, of_modules = (
        measured(model, find_blocks(model, blocks, unembedding="head"), **options)
        for model, blocks in ((loop(), STARTS), (loop("in modules"), "layers"))
    )
    assert {"miscoupling_vju", "self_offdiag", "entropy", "pca", "noise_similarity"} < set(
        of_spans.data_vars
    )
    assert set(of_spans) == set(of_modules)
    values = [name for name in of_spans if not str(name).startswith("diagnostics_")]
    assert_same(of_spans, of_modules, values, 1e-8, 1e-8)
    assert of_spans.attrs["final_norm"] == of_modules.attrs["final_norm"] == final_norm
    assert of_spans.attrs["final_norm_module"] == of_modules.attrs["final_norm_module"] == "norm"
    assert not of_spans.diagnostics_sliced.any()
    assert "no module that would run on single rows" in of_spans.attrs["fallbacks"]
    first, second = STARTS[:2]
    assert of_spans.attrs["blocks"].startswith(f"{first} to {second}, {second} to ")


def test_other_layouts_and_work_in_place_change_no_number():
    expected = measured(loop(), final_norm="include")
    model = loop("sequence first")
    found = measured(model, find_blocks(model, STARTS, batch_first=False), final_norm="include")
    assert_same_units(found, expected, 1e-9)
    with refused(r"6 samples of 2 tokens, but 2 were given.*batch_first=False"):
        measured(model)
    assert_same_units(measured(loop("in place"), POST), measured(loop("post-norm"), POST), 1e-9)


@pytest.mark.parametrize("scale", [1, 1e-6])
def test_in_float32(scale):
    """Where Jacobians are small, they are found in float64."""
    model = loop()
    with torch.no_grad():
        for attention, mlp in model.layers:
            for last in (attention.out, mlp[-1]):
                last.weight.mul_(scale), last.bias.mul_(scale)
    # The norm's own Jacobian is not small
    expected = measured(model, final_norm="exclude")
    found = measured(model.float(), final_norm="exclude", dtype="float32")
    assert abs(found.miscoupling - expected.miscoupling).max() < of_miscouplings(found)
    assert expected.singular_value.max() < 100 * scale


# Boundaries at the wrong place

PRE = "name 'input of {}'"
AFTER_THE_LAST_MLP = [*STARTS[:-1], "output of layers.2.1"]
WRONG_END = r"end of the last span \(the output of layers.2.1\) is not the whole hidden state"
WRONG = {
    "after the norm, everywhere": (
        "outer norm",
        [f"input of layers.{i}.0" for i in range(L)] + ["input of norm"],
        r"start of span 1 \(the input of layers.0.0\) is not the whole hidden state.*the output of norms.0.0.*"
        + PRE.format("norms.0.0"),
    ),
    "after the norm, once": (
        "outer norm",
        [*OUTER[:2], "output of norms.2.0", OUTER[3]],
        r"start of span 3 .*" + PRE.format("norms.2.0"),
    ),
    "what the last MLP returns": ("pre-norm", AFTER_THE_LAST_MLP, WRONG_END + ".*the output of the model also depends"),
    # Outputs that can't show it
    "and a mask": ("returns a mask", AFTER_THE_LAST_MLP, WRONG_END),
    "and an early state": ("returns an early state", AFTER_THE_LAST_MLP, WRONG_END),
    "and the state": ("returns the update", AFTER_THE_LAST_MLP, WRONG_END),
    "no output": ("returns nothing", STARTS, "returns a NoneType without a floating tensor"),
    "an output of something else": (
        "returns the first state",
        STARTS,
        "nothing that the model returns depends on the end .*name boundaries that lead",
    ),
    "kept in another tensor": ("kept in another tensor", STARTS, "start of span 1 .* the tensor that residuals add to"),
    "a little around the state": ("a little around the state", STARTS, "start of span 1 .*is not the whole hidden state"),
    "the first state again": ("first state again", STARTS, "start of span 2"),
    "random": ("random", STARTS, "random, keeps state"),
    "keeps state": ("counts", STARTS, "random, keeps state"),
    "keeps what a replay would read": ("keeps its first keys", STARTS, "random, keeps state"),
    "not one after another": ("pre-norm", [(STARTS[0], STARTS[1]), (STARTS[2], STARTS[3])], "not the hidden state that"),
    "the other way": ("pre-norm", STARTS[::-1], "not in order of depth; .*in this order: input of layers.0.0, input"),
    "the same twice": ("pre-norm", [STARTS[0], STARTS[0]], "not in order of depth"),
    "called twice": ("called twice", [STARTS[0], *STARTS[2:]], "reaches the input of layers.0.0 twice"),
    "ids": ("pre-norm", ["input of embed", *STARTS[1:]], r"the input of embed is int64 \(2, 6\)"),
    "another width": ("pre-norm", [STARTS[0], "output of head"], r"maps \(2, 6, 8\) to \(2, 6, 20\)"),
    "never reached": ("pre-norm", ["input of norms.0.0", STARTS[3]], "never reached 1 of the boundaries: input of norms.0.0"),
    "no such module": ("pre-norm", ["input of layer.0", STARTS[3]], "no module named 'layer.0'"),
    "one boundary": ("pre-norm", STARTS[:1], "at least two"),
    "modules among boundaries": ("pre-norm", [*STARTS[:2], "norm"], "'norm' is no boundary; write 'input of NAME'"),
    "pairs among boundaries": ("pre-norm", [*STARTS[:2], tuple(STARTS[2:])], "give pairs of boundaries"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_boundaries_at_the_wrong_place_are_refused(case):
    """In float32, which hides more than float64."""
    way, blocks, message = WRONG[case]
    with refused(message):
        measured(Loop(way).eval(), blocks, dtype="float32")


def test_the_first_state_as_input_is_checked_too_and_not_written_to():
    x = random(2, 6, WIDTH)
    kept, version = x.clone(), x._version
    of_states = measured(loop(), inputs=x)
    assert torch.equal(x, kept) and x._version == version and of_states.sizes["layer"] == L
    with refused("start of span 1"):
        measured(loop("kept in another tensor"), inputs=x)


def test_weights_that_the_forward_writes_to_are_as_in_its_first_pass():
    model, halved = loop("halves a weight"), loop()
    with torch.no_grad():
        halved.layers[1][1][-1].weight.div_(2)
    before = snapshot(model)
    assert_same_units(measured(model), measured(halved), 1e-10)
    assert_unchanged(model, before)


def test_values_that_are_not_finite_are_said_at_their_boundary():
    model = loop()
    with torch.no_grad():
        model.layers[1][1][-1].bias[0] = torch.inf
    with pytest.raises(
        FloatingPointError, match="input of layers.2.0 gives values that are not finite"
    ):
        measured(model)


# Finding them


@pytest.mark.parametrize("case", ["vit-pytorch", "x-transformers", "pre-norm"])
def test_the_error_gives_the_line_that_measures(case):
    """Also where nothing is called attention, as in `Loop`."""
    make, inputs, boundaries, _ = CASES[case]
    model = make()
    with refused("It calls attention and MLP separately") as error:
        tracker.measure(model, inputs)
    (line,) = re.findall(r'blocks=(\[f".*?\] \+ \[.*?\])', str(error.value))
    blocks = eval(line)
    assert blocks == boundaries
    found = find_blocks(model, blocks)
    assert str(found).startswith(
        f"{L} blocks, {boundaries[0]} to {boundaries[-1]} (boundaries named by the caller)"
    )


def test_no_line_is_given_where_it_would_be_a_guess():
    # Post-norm: what the first module is given is no state of the model.
    model = x_transformer(pre_norm=False)
    with refused(r"the boundaries between them, blocks=\[\('input of A', 'output of B'\), ...\]"):
        find_blocks(model)
    without_norm = nn.Sequential(nn.Identity(), nn.ModuleDict({"layers": loop().layers}))
    with refused(r"\['output of 1'\]"):
        find_blocks(without_norm)


def test_the_class_token():
    found = find_blocks(vit(), OF_VIT)
    assert found.class_token == 0 and found.final_norms[0] == "transformer.norm"
    assert measured(vit(), OF_VIT, IMAGES).attrs["tokens"] == "cls"
    assert find_blocks(vit("mean"), OF_VIT).class_token is None
