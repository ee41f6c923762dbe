"""The final norm and the logits of language models that are not Hugging Face's, found by what they do."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracker
from tests.support.compared import measured_as_by_brute_force
from tests.support.home_made import DEPTH, LM, Torch, called
from tests.support.models import VOCABULARY, WIDTH, Encoder, build, tokens
from tests.support.plain import RootMeanSquare
from tests.support.refused import refused
from tests.support.units import assert_same
from tracker.blocks.find import find_blocks
from tracker.model.hidden_state import hidden_state, with_hidden_state

OPTIONS = {"k": 4, "dtype": torch.float64}
MEASURES = """expodistance expodistance_normed alpha_mean_normed lss equidistance miscoupling offdiag_normalized
    singular_value""".split()


def assert_equal_measures(a, b):
    assert a.attrs["final_norm"] == b.attrs["final_norm"]
    assert_same(a, b, MEASURES, rtol=1e-7, atol=1e-9)


class Plain(LM):
    """A language model that is not Hugging Face's, with tied weights.

    Args:
        norm: makes the final norm; None: it is computed by a function, without a module.
        read: maps the normed states to logits: f(model, states).
    """

    def __init__(
        self,
        norm: Callable[[int], nn.Module] | None = nn.LayerNorm,
        read: Callable[["Plain", Tensor], Tensor] = lambda model, x: model.head(x),
        vocabulary: int = VOCABULARY,
    ):
        torch.manual_seed(0)
        super().__init__(Torch)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.read = norm(WIDTH) if norm else None, read

    def forward(self, ids: Tensor) -> Any:
        x = called(self.blocks, self.embed(ids))
        x = F.layer_norm(x, x.shape[-1:]) if self.norm is None else self.norm(x)
        return self.read(self, x)


def test_the_final_norm_is_counted_in():
    model = Plain().double().eval()
    nn.init.normal_(model.norm.weight)
    names = [f"blocks.{l}" for l in range(DEPTH)]
    measured_as_by_brute_force(model, tokens(), names, "norm", final_norm="auto")


HEADS = {
    "linear": lambda model, x: model.head(x),
    "matrix product": lambda model, x: x @ model.embed.weight.T,
    "einsum": lambda model, x: torch.einsum("btd,vd->btv", x, model.embed.weight),
    "last token": lambda model, x: model.head(x[:, [-1]]),
    "last token, no axis": lambda model, x: model.head(x[:, -1]),
    "all tokens with a next one": lambda model, x: model.head(x[:, :-1]),
    "scaled states": lambda model, x: model.head(0.1 * x),
    "padded": lambda model, x: F.linear(x, F.pad(model.embed.weight, (0, 0, 0, 3))),
    "loss alone": lambda model, x: model.head(x).logsumexp(-1).mean(),
}


class BesideAnother(Plain):
    """It calls an auxiliary head with a norm of its own first."""

    def __init__(self):
        super().__init__()
        self.other, self.value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        nn.init.constant_(self.norm.weight, 3)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = called(self.blocks, self.embed(ids))
        value = self.value(self.other(x))
        return {"value": value, "logits": self.head(self.norm(x))}


class Two(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Dropout(), nn.RMSNorm(width))
        nn.init.constant_(self[2].weight, 3)


# Tied weights, a bias, scales, a cap, a transform
FAMILIES = ("gptj", "granite", "gemma2, soft cap", "bert")
WITH_LOGITS = {name: head for name, head in HEADS.items() if name != "loss alone"}
PREDICTING = {
    **{name: lambda name=name: build(name)[0] for name in FAMILIES},
    **{name: partial(Plain, read=head) for name, head in WITH_LOGITS.items()},
    "a norm in a function": lambda: Plain(norm=None),
    "two norms": lambda: Plain(norm=Two),
    "an auxiliary head": BesideAnother,
}
NORMS_OF = {"two norms": "norm.0, norm.2", "an auxiliary head": "norm"}


def own_entropies(model: nn.Module, inputs: Tensor, blocks: list[str]) -> Tensor:
    """Return the entropies of the model's logits, after passes in which the last block returns the state of each depth."""
    states, entropies = [], []

    def enter(module, args):
        states.append(args[0].clone())

    def leave(module, args, output):
        states.append(hidden_state(output).clone())

    first, *_, last = of_blocks = [model.get_submodule(name) for name in blocks]
    hooks = [first.register_forward_pre_hook(enter)]
    hooks += [block.register_forward_hook(leave) for block in of_blocks]
    with torch.no_grad():
        model(inputs)
        for hook in hooks:
            hook.remove()
        for state in states:
            hook = last.register_forward_hook(
                lambda *given, x=state: with_hidden_state(given[-1], x.clone())
            )
            z = model(inputs)
            hook.remove()
            p = (z if isinstance(z, Tensor) else z["logits"]).softmax(-1)
            entropies.append(-(p * p.log()).sum(-1))
    return torch.stack(entropies, 1).view(len(inputs), len(states), -1)


@pytest.mark.parametrize("name", PREDICTING)
def test_the_entropy_is_of_the_model_s_logits(name):
    model, inputs = PREDICTING[name]().double().eval(), tokens(2, 7)
    ds = tracker.measure(model, inputs, measures="entropy, trajectory", dtype="float64")
    own = own_entropies(model, inputs, ds.attrs["blocks"].split(", "))
    of = slice(own.shape[2]) if own.shape[2] == 6 else slice(7 - own.shape[2], 7)
    np.testing.assert_allclose(ds.entropy[..., of], own, rtol=0, atol=1e-12)
    assert not ds.entropy.isnull().any()
    if name in HEADS:
        assert (ds.attrs["final_norm"], ds.attrs["final_norm_module"]) == ("include", "norm")
    if name in NORMS_OF:
        assert ds.attrs["final_norm_module"] == NORMS_OF[name]
        np.testing.assert_allclose(ds.norm_normed[:, -1], 3 * WIDTH**0.5, rtol=1e-3)


UNKNOWN = {
    "loss alone": (HEADS["loss alone"], "returns none over"),
    "a value read": (lambda model, x: model.head(x) * float(x.max()), "reads values .*__float__"),
    "a buffer": (
        lambda model, x: torch.zeros(2, 7, VOCABULARY).copy_(model.head(x)),
        "writes to another .*copy_",
    ),
    "states that may not be equal": (
        lambda model, x: model.head(torch.stack([s.unique(dim=0) for s in x]).view(x.shape)),
        "computes others",
    ),
    "other tokens": (lambda model, x: model.head(x - x.mean(1, keepdim=True)), "computes others"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_entropy_where_the_logits_of_other_states_are_not_known(name):
    head, reason = UNKNOWN[name]
    model, inputs = Plain(read=head), torch.arange(14).view(2, 7)
    with pytest.warns(UserWarning, match=f"'all' leaves out the entropy .*{reason}") as caught:
        ds = tracker.measure(model, inputs, measures="all", k=2)
    assert "entropy" not in ds and caught[0].filename == __file__
    with refused(f"measures='entropy', but .*{reason}"):
        tracker.measure(model, inputs, measures="entropy")


def test_logits_are_recognised_where_a_loss_alone_is_returned():
    model = Plain(read=HEADS["loss alone"])
    ds = tracker.measure(model, tokens(2, 7), measures="trajectory")
    assert (ds.attrs["final_norm"], ds.attrs["final_norm_module"]) == ("include", "norm")
    reason = "a language model: norm takes the last block's output, 50"
    assert ds.attrs["final_norm_reason"].startswith(reason)


class Standardize(nn.LayerNorm):
    """A LayerNorm whose class is called something else."""


class Wrapped(nn.Sequential):
    """A norm and a head in one module, and dropout before them."""

    def __init__(self, width: int):
        super().__init__(nn.Dropout(0.5), nn.LayerNorm(width))


NORMS = {
    "nn.LayerNorm": (nn.LayerNorm, "norm"),
    "a subclass called otherwise": (Standardize, "norm"),
    "nn.RMSNorm": (nn.RMSNorm, "norm"),
    "an RMSNorm by hand, called otherwise": (RootMeanSquare, "norm"),
    "in a list with dropout": (Wrapped, "norm.1"),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_many_names_are_found(norm):
    """The norm found is the one that the caller would name."""
    make, name = NORMS[norm]
    model = Plain(norm=make)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = tracker.measure(model, tokens(), **OPTIONS)
    assert (seen.attrs["final_norm"], seen.attrs["final_norm_module"]) == ("include", name)
    named = tracker.measure(
        model, tokens(), blocks=find_blocks(model, final_norm=name), final_norm="include", **OPTIONS
    )
    assert_equal_measures(seen, named)


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


@pytest.mark.parametrize("norm", [None, Scale, partial(nn.Linear, WIDTH)])
def test_a_language_model_without_a_norm_that_can_be_found_is_measured_with_a_warning(norm):
    model = Plain(norm=norm)
    with pytest.warns(
        UserWarning, match="this is a language model .50 logits .*final_norm='NAME'"
    ) as caught:
        ds = tracker.measure(model, tokens(), measures="trajectory")
    assert ds.attrs["final_norm"] == "exclude" and caught[0].filename == __file__
    assert ds.attrs["final_norm_reason"] == "no norm takes the last block's output"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.measure(model, tokens(), measures="trajectory", final_norm="exclude")
    named = find_blocks(model, final_norm="embed")  # which takes another tensor
    with pytest.warns(
        UserWarning, match="the module embed does not take the last block's output itself"
    ):
        tracker.measure(model, tokens(), blocks=named, measures="trajectory")


class Classifier(nn.Module):
    """A text classifier with as many classes as its vocabulary has entries."""

    def __init__(self, classes: int, pool):
        super().__init__()
        self.encoder, self.head, self.pool = Encoder(), nn.Linear(WIDTH, classes), pool

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.pool(self.encoder(ids)))


OTHERS = {
    "mean of the tokens": (50, lambda x: x.mean(1)),
    "first token": (50, lambda x: x[:, 0]),
    "classes of tokens": (5, lambda x: x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_exclude_the_norm(name):
    """Image models and models that return states are rows of the zoo."""
    ds = tracker.measure(Classifier(*OTHERS[name]), tokens(), measures="trajectory")
    assert ds.attrs["final_norm"] == "exclude" and ds.attrs["final_norm_module"]
    assert (
        ds.attrs["final_norm_reason"]
        == "not a language model: no logits over a vocabulary follow for each token"
    )


def test_a_large_head_is_recognised():
    """A product of few rows with a large matrix is computed the other way round (`tracker.linalg.linear`)."""
    model = Plain(vocabulary=50_000)
    ds = tracker.measure(model, tokens(1, 5), measures="trajectory")
    assert ds.attrs["final_norm"] == "include" and "50000 logits" in ds.attrs["final_norm_reason"]


def test_language_models_of_boundaries_include_their_norm():
    model, inputs = Plain().double().eval(), tokens()
    blocks = [*(f"input of blocks.{l}" for l in range(DEPTH)), "input of norm"]
    options = OPTIONS | {"measures": "coupling,trajectory,entropy"}
    ds = tracker.measure(model, inputs, blocks=blocks, **options)
    expected = tracker.measure(model, inputs, **options)
    assert_equal_measures(ds, expected)
    np.testing.assert_allclose(ds.entropy, expected.entropy, rtol=1e-9)
    assert ds.attrs["final_norm"] == "include"
