"""Models whose state enters the blocks through norms alone are told apart, and said to read differently; those of
tests/zoo, too.
"""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tracker
from tests.support.home_made import WIDTH, Flat
from tests.support.plain import RootMeanSquare
from tracker.measures.post_norm import smallest_singular_share

TEXT = "the state enters the blocks of this model through norms alone .*untrained .*, not with the null level"


def post_norm(model, inputs, **options):
    """Return the attribute, and whether a warning says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = tracker.measure(model, inputs, k=2, measures="coupling", **options)
    said = any("through norms alone" in str(warning.message) for warning in caught)
    assert bool(ds.attrs["post_norm"]) == said
    return said


class Block(Flat):
    """x -> compute(block, x), where `Flat.forward` adds attention and an MLP to a state."""

    def __init__(self, compute):
        super().__init__(causal=False)
        self.compute, self.dropout = compute, nn.Dropout()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.root_mean_square = RootMeanSquare(WIDTH)

    def add(self, x):
        return super().forward(x)

    def normed(self, x):
        return F.layer_norm(x, (WIDTH,), self.gain)

    def forward(self, x):
        return self.compute(self, x)


def in_place(block, x):
    """Add the state to the normed output of a branch in place, so that the sum is where the norm's output was."""
    y = block.ln_1(block.add(x))
    y += x
    return y


def of_length_1(block, x):
    """As in nGPT."""
    y = block.add(x)
    return y / y.norm(dim=-1, keepdim=True)


OTHERS = {
    "a residual sum": lambda block, x: block.add(x),
    "of a pre-norm branch": lambda block, x: block.add(block.ln_1(x)) + x,
    "in place": in_place,
}
NORMED = {
    "a function": lambda block, x: block.normed(block.add(x)),
    "another function": lambda block, x: block.dropout(
        F.rms_norm(block.add(x), [WIDTH], weight=block.gain)
    ),
    "a module of another name": lambda block, x: block.root_mean_square(block.add(x)).clone(),
    "operations": of_length_1,
    "a residual from the normed state": lambda block, x: block.add(block.normed(x)),
    "inside": lambda block, x: block.add(block.normed(x + x.roll(1, -1).tanh())),
}
HOW = OTHERS | NORMED


def blocks(how):
    return nn.Sequential(*(Block(HOW[how]) for _ in range(3)))


@pytest.mark.parametrize("how", HOW)
def test_a_block_that_normalizes_its_state_is_post_norm_wherever_and_whatever_computes_it(how):
    """One that ends in its residual sum is not."""
    assert post_norm(blocks(how), torch.randn(2, 6, WIDTH)) == (how in NORMED)


@pytest.mark.parametrize("how", ["of a pre-norm branch", "a function", "operations", "inside"])
def test_singular_values_are_far_from_the_bound(how):
    """The numbers in docs/measurements.md: rounding of float32 where the state is normed."""
    ds = tracker.measure(blocks(how), torch.randn(2, 6, WIDTH), k=2, keep="jacobian")
    J = torch.from_numpy(ds.jacobian.values).flatten(0, 2)
    shares = smallest_singular_share(J)
    of_numpy = np.linalg.svd(np.eye(WIDTH) + J.double().numpy(), compute_uv=False)
    expected = of_numpy[:, -1] / np.exp(np.log(of_numpy).mean(1))
    if how in OTHERS:
        assert (shares > 0.01).all()
        np.testing.assert_allclose(shares, expected, rtol=0.1)
    else:
        assert (shares < 1e-6).all() and (expected < 1e-6).all()


def test_tokens_that_are_all_alike_do_not_look_normed():
    assert not post_norm(blocks("a residual sum"), torch.ones(2, 6, WIDTH))


@pytest.mark.parametrize("how", ["a function", "a residual sum"])
def test_spans_between_boundaries_are_told_apart_too(how):
    model = blocks(how)
    spans = [(f"input of {l}", f"output of {l}") for l in range(3)]
    assert post_norm(model, torch.randn(2, 6, WIDTH), blocks=spans) == (how in NORMED)


def test_a_random_bert_looks_coupled_and_has_two_common_directions():
    """The numbers in docs/limits.md: far below the null level untrained, two singular values of 1 in every block."""
    config = transformers.BertConfig(
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=1000,
    )
    ids = torch.randint(5, 1000, (4, 16))
    with pytest.warns(UserWarning, match=TEXT):
        ds = tracker.measure(transformers.BertModel(config).eval(), ids, k=10)
    off = ds.miscoupling.where(ds.layer != ds.layer_other)
    level = tracker.null_level(ds, "miscoupling").where(ds.layer != ds.layer_other)
    assert float(off.mean()) < 0.3 and float(level.mean()) == pytest.approx(0.985, abs=2e-3)
    assert (abs(ds.singular_value.sel(rank=[1, 2]) - 1) < 0.01).all() and (
        ds.singular_value.sel(rank=3) < 0.2
    ).all()


@pytest.mark.filterwarnings("ignore:the state enters the blocks")
def test_norms_set_the_length_of_states():
    """The numbers in docs/measurements.md: no growth at any depth, or only from the first state to the second."""
    sizes = dict(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
    )
    bert = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    of_bert = tracker.measure(bert, torch.randint(5, 50, (3, 9)), measures="trajectory")
    of_encoder = tracker.measure(encoder, torch.randn(3, 9, 32), measures="trajectory")
    assert of_bert.expodistance.isnull().all() and (abs(of_bert.alpha_mean) < 1e-6).all()
    np.testing.assert_allclose(of_encoder.expodistance, 3, atol=1e-2)
    assert (
        (abs(of_encoder.alpha_mean) < 0.1).all()
        and of_bert.lss.notnull().all()
        and of_encoder.lss.notnull().all()
    )
