"""Blocks that are no modules, measured between boundaries: against one graph, and against the same function in modules."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import tracker
from tests.support.brute_force import in_one_graph
from tests.support.dtypes import EACH_DTYPE
from tests.support.lightning_runs import Classifier, fit, trainer
from tests.support.loops import (
    STARTS,
    WIDTH,
    L,
    Loop,
    found_by_spans,
    ids,
    states_in_one_graph,
)
from tests.support.models import random
from tests.support.refused import refused
from tests.support.rounding import of_miscouplings
from tests.support.units import assert_same_units
from tests.support.watch import Watch
from tracker.blocks.find import find_blocks
from tracker.jacobians.slicing import Rows
from tracker.model.description import Blocks
from tracker.training.probe import find_target

pytestmark = pytest.mark.filterwarnings("ignore:block 1 .* measured over the full sequence")


class Block(nn.Module):
    """The same in one module."""

    def __init__(self, loop: Loop, i: int):
        super().__init__()
        (self.attention, self.mlp), (self.norm1, self.norm2) = loop.layers[i], loop.norms[i]
        self.way = loop.way

    def forward(self, x):
        if self.way == "outer norm":
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        if self.way == "in place":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(x)
        return x + self.mlp(x)


class InBlocks(nn.Module):
    """`Loop` with blocks that are modules, over the same weights."""

    def __init__(self, loop: Loop):
        super().__init__()
        self.loop = loop
        self.blocks = nn.ModuleList(Block(loop, i) for i in range(L))
        self.norm = loop.norm

    def forward(self, ids):
        x = (
            self.loop.latents.expand(*ids.shape, -1)
            if self.loop.way == "expanded"
            else self.loop.embed(ids)
        )
        for block in self.blocks:
            x = block(x)
        return self.loop.head(self.norm(x))


OUTER = [f"input of norms.{i}.0" for i in range(L)] + ["input of norm"]
POST = ["output of embed"] + [f"output of norms.{i}.1" for i in range(L)]
WAYS = {"pre-norm": STARTS, "expanded": STARTS, "outer norm": OUTER, "in place": POST}


def loop(way: str = "pre-norm", dtype: torch.dtype = torch.float64) -> Loop:
    return Loop(way).to(dtype).eval()


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


def x_transformer(cls: str, **options) -> nn.Module:
    import x_transformers

    torch.manual_seed(0)
    layers = getattr(x_transformers, cls)(dim=16, depth=L, heads=2, attn_dim_head=8, **options)
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
RETURNED = ["output of emb_dropout"] + [
    f"output of attn_layers.layers.{i}.2" for i in range(1, 2 * L, 2)
]
POST_NORMED = ["output of emb_dropout"] + [
    f"output of attn_layers.layers.{i}.0.2" for i in range(1, 2 * L, 2)
]

CASES = {
    "vit-pytorch": (vit, IMAGES, OF_VIT),
    "x-transformers, decoder": (lambda: x_transformer("Decoder", rotary_pos_emb=True), ids(), OF_X),
    "x-transformers, bias by position": (
        lambda: x_transformer("Decoder", rel_pos_bias=True),
        ids(),
        OF_X,
    ),
    "x-transformers, encoder": (lambda: x_transformer("Encoder"), ids(), OF_X),
    "x-transformers, what residuals return": (lambda: x_transformer("Encoder"), ids(), RETURNED),
    "x-transformers, post-norm": (
        lambda: x_transformer("Decoder", pre_norm=False),
        ids(),
        POST_NORMED,
    ),
    "pre-norm": (loop, ids(), STARTS),
    "checkpointed": (lambda: loop("checkpointed"), ids(), STARTS),
}


@pytest.mark.parametrize("case", CASES)
def test_jacobians_are_those_between_two_tensors_of_one_graph(case):
    make, inputs, boundaries = CASES[case]
    model = make()
    before = {
        name: (value.clone(), value._version)
        for name, value in model.state_dict(keep_vars=True).items()
    }
    states = states_in_one_graph(model, inputs, boundaries)
    sample = torch.tensor([0, 1, 1])
    token = torch.tensor([4, 0, 3])
    source = torch.tensor([1, 0, 2])
    for rows in (Rows(sample, token), Rows(sample[::2], token[::2], source[::2])):
        found = found_by_spans(model, inputs, boundaries, rows)
        assert len(found) == len(boundaries) - 1
        for J, (x, y) in zip(found, pairwise(states), strict=True):
            for r, (b, t2, t1) in enumerate(zip(rows.sample, rows.token, rows.live, strict=True)):
                expected = in_one_graph(x, y, int(b), int(t1), int(t2))
                assert (J[r] - expected).abs().max() < 1e-10 * expected.abs().max().clamp(min=1e-3)
    for name, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, before[name][0]) and value._version == before[name][1], name


@pytest.mark.parametrize(
    "way, final_norm", [*((way, "include") for way in WAYS), ("pre-norm", "exclude")]
)
def test_everything_is_as_of_the_same_function_in_modules(way, final_norm):
    model = loop(way)
    options = dict(
        k=(2, 4),
        dtype=torch.float64,
        measures="all,tokenwise",
        final_norm=final_norm,
        tokens=[1, -1],
        pair_tokens=3,
    )
    of_spans = tracker.measure(
        model, ids(), blocks=find_blocks(model, WAYS[way], unembedding="head"), **options
    )
    modules = InBlocks(model).eval()
    of_modules = tracker.measure(
        modules, ids(), blocks=find_blocks(modules, "blocks", unembedding="loop.head"), **options
    )
    assert {"miscoupling_vju", "self_offdiag", "entropy", "pca", "noise_similarity"} < set(
        of_spans.data_vars
    )
    unlike = ("diagnostics_sliced", "diagnostics_derivative_error")
    assert_same_units(of_spans.drop_vars(unlike), of_modules.drop_vars(unlike), 1e-8)
    assert of_spans.attrs["final_norm"] == of_modules.attrs["final_norm"] == final_norm
    assert of_spans.attrs["final_norm_module"] == of_modules.attrs["final_norm_module"]
    assert not of_spans.diagnostics_sliced.any()
    assert "no module that would run on single rows" in of_spans.attrs["fallbacks"]
    first, second = WAYS[way][:2]
    assert of_spans.attrs["blocks"].startswith(f"{first} to {second}, {second} to ")


def test_attention_and_mlp_of_a_module_apart():
    """I + J = (I + J_M) (I + J_A), where the MLP reads the state after the attention."""
    model = InBlocks(loop()).eval()
    inside = [f"input of blocks.{l}.{part}" for l in range(L) for part in ("attention", "mlp")]
    whole, apart = (
        torch.from_numpy(measured(model, blocks, keep=("jacobian",)).jacobian.values)
        for blocks in ("blocks", [*inside, f"output of blocks.{L - 1}"])
    )
    identity = torch.eye(WIDTH, dtype=torch.float64)
    attention, mlp = apart[:, :, ::2], apart[:, :, 1::2]
    torch.testing.assert_close((identity + mlp) @ (identity + attention), identity + whole)


@pytest.mark.slow
def test_pairs_of_boundaries_are_the_same_as_boundaries_in_order():
    model = x_transformer("Encoder")
    expected = measured(model, OF_X)
    mixed = [(OF_X[l], RETURNED[l + 1]) for l in range(L)]
    for blocks in (list(pairwise(OF_X)), mixed, RETURNED):
        assert_same_units(measured(model, blocks), expected, 1e-10)


def test_sequence_first():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.loop = loop()

        def forward(self, ids):
            x = self.loop.embed(ids).transpose(0, 1)
            for attention, mlp in self.loop.layers:
                x = attention[0](x).transpose(0, 1) + x
                x = mlp(x) + x
            return self.loop.head(self.loop.norm(x))

    class Across(nn.Sequential):  # attention over the first axis, turned about by whoever calls it
        def forward(self, x):
            return self[0](x.transpose(0, 1))

    model = Turned()
    for layer in model.loop.layers:
        layer[0] = nn.ModuleList([Across(layer[0])])
    blocks = [f"input of loop.layers.{i}.0.0" for i in range(L)] + ["input of loop.norm"]
    found = find_blocks(model, blocks, batch_first=False)
    expected = measured(loop(), final_norm="include")
    assert_same_units(measured(model, found, final_norm="include"), expected, 1e-9)
    with refused(r"6 samples of 2 tokens, but 2 were given.*batch_first=False"):
        measured(model, blocks)


@pytest.mark.slow
def test_in_float32_and_bf16():
    model = x_transformer("Encoder")
    expected = measured(model, OF_X)
    found = measured(model.float(), OF_X, dtype="float32")
    assert abs(found.miscoupling - expected.miscoupling).max() < of_miscouplings(found)
    rounded = model.bfloat16()
    found = measured(rounded, OF_X, dtype="float32")
    assert all(parameter.dtype == torch.bfloat16 for parameter in rounded.parameters())
    exact = measured(model.double(), OF_X)
    assert abs(found.miscoupling - exact.miscoupling).max() < of_miscouplings(found)


def test_small_jacobians_are_found_in_float64():
    model = loop()
    with torch.no_grad():
        for attention, mlp in model.layers:
            attention.out.weight.mul_(1e-6), attention.out.bias.mul_(1e-6)
            mlp[-1].weight.mul_(1e-6), mlp[-1].bias.mul_(1e-6)
    # The norm's own Jacobian is not small
    expected = measured(model, final_norm="exclude")
    found = measured(model.float(), final_norm="exclude", dtype="float32")
    assert abs(found.miscoupling - expected.miscoupling).max() < of_miscouplings(found)
    assert expected.singular_value.max() < 1e-4


# Boundaries at the wrong place

PRE = "name 'input of {}'"
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
    "what the last MLP returns": (
        "pre-norm",
        [*STARTS[:-1], "output of layers.2.1"],
        r"end of the last span \(the output of layers.2.1\) is not the whole hidden state.*the output of the model also depends",
    ),
    "kept in another tensor": ("kept in another tensor", STARTS, "start of span 1 .* the tensor that residuals add to"),
    "the first state again": ("first state again", STARTS, "start of span 2"),
    "random": ("random", STARTS, "random, keeps state"),
    "keeps state": ("counts", STARTS, "random, keeps state"),
    "keeps what a replay would read": ("keeps its first keys", STARTS, "random, keeps state"),
    "not one after another": ("pre-norm", [(STARTS[0], STARTS[1]), (STARTS[2], STARTS[3])], "not the hidden state that"),
    "the other way": ("pre-norm", STARTS[::-1], "not in order of depth; .*in this order: input of layers.0.0, input"),
    "the same twice": ("pre-norm", [STARTS[0], STARTS[0]], "not in order of depth"),
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
    way, blocks, message = WRONG[case]
    model = loop(way)
    with refused(message):
        measured(model, blocks)


class Beside(Loop):
    """Returns something beside the logits."""

    beside: str

    def forward(self, ids):
        first = x = self.embed(ids)
        for attention, mlp in self.layers:
            x = attention(x) + x
            last = mlp(x)
            x = last + x
        others = {"a mask": torch.ones_like(ids).to(x), "an early state": first, "the state": last}
        return self.head(self.norm(x)), others[self.beside]


@pytest.mark.parametrize("beside", ["a mask", "an early state", "the state"])
def test_outputs_that_can_not_show_a_wrong_end_do_not_hide_it(beside):
    model = Beside().double().eval()
    model.beside = beside
    with refused(r"end of the last span .* is not the whole hidden state"):
        measured(model, [*STARTS[:-1], "output of layers.2.1"])
    found = measured(model)
    expected = measured(loop())
    assert found.miscoupling.equals(expected.miscoupling)


def test_boundaries_that_do_not_lead_to_the_output_are_refused():
    class Early(Loop):
        def forward(self, ids):
            super().forward(ids)
            return self.embed(ids)

    with refused(r"nothing that the model returns depends on the end .*name boundaries that lead"):
        measured(Early().double().eval())


@EACH_DTYPE
def test_a_weak_way_around_the_state_is_found(dtype):
    class Around(Loop):
        def forward(self, ids):
            x = self.embed(ids)
            again = 1e-2 * self.norms[0][0](x)
            for i, (attention, mlp) in enumerate(self.layers):
                x = attention(x) + x
                x = mlp(x) + x + (again if i == 0 else 0)
            return self.head(self.norm(x))

    model = Around().to(dtype).eval()
    with refused("start of span 1 .*is not the whole hidden state"):
        measured(model, dtype=dtype)


def test_the_first_state_as_input_is_checked_too_and_not_written_to():
    class OnStates(Loop):
        def forward(self, x):
            beside = x.clone() if self.way == "beside" else x
            for attention, mlp in self.layers:
                x = attention(x) + beside
                x = beside = mlp(x) + x
            return self.norm(x)

    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    kept, version = x.clone(), x._version
    of_states = measured(OnStates().double().eval(), inputs=x)
    assert torch.equal(x, kept) and x._version == version and of_states.sizes["layer"] == L
    with refused("start of span 1"):
        measured(OnStates("beside").double().eval(), inputs=x)


def test_weights_that_the_forward_writes_to_are_as_in_its_first_pass():
    class Halves(Loop):
        def forward(self, ids):
            with torch.no_grad():
                self.layers[1][1][-1].weight.div_(2)
            return super().forward(ids)

    model, halved = Halves().double().eval(), loop()
    with torch.no_grad():
        halved.layers[1][1][-1].weight.div_(2)
    weight = model.layers[1][1][-1].weight
    kept, version = weight.clone(), weight._version
    assert_same_units(measured(model), measured(halved), 1e-10)
    assert torch.equal(weight, kept) and weight._version == version


def test_lists_that_are_never_called_lead_to_boundaries():
    model = loop()
    model.layers = nn.ModuleList(nn.Sequential(*layer) for layer in model.layers)
    with refused("never reached 3 of the blocks.* name the boundaries between blocks"):
        measured(model, None)
    assert measured(model).sizes["layer"] == L


def test_a_module_called_twice_is_no_boundary():
    model = loop()
    model.layers[1] = model.layers[0]
    with refused("reaches the input of layers.0.0 twice"):
        measured(model, [STARTS[0], *STARTS[2:]])


def test_what_returns_no_tensor_can_not_be_checked():
    class Silent(Loop):
        def forward(self, ids):
            super().forward(ids)

    with refused("returns a NoneType without a floating tensor"):
        measured(Silent().eval())


def test_values_that_are_not_finite_are_said_at_their_boundary():
    model = loop()
    with torch.no_grad():
        model.layers[1][1][-1].bias[0] = torch.inf
    with pytest.raises(
        FloatingPointError, match="input of layers.2.0 gives values that are not finite"
    ):
        measured(model)


# Finding them


@pytest.mark.parametrize("case", ["vit-pytorch", "x-transformers, decoder", "pre-norm"])
def test_the_error_gives_the_line_that_measures(case):
    make, inputs, boundaries = CASES[case]
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
    model = x_transformer("Decoder", pre_norm=False)
    with refused(r"the boundaries between them, blocks=\[\('input of A', 'output of B'\), ...\]"):
        find_blocks(model)
    without_norm = nn.Sequential(nn.Identity(), nn.ModuleDict({"layers": loop().layers}))
    with refused(r"\['output of 1'\]"):
        find_blocks(without_norm)


def test_the_class_token():
    found = find_blocks(vit(), OF_VIT)
    assert found.class_token == 0 and found.final_norms[0] == "transformer.norm"
    ds = measured(vit(), OF_VIT, IMAGES)
    assert ds.attrs["tokens"] == "cls" and ds.sizes["position"] == 5
    pooled = vit("mean")
    assert find_blocks(pooled, OF_VIT).class_token is None
    assert measured(pooled, OF_VIT, IMAGES).attrs["tokens"] == "last"


# In training


class Vision(Classifier):
    """vit-pytorch's transformer in somebody's training."""

    def __init__(self):
        from vit_pytorch.vit import Transformer

        super().__init__()
        self.stages = nn.ModuleList([Transformer(16, L, 2, 8, 32)])


@pytest.mark.slow
def test_the_callback_measures_spans():
    blocks = [f"input of stages.0.layers.{i}.0" for i in range(L)] + ["input of stages.0.norm"]
    watch = Watch(4, blocks=blocks)
    module = fit(trainer([watch], max_steps=4), Vision)
    assert list(watch.units) == [0, 4]
    expected = tracker.measure(module, watch.probe, blocks=blocks, k=2).assign_coords(step=4)
    assert_same_units(watch.units[4], expected)


def test_boundaries_are_named_as_they_are_in_the_training_module():
    holder = nn.ModuleDict({"net": loop()})  # which has no forward
    named = [boundary.replace(" of ", " of net.") for boundary in STARTS]
    subject = find_target(holder, named, None)
    assert subject.part == "net" and isinstance(subject.blocks, Blocks)
    assert [str(boundary) for boundary in subject.blocks.spans[0]] == STARTS[:2]
    subject = find_target(holder, named, lambda module, batch: module["net"](batch))
    assert str(subject.blocks.spans[0][0]) == "input of module.net.layers.0.0"
    with refused("outside 'net'"):
        holder.other = nn.Linear(2, 2)
        find_target(holder, [*named[:-1], "input of other"], None)
