"""`tracker.measure` on the pretend device: every measure, method and small budget gives the CPU's values, as in tests/zoo."""

import gc

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import Size, build, language, tokens
from tests.support.units import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = ("miscoupling", "lss", "expodistance")
CHECKED = ("diagnostics_sliced", "diagnostics_full_svd", "diagnostics_complete")


def compare(model, inputs, pretend, tolerance, **options):
    """Measure on the CPU and on the device; compare values and the decisions of all checks, and the memory in use."""
    expected = tracker.measure(model, inputs, **options)
    gc.disable()
    try:
        before = pretend.live_bytes()
        found = tracker.measure(model, inputs, device=pretend.device, **options)
        assert pretend.live_bytes() == before, (
            "a reference cycle keeps weights until it is collected"
        )
    finally:
        gc.enable()
    assert set(found) == set(expected)
    assert_same(found, expected, EXACT, atol=tolerance)
    assert_same(found, expected, CHECKED)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "timm deit, distilled"])
def test_every_measure(pretend, name):
    model, inputs = build(name, Size(depth=2, tokens=5))
    compare(
        model,
        inputs,
        pretend,
        1e-7,
        k=3,
        tokens=[1, -1],
        measures="all,tokenwise",
        dtype=torch.float64,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("svd", "memory_budget"), [("auto", None), ("full", 200_000), ("krylov", None)]
)
def test_methods_and_budgets(pretend, svd, memory_budget):
    model = language("GPTNeoXForCausalLM")(Size(width=128, depth=3, tokens=12))
    options = {} if memory_budget is None else {"memory_budget": memory_budget}
    full = tracker.measure(
        model, tokens(2, 12), k=4, svd="full", measures="coupling", tokens=[3, -1]
    )
    found = tracker.measure(
        model,
        tokens(2, 12),
        k=4,
        svd=svd,
        measures="coupling",
        tokens=[3, -1],
        device=pretend.device,
        **options,
    )
    assert found.diagnostics_complete.all()
    np.testing.assert_allclose(found.singular_value, full.singular_value, rtol=1e-5)
    np.testing.assert_allclose(found.miscoupling, full.miscoupling, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision(pretend, dtype):
    model = language("LlamaForCausalLM", num_key_value_heads=2)(
        Size(width=32, depth=3, tokens=9)
    ).to(dtype)
    compare(
        model, tokens(1, 9), pretend, 1e-4, k=3, tokens=[1, -1], measures=("coupling", "trajectory")
    )


def test_a_model_on_the_device_stays_there_unchanged(pretend):
    model = language("GPTNeoXForCausalLM")(Size(width=32, depth=3, tokens=9)).to(pretend.device)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    random = torch.pretend.get_rng_state()
    tracker.measure(model, tokens(1, 9), k=3, measures="all,tokenwise")
    for name, value in model.state_dict().items():
        assert value.device == pretend.device and torch.equal(value.cpu(), before[name]), name
    assert torch.equal(torch.pretend.get_rng_state(), random)
