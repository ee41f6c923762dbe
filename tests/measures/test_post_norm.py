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
from tests.support.draws import seeded
from tests.support.home_made import WIDTH, Flat
from tests.support.plain import RootMeanSquare
from tracker.measures.post_norm import smallest_singular_share

TEXT = "the state enters the blocks of this model through norms alone .*untrained, not with the null level"


def post_norm(model, inputs, **options):
    """Return the attribute, and whether a warning says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = tracker.measure(model, inputs, k=2, measures="coupling", **options)
    said = any("through norms alone" in str(warning.message) for warning in caught)
    assert bool(ds.attrs["post_norm"]) == said
    return said


class PreNormResidual(nn.Module):
    """A pre-norm branch and its residual sum, as in lucidrains' models."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH), branch

    def forward(self, x):
        return self.branch(self.norm(x)) + x


class AddsInPlace(Flat):
    """The state is added to the normed output of a branch in place, so that the sum is where the norm's output was."""

    def forward(self, x):
        y = self.ln_1(super().forward(x))
        y += x
        return y


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.add = PreNormResidual(Flat(causal=False))

    def forward(self, x):
        return self.add(x)


class Normed(Flat):
    """x -> N(x + g(x)), where N is given by each subclass."""

    def __init__(self):
        super().__init__(causal=False)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.root_mean_square = RootMeanSquare(WIDTH)
        self.last = nn.Dropout()

    def forward(self, x):
        return self.norm(super().forward(x))


class ByFunction(Normed):
    def norm(self, x):
        return F.layer_norm(x, (WIDTH,), self.gain)


class ByRmsFunction(Normed):
    def norm(self, x):
        return self.last(F.rms_norm(x, [WIDTH], weight=self.gain))


class ByModuleOfAnotherName(Normed):
    def norm(self, x):
        return self.root_mean_square(x).clone()


class ByOperations(Normed):
    """As in nGPT: states of length 1."""

    def norm(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class FromNorm(Normed):
    """A residual that starts from the normed state."""

    def forward(self, x):
        return Flat.forward(self, F.layer_norm(x, (WIDTH,), self.gain))


class NormedInside(Normed):
    """Attention is added to the state, and what follows to the norm of that."""

    def forward(self, x):
        x = F.layer_norm(x + x.roll(1, -1).tanh(), (WIDTH,), self.gain)
        return Flat.forward(self, x)


def blocks(make):
    return nn.Sequential(*(make() for _ in range(3)))


NORMED = [ByFunction, ByRmsFunction, ByModuleOfAnotherName, ByOperations, FromNorm, NormedInside]


@pytest.mark.parametrize("make", [Plain, AddsInPlace, *NORMED])
def test_a_block_that_normalizes_its_state_is_post_norm_wherever_and_whatever_computes_it(make):
    """One that ends in its residual sum is not."""
    assert post_norm(blocks(make), torch.randn(2, 6, WIDTH)) == (make in NORMED)


@pytest.mark.parametrize("make", [Plain, ByFunction, ByOperations, FromNorm, NormedInside])
def test_singular_values_are_far_from_the_bound(make):
    """The numbers in docs/measurements.md: rounding of float32 where the state is normed."""
    ds = tracker.measure(blocks(make), torch.randn(2, 6, WIDTH), k=2, keep="jacobian")
    J = torch.from_numpy(ds.jacobian.values).flatten(0, 2)
    shares = smallest_singular_share(J)
    of_numpy = np.linalg.svd(np.eye(WIDTH) + J.double().numpy(), compute_uv=False)
    expected = of_numpy[:, -1] / np.exp(np.log(of_numpy).mean(1))
    if make is Plain:
        assert (shares > 0.01).all()
        np.testing.assert_allclose(shares, expected, rtol=0.1)
    else:
        assert (shares < 1e-6).all() and (expected < 1e-6).all()


def test_tokens_that_are_all_alike_do_not_look_normed():
    assert not post_norm(blocks(lambda: Flat(causal=False)), torch.ones(2, 6, WIDTH))


@pytest.mark.parametrize("make", [ByFunction, Plain])
def test_spans_between_boundaries_are_told_apart_too(make):
    model = blocks(make)
    spans = [(f"input of {l}", f"output of {l}") for l in range(3)]
    assert post_norm(model, torch.randn(2, 6, WIDTH), blocks=spans) == (make is ByFunction)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the state enters the blocks")
def test_training_moves_a_post_norm_model_away_from_its_untrained_value_not_from_the_null_level():
    """The numbers in docs/measurements.md: which of eight symbols occurs most often? Tokens differ once the model is trained."""
    sizes = dict(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=16,
    )
    without_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_labels=8, eos_token_id=9, **sizes, **without_dropout)
    )
    generator = seeded(0)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(8, (size, 16), generator=generator)
        answer = F.one_hot(words, 8).sum(1).argmax(-1)
        return F.pad(F.pad(words, (1, 0), value=8), (0, 1), value=9), answer

    probe, _ = batch(16)

    def miscoupling(tokens: str | list[int]) -> tuple[float, float]:
        ds = tracker.measure(model.eval(), probe, tokens=tokens, k=10, measures="coupling")
        return float(ds.miscoupling.where(ds.layer != ds.layer_other).mean()), float(
            tracker.null_level(ds, "miscoupling").where(ds.layer != ds.layer_other).mean()
        )

    measured = {"[CLS]": [0], "last word": "last", "[SEP]": [-1]}
    untrained = {name: miscoupling(tokens) for name, tokens in measured.items()}
    optimizer = torch.optim.AdamW(model.train().parameters(), 5e-4)
    for _ in range(100):
        ids, answer = batch(64)
        optimizer.zero_grad()
        F.cross_entropy(model(ids).logits, answer).backward()
        optimizer.step()
    trained = {name: miscoupling(tokens) for name, tokens in measured.items()}
    spreads = [
        max(value for value, _ in of.values()) - min(value for value, _ in of.values())
        for of in (untrained, trained)
    ]
    assert spreads[0] < 0.01 < 0.05 < spreads[1]
    expected = {"[CLS]": (0.377, 0.903), "last word": (0.236, 0.844), "[SEP]": (0.323, 0.909)}
    for name, (value, null) in trained.items():
        assert untrained[name] == pytest.approx((0.100, 0.982), abs=0.01)
        assert (value, null) == pytest.approx(expected[name], abs=0.05) and value > 2 * untrained[
            name
        ][0]
