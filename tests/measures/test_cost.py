"""`tracker.measure(..., dry_run=True)`: what it reports, and its arithmetic."""

import pytest
import torch

import tracker
from tests.support.models import images, neox, timm_vit, tokens
from tests.support.refused import refused
from tracker.linalg.costs import decomposition
from tracker.measures.cost import DEVICES, PASSES, Cost, named_machine

WIDE = {
    "hidden_size": 192,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
}


def dry_run(model, inputs, **options) -> Cost:
    cost = tracker.measure(model, inputs, dry_run=True, **options)
    assert isinstance(cost, Cost)
    return cost


@pytest.mark.parametrize(
    "options, rows", [({}, 4), ({"tokens": [0, -1]}, 8), ({"tokens": "all"}, 28)]
)
@pytest.mark.parametrize("final_norm, of_row", [("include", 5), ("exclude", 4)])
def test_operations_are_those_of_the_formula(options, rows, final_norm, of_row):
    model, x = neox(**WIDE), tokens(4)
    cost = dry_run(model, x, k=[2, 10], final_norm=final_norm, **options)
    weights = sum(p.numel() for p in model.parameters())
    of_block = sum(p.numel() for p in model.gpt_neox.layers[0].parameters())
    d, K = 192, 10
    expected = 2 * PASSES * weights * 4 * 7
    expected += of_row * rows * (2 * d * of_block + decomposition(d, K, torch.float32))
    expected += 2 * of_row**2 * rows * K * d**2
    assert cost.operations == pytest.approx(expected) and cost.rows == rows
    without = dry_run(model, x, k=10, measures="trajectory")
    assert without.operations == 2 * PASSES * weights * 4 * 7
    assert without.seconds == pytest.approx(without.operations / without.machine.rate)


def test_the_report_states_what_would_be_measured():
    cost = dry_run(
        neox(), tokens(4), k=[2, 4], tokens=[0, -1], measures=["coupling", "trajectory", "entropy"]
    )
    assert (cost.samples, cost.tokens, cost.rows, cost.k, cost.width) == (4, (7, 7), 8, (2, 4), 32)
    assert not cost.warning
    assert 0 < cost.peak_bytes < cost.memory_budget
    text = str(cost)
    assert repr(cost) == text and max(map(len, text.splitlines())) <= 80
    for shown in ("3 blocks", "4 of 7 tokens; Jacobians at 8 tokens in all", "2, 4 of width 32"):
        assert shown in text


@pytest.mark.parametrize(
    "options, warning",
    [
        ({}, ""),
        ({"memory_budget": 1 << 20}, "the Jacobians of one token exceed half of the budget"),
        (
            {"memory_budget": 4096},
            "one Jacobian takes 0.147 MB, more than half of the memory budget",
        ),
        ({"memory_budget": 4096, "measures": ["trajectory"]}, ""),
    ],
)
def test_what_exceeds_the_budget_is_a_warning(options, warning):
    cost = dry_run(neox(**WIDE), tokens(), **options)
    assert cost.warning.startswith(warning) and bool(cost.warning) == bool(warning)


@pytest.mark.parametrize(
    "model, inputs, options, message",
    [
        (timm_vit, images, {"measures": ["entropy"]}, "no unembedding was found"),
        (neox, tokens, {"k": 1000}, "k=1000"),
        (neox, tokens, {"svd": "fast"}, "svd"),
    ],
)
def test_what_would_be_refused_is_refused(model, inputs, options, message):
    with refused(message):
        dry_run(model(), inputs(), **options)


def test_prompts_of_several_lengths_count_by_their_tokens():

    def tokenizer(prompt, return_tensors):
        return {"input_ids": tokens(1, len(prompt))}

    cost = dry_run(neox(), ["a" * 3, "b" * 5, "c" * 7], tokenizer=tokenizer, tokens="all", k=2)
    assert (cost.samples, cost.tokens, cost.rows) == (3, (3, 7), 15)


def test_a_device_that_is_not_there_is_one_of_the_table():
    machine = named_machine("h100")
    assert (machine.device.type, machine.rate, machine.memory) == DEVICES["h100"]
    with refused("--on tpu; choose from 2cores, a100, h100, h200"):
        named_machine("tpu")
