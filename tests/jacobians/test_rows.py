"""Jacobians on single rows: planted faults are caught, unsliceable blocks are still right, weights are the current ones."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import tracker
import tracker.jacobians.rows
from tests.support.measured import detached
from tests.support.models import WIDTH, build, images, random
from tests.support.stacks import Attention, Stack, measured
from tests.support.unchanged import assert_unchanged, snapshot


class Linear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention, self.layer = Attention(), layer

    def forward(self, x):
        return x + self.layer(x)


@pytest.fixture(scope="module", params=[[-1], [0, -1]], ids=str)
def honest(request):
    model, inputs = build("gpt_neox")
    ds = tracker.measure(model, inputs, k=4, tokens=request.param, dtype="float64")
    assert ds.diagnostics_sliced.all()
    return model, inputs, request.param, ds


@pytest.mark.parametrize("path", tracker.jacobians.rows.PATHS)
@pytest.mark.parametrize("planted", ["key", "value"])
def test_a_detached_key_or_value_is_caught(monkeypatch, honest, planted, path):
    """Planted in the slicing itself: outputs agree to the last bit, only the derivative is wrong."""
    faulty = {path: detached(tracker.jacobians.rows.PATHS[path], planted)}
    model, inputs, positions, expected = honest
    monkeypatch.setattr(tracker.jacobians.rows, "PATHS", faulty)
    with pytest.warns(UserWarning, match="derivative at single rows is not"):
        ds = tracker.measure(model, inputs, k=4, tokens=positions, dtype="float64")
    assert ds.attrs["independent_checks"] == "{}"
    assert not ds.diagnostics_sliced.any() and float(ds.diagnostics_value_error.max()) < 1e-9
    # And the full sequence gives the right answer all the same.
    np.testing.assert_allclose(ds.miscoupling, expected.miscoupling, atol=1e-8, rtol=0)


@pytest.mark.parametrize("init", [1e-4, 1e-6, 1e-8])
def test_small_residual_updates_keep_their_digits(init):
    """LayerScale at its start: in float32, x + f leaves few digits of f; such a Jacobian is found in float64."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=WIDTH,
        depth=3,
        num_heads=4,
        init_values=init,
    )
    seen, exact = (
        tracker.measure(model, images(), k=4, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert seen.diagnostics_sliced.all()
    relative = abs(seen.singular_value / exact.singular_value - 1)
    assert float(relative.max()) < 1e-4
    assert float(abs(seen.miscoupling - exact.miscoupling).max()) < 1e-3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["weight_norm", "prune", "parametrized"])
def test_weights_computed_by_hooks_are_the_current_ones(how):
    from torch.nn.utils import parametrizations, prune, weight_norm

    layer = nn.Linear(8, 8).double()
    if how == "weight_norm":
        weight_norm(layer)
    elif how == "prune":
        prune.random_unstructured(layer, "weight", 0.3)
    else:
        parametrizations.weight_norm(layer)
    model = Stack([Linear(layer), Linear(nn.Linear(8, 8).double())])
    model(random(1, 4, 8))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    ds = measured(model)
    model(random(1, 4, 8))  # now the model's own hooks have run as well
    np.testing.assert_allclose(
        ds.singular_value[0, 0, 0], torch.linalg.svdvals(layer.weight).detach()[:3]
    )


def test_a_row_of_zeros_is_no_fault():
    model, inputs = build("llama, grouped keys")
    with torch.no_grad():
        model.model.embed_tokens.weight[int(inputs[0, 0])] = 0
    assert tracker.measure(model, inputs, k=4, tokens="all").diagnostics_sliced.all()


@pytest.mark.slow
def test_threads_measure_and_leave_the_process_as_it_was():
    from concurrent.futures import ThreadPoolExecutor

    model, inputs = build("timm vit")
    alone = tracker.measure(model, inputs, k=4)
    before = snapshot(model)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: tracker.measure(model, inputs, k=4), range(8)))
    assert_unchanged(model, before)
    for result in results:
        assert result.diagnostics_sliced.all()
        np.testing.assert_allclose(result.miscoupling, alone.miscoupling, rtol=1.3e-6, atol=1e-5)
