"""Jacobians between tokens: which of them are formed, and choices that are refused. That they are right: tests/zoo."""

import pytest
import torch

import tracker
from tests.support.models import Letters, Size, build, neox, padded, tokens
from tests.support.refused import refused

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize(("apart", "concerned"), [(1, {1, 2, 3}), (0, {1, 2, 3}), (-2, {1, 3})])
def test_no_jacobian_is_computed_twice(apart, concerned, formed):
    model, inputs = build("gpt_neox", Size(16))
    options = {"k": 4, "measures": "tokenwise", "pair_tokens": [0, 2, 3, 5], "dtype": torch.float64}
    options |= {"pair_layers": apart}
    tracker.measure(model, inputs[:1], **options)
    asked = formed.each()
    assert (
        len(asked) == len(set(asked)) == len(concerned) * (3 * 4 - 3)
        and {l for l, *_ in asked} == concerned
    )


def test_one_block_has_no_other():
    model = neox(size=Size(32, 1))
    assert "self_offdiag" not in tracker.measure(model, tokens(1), k=4, measures="all")
    with refused("pair_layers=1, but 1 block is measured.* pair_layers=0"):
        tracker.measure(model, tokens(1), k=4, measures="tokenwise")
    found = tracker.measure(model, tokens(1), k=4, measures="all,tokenwise", pair_layers=0)
    assert found.self_offdiag.notnull().all() and found.pair_layer_other.values.tolist() == [1]


def test_shorter_prompts_lack_pairs():
    found = tracker.measure(neox(), padded(7, 3), k=4, measures="all,tokenwise", pair_tokens=5)
    assert (
        found.pair_position[1].values[:3].tolist() == [0, 1, 2]
        and found.pair_position[1, 3:].isnull().all()
    )
    compared = found.self_offdiag[1].sel(layer=[1, 2])
    assert compared[..., 3:, :].isnull().all() and compared[..., :3, :3].notnull().all()


@pytest.mark.slow
def test_as_many_prompts_pass_through_a_block_together_as_the_budget_holds(formed):
    width = 16
    model, _ = build("gpt_neox", Size(width))
    prompts = ["abcdefg", "bcd", "gfedcba", "hijklmno"]  # of 4, 3, 4 and 4 compared tokens
    options = {"k": 2, "measures": "tokenwise", "pair_tokens": 4, "dtype": torch.float64}
    options |= {"tokenizer": Letters()}
    # Bytes: half of them for the links of one sample in a block
    held = 2 * 8 * width**2 * (3 * 4 - 3)
    for budget, most in ((1 << 30, 3 * 5), (2 * held, 2 * 5), (held // 2, 4)):
        formed.clear()
        tracker.measure(model, prompts, **options, memory_budget=budget)
        assert max(sum(len(rows) for _, rows in selections) for selections in formed) == most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": "tokenwise", "pair_tokens": [0, 99]}, "out of range"),
        ({"measures": "tokenwise", "pair_tokens": "all"}, "pair_tokens='all'"),
        ({"measures": "tokenwise", "pair_layers": 3}, "pair_layers=3, but 3 blocks are measured"),
        (
            {"measures": "all,tokenwise", "pair_layers": -3},
            "pair_layers=-3, but 3 blocks are measured",
        ),
        ({"pair_layers": "next"}, "pair_layers='next'; give one whole number"),
    ],
)
def test_bad_choices(options, message):
    model, inputs = build("gpt_neox")
    with refused(message):
        tracker.measure(model, inputs, **options)
