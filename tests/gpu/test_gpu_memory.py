"""Memory of the device: measurements that run out of it, budgets, and weights that stay on the host."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch

import tracker
from tests.support.accelerators import DEVICES
from tests.support.lightning_runs import Classifier, Noisy, fit, trainer
from tests.support.models import Size, build

pytestmark = pytest.mark.slow

OPTIONS = {"k": 4, "tokens": "all", "measures": "coupling", "svd": "full"}


def assert_same(a, b):
    np.testing.assert_allclose(a.miscoupling, b.miscoupling, atol=1e-3)
    np.testing.assert_allclose(a.singular_value, b.singular_value, rtol=1e-4)


@DEVICES
def test_a_measurement_that_runs_out_of_memory_leaves_none_behind(accelerator):
    model, inputs = build("gpt_neox", accelerator.size, samples=4)
    model = model.to(accelerator.device)
    measure = partial(tracker.measure, model, inputs, **OPTIONS)
    large, small = accelerator.budgets
    expected = measure(memory_budget=large)  # to warm up: libraries allocate workspaces
    needed, least = (
        accelerator.peak(partial(measure, memory_budget=budget)) for budget in (large, small)
    )
    assert least < 0.6 * needed, "the budget makes too little of a difference for this test"
    before = accelerator.live()
    with accelerator.limited((needed + least) // 2):
        with pytest.raises(torch.OutOfMemoryError):
            measure(memory_budget=large)
        assert accelerator.live() - before <= 0.01 * needed
        assert_same(measure(memory_budget=small), expected)
    assert_same(measure(memory_budget=large), expected)


@DEVICES
def test_the_callback_measures_with_a_smaller_budget_where_memory_runs_out(accelerator):
    width, length, samples = accelerator.size.width, accelerator.size.tokens, 8
    make = partial(Classifier, width=width, drop=0.0)
    data = Noisy(n=16, length=length, noise=0.0)
    probe = data.x[:samples]
    jacobians = samples * length * width**2 * 4
    # Holds those of all three blocks; a quarter of it holds less than one block's
    budget = 2 * 3 * jacobians
    module = make().to(accelerator.device)
    measure = partial(tracker.measure, module, probe, **OPTIONS)
    measure(memory_budget=budget)
    needed, least = (
        accelerator.peak(partial(measure, memory_budget=size)) for size in (budget, budget // 4)
    )
    assert least < 0.75 * needed, "the budget makes too little of a difference for this test"
    expected = measure(memory_budget=budget)
    units = []
    watch = tracker.CouplingCallback(
        steps=[0], probe=probe, memory_budget=budget, on_measure=units.append, **OPTIONS
    )
    state = sum(parameter.nbytes for parameter in module.parameters())
    del module, measure
    runner = trainer([watch], max_steps=1, **accelerator.trainer)
    with warnings.catch_warnings(), accelerator.limited((needed + least) // 2 + 5 * state):
        warnings.filterwarnings("error", message=".*is not measured")
        fit(runner, make, validate=False, data=data, shuffle=False)
    assert len(units) == 2
    assert_same(units[0], expected)


@DEVICES
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_weights_on_the_host_give_the_same_and_take_less_memory(accelerator, stored):
    size = Size(width=2 * accelerator.size.width, depth=2 * accelerator.size.depth, tokens=8)
    model, inputs = build("gpt_neox", size)
    model = model.to(stored)
    options = {
        "k": 4,
        "measures": "coupling",
        "device": accelerator.device,
        "memory_budget": 1 << 22,
    }
    streamed = tracker.measure(model, inputs, **options)
    of_stream = accelerator.peak(lambda: tracker.measure(model, inputs, **options))
    before = accelerator.live()
    resident = model.to(accelerator.device)
    weights = accelerator.live() - before
    seen = tracker.measure(resident, inputs, **options)
    of_resident = weights + accelerator.peak(lambda: tracker.measure(resident, inputs, **options))
    np.testing.assert_allclose(streamed.miscoupling, seen.miscoupling, atol=1e-5)
    np.testing.assert_allclose(streamed.singular_value, seen.singular_value, rtol=1e-5)
    assert of_stream < of_resident - weights / 2
    assert {parameter.dtype for parameter in resident.parameters()} == {stored}
