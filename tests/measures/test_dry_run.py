"""`tracker.measure(..., dry_run=True)`: what it reports, and its estimates against actual times."""

import time
from statistics import median

import pytest
import torch

import tracker
from tests.models import images, neox, timm_vit, tokens
from tracker.common.errors import UsageError
from tracker.measures.estimate import Cost

WIDE = {
    "hidden_size": 192,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
}
SHAPES = {  # models and options for which the blocks take most of the time
    "full": {"svd": "full"},
    "krylov": {"svd": "krylov", "k": 10},
    "in a file": {"svd": "krylov", "k": 10, "measures": ["coupling"], "memory_budget": 1_000_000},
    "measures of blocks": {
        "measures": ["coupling", "vju", "depth_use", "normality", "halves", "eigenvalues"],
        "k": 10,
    },
    "states": {"measures": ["trajectory", "noise", "pca"]},
}


def dry_run(model, inputs, **options) -> Cost:
    cost = tracker.measure(model, inputs, dry_run=True, **options)
    assert isinstance(cost, Cost)
    return cost


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("case", SHAPES)
def test_the_estimate_is_within_a_factor_of_four(case):
    model, x = neox(**WIDE), tokens(1)
    expected, actual = [], []
    for _ in range(3):  # in turn, as other processes take part of the machine
        expected.append(dry_run(model, x, **SHAPES[case]).seconds)
        started = time.perf_counter()
        tracker.measure(model, x, **SHAPES[case])
        actual.append(time.perf_counter() - started)
    assert 1 / 4 < median(expected) / median(actual) < 4


def test_one_block_is_timed_and_one_on_each_core(formed):
    dry_run(neox(**WIDE), tokens(), k=10)
    used = {call.name for selections in formed for call, _ in selections}
    assert 1 <= len(used) <= 1 + torch.get_num_threads()


def test_the_report_states_what_would_be_measured():
    cost = dry_run(
        neox(), tokens(4), k=[2, 4], tokens=[0, -1], measures=["coupling", "trajectory", "entropy"]
    )
    assert (cost.samples, cost.tokens, cost.rows, cost.k, cost.width) == (4, (7, 7), 8, (2, 4), 32)
    assert not cost.refused and not cost.warning
    assert 0 < cost.peak_bytes < cost.memory_budget
    assert cost.seconds > 0
    text = str(cost)
    assert repr(cost) == text and max(map(len, text.splitlines())) <= 80
    for shown in ("3 blocks", "4 of 7 tokens; Jacobians at 8 tokens in all", "2, 4 of width 32"):
        assert shown in text


@pytest.mark.parametrize(
    "options, method",
    [
        ({"svd": "full"}, "full decomposition"),
        ({"svd": "krylov", "k": 10}, "krylov"),
        ({"memory_budget": 1 << 20}, "wait in a file"),
        ({"measures": ["trajectory"]}, "no Jacobians"),
    ],
)
def test_the_report_names_the_method(options, method):
    assert method in dry_run(neox(**WIDE), tokens(), **options).method


def test_the_report_names_the_measures_that_are_not_timed():
    cost = dry_run(neox(), tokens(), k=4, measures=["all", "tokenwise"], pair_tokens=3)
    assert cost.not_timed == ("products", "tokenwise")
    assert ", without products, tokenwise\n" in str(cost)
    assert not dry_run(neox(), tokens(), k=4, measures=["coupling", "halves"]).not_timed


def test_what_would_be_refused_is_reported():
    cost = dry_run(timm_vit(), images(), measures=["entropy"])
    assert "no unembedding was found" in cost.refused
    assert "refused      measures='entropy', but no unembedding" in str(cost)
    assert "method" not in str(cost) and "memory" not in str(cost), "nothing is known of it"
    assert "k=1000" in dry_run(neox(), tokens(), k=1000).refused
    with pytest.raises(UsageError, match="svd"):  # not even an option
        dry_run(neox(), tokens(), svd="fast")


def test_a_jacobian_beyond_the_budget_is_a_warning():
    warning = dry_run(neox(), tokens(), memory_budget=4096).warning
    assert warning.startswith("one Jacobian takes 0.0041 MB, more than half of the memory budget")


def test_prompts_of_several_lengths_count_by_their_tokens():

    def tokenizer(prompt, return_tensors):
        return {"input_ids": tokens(1, len(prompt))}

    cost = dry_run(neox(), ["a" * 3, "b" * 5, "c" * 7], tokenizer=tokenizer, tokens="all", k=2)
    assert (cost.samples, cost.tokens, cost.rows) == (3, (3, 7), 15)


def test_measuring_after_a_dry_run_gives_the_same_numbers():
    model, x = neox(), tokens()
    before = tracker.measure(model, x)
    dry_run(model, x)
    assert before.miscoupling.equals(tracker.measure(model, x).miscoupling)
