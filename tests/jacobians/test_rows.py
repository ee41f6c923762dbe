"""Jacobians on single rows: weights are the current ones, rows of zeros and threads."""

import numpy as np
import pytest
import torch
from torch import nn

import tracker
from tests.support.models import build, random
from tests.support.stacks import Attention, Stack, measured
from tests.support.unchanged import assert_unchanged, snapshot


class Linear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention, self.layer = Attention(), layer

    def forward(self, x):
        return x + self.layer(x)


@pytest.mark.parametrize("how", ["prune", "parametrized"])
def test_weights_computed_by_hooks_are_the_current_ones(how):
    from torch.nn.utils import parametrizations, prune

    layer = nn.Linear(8, 8).double()
    if how == "prune":
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
