"""Modules with unusual weights or attributes are measured, or refused in one sentence."""

import multiprocessing
import socket

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracker
from tests.support.kept_functions import INPUTS, model_of
from tests.support.refused import refused

D, STATES = INPUTS.shape[-1], INPUTS.float()


def model_with(make):
    """Return a model with another MLP in each block."""
    model = model_of()
    for block in model.blocks:
        block.mlp = make()
    return model.eval()


def scripted():
    return torch.jit.script(nn.Linear(D, D))


REFUSED = {
    "scripted": (
        scripted,
        r"blocks\.0\.mlp \(RecursiveScriptModule\) is TorchScript.*measure the model with the Python",
    ),
    "quantized": (
        lambda: torch.ao.nn.quantized.dynamic.Linear(D, D),
        r"mlp \(Linear\) computes with whole numbers",
    ),
    "lazy": (
        lambda: nn.LazyLinear(D),
        r"blocks\.0\.mlp \(LazyLinear\) have no values yet: run the model on one batch",
    ),
    "lazy buffers": (nn.LazyBatchNorm1d, r"blocks\.0\.mlp \(LazyBatchNorm1d\) have no values yet"),
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Lazy modules")
def test_what_can_not_be_copied_is_refused(name, dry_run):
    make, message = REFUSED[name]
    with refused(message):
        tracker.measure(model_with(make), STATES, k=2, dry_run=dry_run)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_that_has_run_is_measured():
    model = model_with(lambda: nn.LazyLinear(D))
    model(STATES)
    assert tracker.measure(model, STATES, k=2).sizes["layer"] == 2


class Sparse(nn.Module):
    def __init__(self, layout, as_buffer):
        super().__init__()
        kept = torch.where(torch.rand(D, D) < 0.5, torch.randn(D, D), 0.0)
        self.layout = layout
        if layout is not torch.strided:
            kept = kept.to_sparse() if layout is torch.sparse_coo else kept.to_sparse_csr()
        if as_buffer:
            self.register_buffer("weight", kept)
        else:
            self.weight = nn.Parameter(kept)

    def forward(self, x):
        if self.layout is torch.strided:
            return F.linear(x, self.weight)
        return torch.sparse.mm(self.weight, x.reshape(-1, D).T).T.reshape(x.shape)


@pytest.mark.parametrize(
    ("layout", "as_buffer"), [(torch.sparse_coo, False), (torch.sparse_csr, True)]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_weights_are_measured_as_dense_ones(layout, as_buffer):
    dense, sparse = (
        model_with(lambda kind=kind: Sparse(kind, as_buffer)) for kind in (torch.strided, layout)
    )
    options = dict(k=2, keep="jacobian", dtype=torch.float64)
    seen, expected = (tracker.measure(model, INPUTS, **options) for model in (sparse, dense))
    np.testing.assert_allclose(seen.jacobian, expected.jacobian, atol=1e-12)
    costs = [
        tracker.measure(model, STATES, k=2, dry_run=True).peak_bytes for model in (sparse, dense)
    ]
    assert costs[0] > 0 and costs[1] > 0


def test_open_files_and_connections_are_the_callers(tmp_path):
    """A copy would fail, or close what it shares when it is deleted."""
    model = model_of().eval()
    expected = tracker.measure(model, STATES, k=2)
    first, second = multiprocessing.Pipe()
    with open(tmp_path / "log", "w") as file, socket.socket() as connection:
        model.held = [file, connection]
        model.blocks[0].file, model.blocks[0].connection = file, first
        seen = tracker.measure(model, STATES, k=2)
        file.write("open"), first.send("open")
        assert connection.fileno() >= 0 and second.recv() == "open"
    np.testing.assert_array_equal(seen.miscoupling, expected.miscoupling)
