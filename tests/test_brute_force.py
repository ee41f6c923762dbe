"""Measurements against brute force, on every architecture of the first whole, in both precisions."""

import numpy as np
import pytest
import torch

import tracker
from tests import brute_force
from tests.models import MODELS, build
from tracker.blocks import find_blocks
from tracker.replica import Replica, record, undisturbed
from tracker.rows import Jacobians, Rows

K = 6
J_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
M_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


@torch.no_grad()
def conditioning(J, k):
    """How much more than an error in J a mis-coupling may err: singular vectors turn by error / gap (Wedin)."""
    S = torch.stack([torch.linalg.svdvals(matrix) for matrix in J])[:, : k + 1]
    return max(1.0, float((S[:, :1] / -S.diff()).max()) / 10)


def oracle(name, dtype):
    model, inputs = build(name)
    model = model.to(dtype).eval()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    found = find_blocks(model)
    norm = {"bert": None}.get(name, next((model.get_submodule(n) for n in found.final_norms), None))
    norm = norm if found.include_final_norm else None
    blocks = [model.get_submodule(n) for n in found.names]
    return model, inputs, brute_force.run(model, inputs, blocks, norm, found.batch_first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_jacobians(name, dtype):
    model, inputs, expected = oracle(name, dtype)
    n = expected.inputs[0].shape[1]
    samples, tokens = torch.tensor([0, 0, 1, 1]), torch.tensor([0, n - 1, n // 2, n - 1])
    device = torch.device("cpu")
    with undisturbed(device):
        replica = Replica(model, find_blocks(model), dtype, device)
        recording = record(
            replica, (inputs,), {"use_cache": False} if hasattr(model, "config") and name != "bert" else {}
        )
        if expected.norm is not None:
            recording = recording.fold_final_norm()
        jacobians = Jacobians()
        for l, call in enumerate(recording.calls):
            J, evidence = jacobians(call, Rows(samples, tokens))
            assert evidence.sliced, evidence.reason
            for r, (b, t) in enumerate(zip(samples, tokens, strict=True)):
                truth = expected.jacobian(l, int(b), int(t), int(t))
                assert (J[r] - truth).abs().max() <= J_TOLERANCE[dtype] * truth.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_measure(name, dtype):
    model, inputs, expected = oracle(name, dtype)
    ds = tracker.measure(model, inputs, k=[2, K], tokens=[0, -1], dtype=dtype)
    assert ds.sliced.all() and ds.complete.all()
    n = expected.inputs[0].shape[1]
    for b in range(len(inputs)):
        for t, position in enumerate((0, n - 1)):
            J = [expected.jacobian(l, b, position, position) for l in range(len(expected.blocks))]
            for k in (2, K):
                # Only in float32 do near-degenerate pairs cost digits that the tolerance does not leave.
                factor = conditioning(J, k) if dtype == torch.float32 else 1
                for measure, truth in brute_force.couplings(J, k).items():
                    seen = ds[measure].sel(k=k).isel(prompt=b, token=t).values
                    scale = 1 if measure != "offdiag" else max(1, float(truth.max()))
                    np.testing.assert_allclose(seen, truth, rtol=0, atol=factor * M_TOLERANCE[dtype] * scale)
