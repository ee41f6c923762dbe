"""A memory budget that does not hold the Jacobians of all blocks, on an accelerator: they wait in the host's memory."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import Size, build
from tests.rounding import of_miscouplings, rounding
from tracker.measures import depthwise, layers, plan

WIDTH, DEPTH = 64, 3
ONE = WIDTH**2 * 4  # bytes of one block's Jacobian at one row
OPTIONS = {"k": (3, 6), "tokens": "last", "svd": "full", "measures": "coupling"}


@pytest.fixture
def sketches(monkeypatch) -> list[int]:
    """Layers whose Jacobians were computed as products, as the second pass over the blocks does."""
    found = []
    sketch = depthwise.Jacobians.sketch
    monkeypatch.setattr(
        depthwise.Jacobians, "sketch", lambda self, some: found.append(some[0][0].layer) or sketch(self, some)
    )
    return found


def model_on(device):
    model, given = build("gpt_neox", Size(width=WIDTH, depth=DEPTH))
    return model.to(device), given


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_jacobians_wait_on_the_host_and_blocks_are_gone_through_once(pretend, sketches, monkeypatch, at_once):
    model, given = model_on(pretend.device)
    held = tracker.measure(model, given, **OPTIONS)
    kept = []
    to_host = layers.to_host
    monkeypatch.setattr(layers, "to_host", lambda J: kept.append(to_host(J)) or kept[-1])
    again = tracker.measure(model, given, **OPTIONS, memory_budget=2 * at_once * ONE)
    assert not sketches
    assert sum(J.nbytes for J in kept) == (DEPTH + 1) * 2 * ONE  # of two samples
    assert {J.device.type for J in kept} == {"cpu"}
    np.testing.assert_allclose(again.miscoupling, held.miscoupling, rtol=0, atol=of_miscouplings(held))
    atol = rounding(torch.float32) * float(held.singular_value.max())
    np.testing.assert_allclose(again.singular_value, held.singular_value, rtol=0, atol=atol)


@pytest.mark.slow
def test_a_host_without_memory_for_them_has_the_blocks_gone_through_twice(pretend, sketches, monkeypatch):
    monkeypatch.setattr(plan, "host_memory", lambda: DEPTH * ONE)  # one less than there are
    model, given = model_on(pretend.device)
    held = tracker.measure(model, given, **OPTIONS)
    again = tracker.measure(model, given, **OPTIONS, memory_budget=2 * ONE)
    assert set(sketches) == {1, 2, 3}
    np.testing.assert_allclose(again.miscoupling, held.miscoupling, rtol=0, atol=of_miscouplings(held))


@pytest.mark.slow
def test_the_matrices_of_all_pairs_of_blocks_count_in_the_budget(pretend):
    """In a narrow model with many rows they are larger than the Jacobians."""
    model, _ = build("gpt_neox", Size(width=16, depth=8))
    model, given = model.to(pretend.device), torch.randint(0, 50, (8, 16))
    budget = 4_000_000
    pretend.reset_peak()
    before = pretend.live_bytes()
    tracker.measure(model, given, k=16, tokens="all", svd="full", measures="coupling", memory_budget=budget)
    assert pretend.peak_bytes() - before <= budget
