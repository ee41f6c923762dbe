"""Padding under other names than `attention_mask`: each sample is measured as if alone, and nothing else is taken for padding."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracker
from tests.support.home_made import HEADS, MLP, WIDTH
from tests.support.models import build, random

DEPTH, LENGTHS, N = 3, [4, 7, 6], 7
SAMPLES = random(3, N, WIDTH, seed=1)
PADDED = torch.arange(N) >= torch.tensor(LENGTHS)[:, None]  # on the right
X = SAMPLES.masked_fill(PADDED[..., None], 0.5)
ORDER = torch.ones(N, N, dtype=torch.bool).tril()

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:the state enters the blocks",
    "ignore:block 1 .* measured over the full sequence",
    "ignore:Support for mismatched key_padding_mask",
)


def measured(model, inputs, **options):
    return tracker.measure(
        model,
        inputs,
        **{"k": 4, "dtype": torch.float64, "tokens": "last", "measures": "trajectory"} | options,
    )


def assert_measured_as_if_alone(model, inputs, alone="x", left=False, **options):
    """Compare every variable over tokens with those of each sample without padding."""
    ds = measured(model, inputs, measures="all", **options)
    for b, length in enumerate(LENGTHS):
        part = slice(N - length, N) if left else slice(length)
        expected = measured(model, {alone: SAMPLES[b : b + 1, part]}, measures="all", **options)
        assert ds.token_position[b].item() == (N - 1 if left else length - 1)
        assert ds.lss[b].notnull().sum() == length
        for (
            name
        ) in "miscoupling lss norm singular_value alignment update_cosine noise_similarity".split():
            found, truth = ds[name][b], expected[name][0]
            found = found.isel(position=part) if "position" in found.dims else found
            np.testing.assert_allclose(found, truth.values, rtol=0, atol=1e-9, err_msg=name)
    return ds


@pytest.mark.parametrize("infinite", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_encoder_with_src_key_padding_mask(norm_first, infinite):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=norm_first
    )
    mask = torch.zeros(PADDED.shape).double().masked_fill(PADDED, -math.inf) if infinite else PADDED
    model = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=not norm_first).double().eval()
    ds = assert_measured_as_if_alone(model, {"src": X, "src_key_padding_mask": mask}, alone="src")
    assert ds.attrs["padding"] == "the mask of the attention in layers.0"


class Attention(nn.Module):
    """Self-attention by `scaled_dot_product_attention`, or written out, which is not intercepted."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.qkv, self.out, self.by_hand = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            by_hand,
        )

    def forward(self, x, visible=None, memory=None):
        q, *kv = self.qkv(x).chunk(3, -1)
        if memory is not None:
            _, *kv = self.qkv(memory).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, *kv))
        if self.by_hand:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, visible)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, by_hand=False):
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(by_hand), MLP(), nn.LayerNorm(WIDTH)
        self.hidden = None  # a mask that is no argument

    def forward(self, x, visible=None, memory=None, memory_visible=None):
        if memory is not None:
            x = x + self.attention(self.norm(x), memory_visible, memory)
        x = x + self.attention(self.norm(x), self.hidden if visible is None else visible)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Blocks that are given a mask (B, 1, 1 or n, n), made of one of the arguments.

    Args:
        causal: padding is on the left; a row that would see nothing may see itself.
        hides: the mask reaches the blocks as an attribute.
        block: their class, which takes the other options.
    """

    def __init__(self, causal=False, hides=False, block=Layer, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(**options) for _ in range(DEPTH))
        self.causal, self.hides = causal, hides
        self.double().eval()

    def forward(self, x, lengths=None, keep=None, ignore=None, padding_mask=None, visible=None):
        """`keep` is True at tokens, `ignore` at padding, `padding_mask` too, of twice as many positions as the blocks take."""
        if padding_mask is not None:
            x, ignore = x[:, ::2], padding_mask[:, ::2]
        n = x.shape[1]
        keep = keep if lengths is None else torch.arange(n) < lengths[:, None]
        keep = keep if ignore is None else ~ignore
        visible = visible if keep is None else keep[:, None, None].bool()
        if self.causal:
            order = torch.ones(n, n).tril().bool()
            visible = order if visible is None else visible & order | torch.eye(n).bool()
        for block in self.blocks:
            block.hidden = visible if self.hides else None
            x = block(x) if self.hides else block(x, visible)
        return x


SPANS = [(f"input of blocks.{l}", f"output of blocks.{l}") for l in range(DEPTH)]
LEFT = PADDED.flip(1)
# A model, what it is given beside or in place of X, and where padding is read
GIVEN = {
    "lengths": (
        Model(),
        {"lengths": torch.tensor(LENGTHS)},
        "the mask of the attention in blocks.0",
    ),
    "tokens, written out": (Model(by_hand=True), {"keep": ~PADDED}, "the argument visible"),
    "numbers": (Model(by_hand=True), {"keep": (~PADDED).long()}, "the argument visible"),
    "spans": (Model(), {"keep": ~PADDED}, "the argument keep"),
    "an attribute": (Model(hides=True, by_hand=True), {"ignore": PADDED}, "the argument ignore"),
    "left": (Model(causal=True), {"ignore": LEFT}, ""),
    "left, written out": (Model(causal=True, by_hand=True), {"ignore": LEFT}, ""),
}


@pytest.mark.parametrize("name", GIVEN)
def test_padding_is_read_where_it_is(name):
    model, given, where = GIVEN[name]
    left = "left" in name
    x = SAMPLES.masked_fill(LEFT[..., None], 0.5) if left else X
    blocks = {"blocks": SPANS} if name == "spans" else {}
    ds = assert_measured_as_if_alone(model, {"x": x, **given}, left=left, **blocks)
    assert where in ds.attrs["padding"]


class WithMemory(Model):
    def forward(self, x, memory, pad=None, memory_pad=None, visible=None):
        hidden = memory_pad if pad is None else pad
        for block in self.blocks:
            x = block(x, visible, memory, ~hidden[:, None, None])
        return x


@pytest.mark.parametrize("by_hand, causal", [(False, False), (False, True), (True, True)])
def test_the_mask_of_a_memory_is_not_read(by_hand, causal):
    """In a causal model no token depends on the last position, whatever the mask is of."""
    given = {"x": SAMPLES, "memory": SAMPLES.flip(0), "pad": torch.arange(N).expand(3, N) == N - 1}
    given |= {"visible": ORDER} if causal else {}
    unread = pytest.warns(UserWarning, match=r"pad \(3, 7\) marks positions")
    with unread if by_hand else nullcontext():
        ds = measured(WithMemory(by_hand=by_hand), given)
    assert ds.attrs["padding"] == "none" and (ds.token_position == N - 1).all()
    # Its name says what it is of, and nothing is to be warned of.
    given["memory_pad"] = given.pop("pad")
    assert measured(WithMemory(by_hand=by_hand), given).attrs["padding"] == "none"


def test_a_mask_beside_that_of_a_memory_is_read():
    given = {"x": X, "memory": SAMPLES.flip(0), "pad": torch.arange(N).expand(3, N) == N - 1}
    own = measured(WithMemory(), given | {"visible": ~PADDED[:, None, None]})
    assert own.token_position.values.ravel().tolist() == [length - 1 for length in LENGTHS]


def test_a_mask_of_more_positions_than_the_blocks_take():
    """Attention shows which of the blocks' tokens are hidden; where it is not intercepted, a warning says that nothing does."""
    x, mask = X.repeat_interleave(2, 1), PADDED.repeat_interleave(2, 1)
    assert_measured_as_if_alone(Model(), {"x": x, "padding_mask": mask})
    with pytest.warns(
        UserWarning,
        match=r"padding_mask \(3, 14\) marks positions, but which of the blocks' 7 tokens",
    ) as w:
        ds = measured(Model(hides=True, by_hand=True), {"x": x, "padding_mask": mask})
    assert (
        ds.attrs["padding"] == "none"
        and w[0].filename == __file__
        and (ds.token_position == N - 1).all()
    )


class Convolving(Layer):
    """Attention that hides padding, and a convolution that does not."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, visible=None):
        x = super().forward(x, visible)
        return x + self.convolution(x.mT).mT


def test_hidden_positions_that_other_tokens_depend_on_are_not_padding():
    with pytest.warns(
        UserWarning, match="the attention in blocks.0 hides positions from all others"
    ):
        ds = measured(Model(block=Convolving), {"x": X, "keep": ~PADDED})
    assert ds.attrs["padding"] == "none"


DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 2, 2])
SAME = DOCUMENT[:, None] == DOCUMENT
MASKS = {
    "causal": ORDER,
    "a window": ORDER & ORDER.triu(-2).bool(),
    "documents": SAME,
    "documents, causal": SAME & ORDER,
    "chunks, causal, one token in the last": (torch.arange(N)[:, None] // 3 == torch.arange(N) // 3)
    & ORDER,
    "causal, a last document of one token": (
        (torch.arange(N) < N - 1)[:, None] == (torch.arange(N) < N - 1)
    )
    & ORDER,
    "a prefix": ORDER | (torch.arange(N) < 3),
    "a prefix of all but one": ORDER | (torch.arange(N) < N - 1),
    "one sample's own": torch.stack([ORDER, SAME, ORDER.T])[:, None],
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_without_padding(name, by_hand):
    ds = measured(Model(by_hand=by_hand), {"x": SAMPLES, "visible": MASKS[name]})
    assert ds.attrs["padding"] == "none"


class Sparse(Layer):
    """Each token attends to the two whose keys suit its query best, as an indexer chooses them."""

    def forward(self, x, visible=None):
        q, k, _ = self.attention.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~visible, -math.inf)
        chosen = scores >= scores.topk(2).values[..., 1:]
        return super().forward(x, (chosen & visible)[:, None])


@pytest.mark.parametrize(
    "visible", [ORDER, torch.ones_like(ORDER)], ids=["causal", "bidirectional"]
)
def test_positions_that_sparse_attention_chooses_for_no_token(visible):
    model, chosen = Model(block=Sparse), []
    with (
        torch.no_grad(),
        model.blocks[0].attention.register_forward_pre_hook(
            lambda _, given: chosen.append(given[1])
        ),
    ):
        model(SAMPLES, visible=visible)
    ds = measured(model, {"x": SAMPLES, "visible": visible})
    others = chosen[0][:, 0] & ~torch.eye(N, dtype=torch.bool)
    assert (~others.any(1) & ~chosen[0][:, 0].diagonal(dim1=1, dim2=2)).any(), (
        "the case does not occur"
    )
    assert ds.attrs["padding"] == "none" and ds.lss.notnull().all()


class Imputing(Model):
    """A masked autoencoder that is told which positions to replace."""

    def forward(self, x, bool_masked_pos, token_type):
        x = torch.where(bool_masked_pos[..., None], 1.0, x)
        return super().forward(x + token_type[..., None])


@pytest.mark.parametrize("by_hand", [False, True])
def test_other_arguments_of_a_number_for_each_token(by_hand):
    given = {"x": SAMPLES, "bool_masked_pos": PADDED, "token_type": PADDED.long()}
    assert measured(Imputing(by_hand=by_hand), given).attrs["padding"] == "none"


def test_what_the_caller_states_is_used():
    model, ids = build("bert", samples=3)
    ds = measured(model, {"input_ids": ids, "attention_mask": ~PADDED})
    assert ds.attrs["padding"] == "attention_mask" and ds.lss[0].notnull().sum() == LENGTHS[0]
    ones = torch.ones_like(ids)
    assert measured(model, {"input_ids": ids, "attention_mask": ones}).attrs["padding"] == "none"
