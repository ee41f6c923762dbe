"""Models whose blocks end in a norm are told apart, and said to read differently."""

import warnings

import pytest
import torch
import transformers

import tracker
from tests.models import build

TEXT = "the blocks of this model end in a norm .post-norm, as in BERT.*untrained, not with the null level"
POST_NORM = ("bert", "roberta", "nn.TransformerEncoder, post-norm, bidirectional")
OTHERS = ("gpt2", "gemma2, soft cap", "olmo2, post-norm", "modernbert", "timm vit", "nn.TransformerEncoder, pre-norm")


@pytest.mark.parametrize("name", POST_NORM)
def test_post_norm_models_are_measured_with_a_warning_at_the_callers_line(name):
    model, inputs = build(name)
    with pytest.warns(UserWarning, match=TEXT) as caught:
        ds = tracker.measure(model, inputs, measures="trajectory")
    assert ds.attrs["post_norm"] == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("name", OTHERS)
def test_norms_elsewhere_give_no_warning(name):
    """Pre-norm, sandwich norm, and norms of a sublayer's output before the residual sum."""
    model, inputs = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds = tracker.measure(model, inputs, measures="trajectory")
    assert ds.attrs["post_norm"] == 0


def test_a_random_bert_looks_coupled_and_has_two_common_directions():
    """The numbers in docs/limits.md: far below the null level untrained, two singular values of 1 in every block."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    )
    ids = torch.randint(5, 1000, (4, 16))
    with pytest.warns(UserWarning, match=TEXT):
        ds = tracker.measure(transformers.BertModel(config).eval(), ids, k=10)
    off = ds.miscoupling.where(ds.layer != ds.layer_other)
    assert float(off.mean()) < 0.3 and float(ds.miscoupling_null.mean()) == pytest.approx(1.003, abs=2e-3)
    assert (abs(ds.singular_value.sel(rank=[1, 2]) - 1) < 0.01).all() and (ds.singular_value.sel(rank=3) < 0.2).all()
