"""A prompt's numbers do not depend on what else is measured: on other prompts, their order, and the memory budget."""

import warnings
from functools import cache

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import Letters, Size, build
from tracker.measures.settings import EVERYTHING

TOLERANCE = {"float64": 1e-8, "float32": 1e-3}  # absolute, and relative to each value
TEXTS = ("abcdefg", "qrs", "hello world", "qrs tuv")
# Attributes that are of all inputs together
OF_WHOLE = {"seconds", "created", "witness", "inputs_sha256", "token_ids_sha256"}


@cache
def case(kind: str, width: int):
    """Return a model, and a function from the indices of some samples to its inputs and their tokenizer."""
    name = {"prompts": "gpt_neox", "ids": "gpt_neox", "images": "timm vit"}[kind]
    model, inputs = build(name, Size(width=width), samples=len(TEXTS))
    if kind == "prompts":
        return model, lambda chosen: {
            "inputs": [TEXTS[i] for i in chosen],
            "tokenizer": Letters(lambda ids: f"w{ids[0]}"),
        }
    return model, lambda chosen: {"inputs": inputs[chosen]}


@cache
def measured(kind: str, chosen: tuple[int, ...], svd: str, dtype: str, budget: int = 4 << 30):
    width = 32 if svd == "full" else 64  # wide enough for iterations
    model, inputs_of = case(kind, width)
    names = EVERYTHING if svd == "full" else "all"
    how = {
        "k": (3, 5),
        "tokens": [0, -1],
        "measures": names,
        "svd": svd,
        "dtype": dtype,
        "memory_budget": budget,
    }
    how["pair_tokens"] = 3
    return tracker.measure(model, **inputs_of(list(chosen)), **how)


def assert_as_alone(together, alone, place: int, atol: float):
    one = together.isel(prompt=[place])
    assert set(one.variables) == set(alone.variables)
    for name, expected in alone.data_vars.items():
        if "prompt" not in expected.dims:
            continue  # counts over all prompts
        found = one[name].isel({dim: slice(size) for dim, size in expected.sizes.items()})
        if expected.dtype == object:
            np.testing.assert_array_equal(found, expected, str(name))
        else:
            np.testing.assert_allclose(found, expected, rtol=atol, atol=atol, err_msg=str(name))
        if set(expected.dims) & {"token", "position", "pair_token"}:
            assert int(one[name].notnull().sum()) == int(found.notnull().sum()), (
                "what a shorter prompt lacks is NaN"
            )
    assert {name for name in alone.attrs if alone.attrs[name] != together.attrs[name]} <= OF_WHOLE


@pytest.mark.parametrize(
    "kind, svd, dtype",
    [
        ("prompts", "full", "float64"),
        ("images", "full", "float64"),
        ("prompts", "full", "float32"),
        pytest.param("ids", "krylov", "float64", marks=pytest.mark.slow),
    ],
)
def test_company_order_and_budget_change_no_number(kind, svd, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for chosen, budget in (((2, 0), 60_000), ((3, 0, 1), 4 << 30)):
            together = measured(kind, chosen, svd, dtype, budget)
            for place, i in enumerate(chosen):
                assert_as_alone(together, measured(kind, (i,), svd, dtype), place, TOLERANCE[dtype])


def test_padding_changes_no_draw():
    model, inputs_of = case("ids", 32)
    ids = inputs_of([0, 1])["inputs"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    how = {"measures": ["coupling", "noise"], "dtype": "float64", "k": 3}
    together = tracker.measure(model, {"input_ids": ids, "attention_mask": mask}, **how)
    positions = {"position_ids": torch.arange(3, ids.shape[1])[None]}
    alone = tracker.measure(model, {"input_ids": ids[1:, 3:], **positions}, **how)
    np.testing.assert_allclose(
        together.noise_similarity[1, ..., 3:], alone.noise_similarity[0], atol=1e-8
    )
