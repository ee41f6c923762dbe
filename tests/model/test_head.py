"""The final norm and the logits of language models that are not Hugging Face's, found by what they do."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracker
from tests.models import Encoder, images, timm_vit, tokens, torchvision_vit
from tests.plain import PlainGPT2, RootMeanSquare, Standardize, gpt2
from tests.rounding import rounding
from tracker.blocks.find import find_blocks
from tracker.common.errors import UsageError
from tracker.model.recorder import record
from tracker.model.replica import Replica

OPTIONS = {"k": 4, "dtype": torch.float64}
MEASURES = (
    "expodistance",
    "expodistance_normed",
    "alpha_mean_normed",
    "lss",
    "equidistance",
    "miscoupling",
    "offdiag_normalized",
    "singular_value",
)


def assert_equal_measures(a, b):
    assert a.attrs["final_norm"] == b.attrs["final_norm"]
    for name in MEASURES:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-7, atol=1e-9, err_msg=name)


def test_a_plain_copy_of_gpt2_is_measured_as_hugging_faces():
    source, inputs = gpt2().double().eval(), tokens(3, 9)
    copy = PlainGPT2(source).double().eval()
    with torch.no_grad():
        torch.testing.assert_close(copy(inputs), source(inputs).logits)
    expected, seen = (tracker.measure(model, inputs, **OPTIONS) for model in (source, copy))
    assert (
        expected.attrs["final_norm_module"] == "transformer.ln_f"
        and seen.attrs["final_norm_module"] == "last"
    )
    assert expected.attrs["final_norm"] == "include"
    assert_equal_measures(seen, expected)
    # The convention matters for this model
    assert abs(float(seen.lss_normed.median() / seen.lss.median()) - 1) > 0.1


HEADS = {
    "linear, tied": None,
    "linear, untied": lambda model, x: F.linear(x, model.tokens.weight.detach().flip(0).clone()),
    "function of the embedding": lambda model, x: F.linear(x, model.tokens.weight),
    "matrix product": lambda model, x: x @ model.tokens.weight.T,
    "einsum": lambda model, x: torch.einsum("btd,vd->btv", x, model.tokens.weight),
    "last token": lambda model, x: model.logits(x[:, [-1]]),
    "last token, no axis": lambda model, x: model.logits(x[:, -1]),
    "all tokens with a next one": lambda model, x: model.logits(x[:, :-1]),
    "scaled states": lambda model, x: model.logits(0.1 * x),
    "padded": lambda model, x: F.linear(x, F.pad(model.tokens.weight, (0, 0, 0, 3))),
    "loss alone": lambda model, x: model.logits(x).logsumexp(-1).mean(),
}


def test_the_entropy_of_a_plain_copy_is_hugging_faces():
    """The module that gives the logits is found by what it takes and returns."""
    source, inputs = gpt2(depth=2).double().eval(), tokens(2, 7)
    options = {"measures": ["entropy"], "dtype": torch.float64}
    expected = tracker.measure(source, inputs, **options)
    copy = PlainGPT2(source).double().eval()
    np.testing.assert_allclose(
        tracker.measure(copy, inputs, **options).entropy, expected.entropy, rtol=1e-9
    )
    with torch.no_grad():
        p = copy(inputs).softmax(-1)
    np.testing.assert_allclose(
        expected.entropy[:, -1], -(p * p.log()).sum(-1), rtol=rounding(torch.float64)
    )
    by_boundaries = tracker.measure(
        copy, inputs, blocks=["input of layers.0", "input of layers.1", "input of last"], **options
    )
    np.testing.assert_allclose(by_boundaries.entropy, expected.entropy, rtol=1e-9)


class Capped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(x) / 2)


def with_module(module: nn.Module) -> PlainGPT2:
    """Return a model whose head is this module."""
    model = PlainGPT2(gpt2(depth=2), head=lambda model, x: model.own(x))
    model.own = module
    return model


FOUND = {
    "linear, tied": PlainGPT2(gpt2(depth=2)),
    "last token": PlainGPT2(gpt2(depth=2), head=HEADS["last token"]),
    "last token, no axis": PlainGPT2(gpt2(depth=2), head=HEADS["last token, no axis"]),
    "all tokens with a next one": PlainGPT2(
        gpt2(depth=2), head=HEADS["all tokens with a next one"]
    ),
    "loss alone": PlainGPT2(gpt2(depth=2), head=HEADS["loss alone"]),
    "outermost module": with_module(nn.Sequential(Capped(48, 60))),
    "no norm": PlainGPT2(gpt2(depth=2), norm=None, head=lambda model, x: model.logits(x)),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_module_that_gives_the_logits_is_found(name):
    model, inputs = FOUND[name].eval(), tokens(2, 7)
    replica = Replica(model, find_blocks(model), torch.float64, torch.device("cpu"))
    expected = {"outermost module": "own", "no norm": None}.get(name, "logits")
    assert (
        record(replica, (inputs,), {}).unembedding == expected
    )  # without a norm module, its input is not the last state


@pytest.mark.parametrize("head", ["function of the embedding", "matrix product", "scaled states"])
def test_all_without_a_head_that_is_a_module_leaves_out_entropy_with_a_warning(head):
    model, inputs = PlainGPT2(gpt2(depth=2), head=HEADS[head]), tokens(2, 7)
    with pytest.warns(
        UserWarning, match="'all' leaves out the entropy .* 60 logits .*unembedding='NAME'"
    ) as caught:
        ds = tracker.measure(model, inputs, measures="all", k=2)
    assert "entropy" not in ds and caught[0].filename == __file__
    assert not tracker.measure(model, inputs, measures="all", k=2, dry_run=True).refused
    with pytest.raises(UsageError, match="no unembedding was found"):
        tracker.measure(model, inputs, measures="entropy")
    named = tracker.measure(
        model, inputs, measures="all", k=2, blocks=find_blocks(model, unembedding="logits")
    )
    assert "entropy" in named


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_heads_of_many_forms_are_recognised(head, dtype):
    model = PlainGPT2(gpt2(depth=2), head=HEADS[head])
    ds = tracker.measure(model, tokens(2, 7), measures="trajectory", dtype=dtype)
    assert (ds.attrs["final_norm"], ds.attrs["final_norm_module"]) == ("include", "last")
    assert ds.attrs["final_norm_reason"].startswith(
        "a language model: last takes the last block's output, 6"
    )


class Wrapped(nn.Sequential):
    """A norm and a head in one module, and dropout before them."""

    def __init__(self, width: int):
        super().__init__(nn.Dropout(0.5), nn.LayerNorm(width))


NORMS = {
    "nn.LayerNorm": (nn.LayerNorm, "last"),
    "a subclass called otherwise": (Standardize, "last"),
    "nn.RMSNorm": (nn.RMSNorm, "last"),
    "an RMSNorm by hand, called otherwise": (RootMeanSquare, "last"),
    "in a list with dropout": (Wrapped, "last.1"),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_many_names_are_found(norm):
    """The norm found is the one that the caller would name."""
    make, name = NORMS[norm]
    model = PlainGPT2(gpt2(depth=2), norm=make)
    with torch.no_grad():
        for parameter in model.last.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = tracker.measure(model, tokens(), **OPTIONS)
    assert (seen.attrs["final_norm"], seen.attrs["final_norm_module"]) == ("include", name)
    named = tracker.measure(
        model, tokens(), blocks=find_blocks(model, final_norm=name), final_norm="include", **OPTIONS
    )
    assert_equal_measures(seen, named)


class SoftCap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(x / 30)


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


@pytest.mark.parametrize("norm", [None, lambda width: SoftCap(), Scale, partial(nn.Linear, 48)])
def test_a_language_model_without_a_norm_that_can_be_found_is_measured_with_a_warning(norm):
    model = PlainGPT2(gpt2(depth=2), norm=norm)
    with pytest.warns(
        UserWarning, match="this is a language model .60 logits .*final_norm='NAME'"
    ) as caught:
        ds = tracker.measure(model, tokens(), measures="trajectory")
    assert ds.attrs["final_norm"] == "exclude" and caught[0].filename == __file__
    assert ds.attrs["final_norm_reason"] == "no norm takes the last block's output"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.measure(model, tokens(), measures="trajectory", final_norm="exclude")


class Classifier(nn.Module):
    """A text classifier with as many classes as its vocabulary has entries."""

    def __init__(self, classes: int, pool):
        super().__init__()
        self.encoder, self.head, self.pool = Encoder(), nn.Linear(32, classes), pool

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.pool(self.encoder(ids)))


OTHERS = {
    "states alone": (Encoder(), tokens()),
    "mean of the tokens": (Classifier(50, lambda x: x.mean(1)), tokens()),
    "first token": (Classifier(50, lambda x: x[:, 0]), tokens()),
    "classes of tokens": (Classifier(5, lambda x: x), tokens()),
    "timm": (timm_vit(), images()),
    "torchvision": (torchvision_vit(), images()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_exclude_the_norm(name):
    model, inputs = OTHERS[name]
    ds = tracker.measure(model, inputs, measures="trajectory")
    assert ds.attrs["final_norm"] == "exclude" and ds.attrs["final_norm_module"]
    assert (
        ds.attrs["final_norm_reason"]
        == "not a language model: no logits over a vocabulary follow for each token"
    )


def test_find_blocks_says_what_decides():
    model = PlainGPT2(gpt2(depth=2))
    assert (
        "final norm: last (included by default if measuring finds that logits over a vocabulary follow"
        in str(find_blocks(model))
    )
    assert "final norm: transformer.ln_f (included by default)" in str(find_blocks(gpt2(depth=2)))


def test_a_large_head_is_recognised():
    """A product of few rows with a large matrix is computed the other way round (`tracker.linalg.linear`)."""
    model = PlainGPT2(gpt2(depth=2, vocabulary=50_000))
    ds = tracker.measure(model, tokens(1, 5), measures="trajectory")
    assert ds.attrs["final_norm"] == "include" and "50000 logits" in ds.attrs["final_norm_reason"]


def test_language_models_of_boundaries_include_their_norm():
    model = PlainGPT2(gpt2(depth=2)).eval()
    blocks = ["input of layers.0", "input of layers.1", "input of last"]
    ds = tracker.measure(model, tokens(), blocks=blocks, **OPTIONS)
    assert_equal_measures(ds, tracker.measure(model, tokens(), **OPTIONS))
    assert ds.attrs["final_norm"] == "include"
