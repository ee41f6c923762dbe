"""Singular triplets on the device: planted spectra, and every method and precision against float64 on the CPU."""

import copy

import pytest
import torch

import tracker
from tests.support.accelerators import DEVICES, on_each
from tests.support.models import Size, build
from tests.support.spectra import FALLING, FLAT, flat, planted, top_singular_triplets
from tracker.linalg.svd import TOLERANCE, residual
from tracker.measures.registry import MISCOUPLINGS

SPECTRA = {"falling": FALLING, "flat": FLAT, "wide": flat(600)}
METHODS = ("full", "krylov")
# The largest errors allowed of singular values, relative to s_1, and of mis-couplings.
BOUNDS = {"float32": (1e-5, 1e-3), "tf32": (2e-3, 2e-2), "bfloat16": (1e-2, 0.1)}


@pytest.mark.parametrize("method", ["full", "krylov"])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@DEVICES
def test_values_vectors_and_certificate(accelerator, dtype, spectrum, method, record_property):
    s = SPECTRA[spectrum]
    exact = planted(s)
    J = exact.to(dtype).to(accelerator.device).expand(3, -1, -1).contiguous()
    t = top_singular_triplets(J, 10, method)
    assert t.U.device == t.S.device == t.V.device == J.device and t.U.dtype == dtype
    error = float((t.S.cpu().double() - s[:10]).abs().max())
    of_vectors = residual(exact, *(x.cpu().double() for x in (t.U, t.S, t.V)))
    record_property("error", error)
    record_property("residual", float(of_vectors.max()))
    assert error < 300 * torch.finfo(dtype).eps and bool((of_vectors < 2 * TOLERANCE[dtype]).all())
    assert bool(t.complete.all()) and float(t.residual.max()) <= TOLERANCE[dtype]
    assert bool(t.full.all()) == (method == "full")


CASES = [(method, precision) for method in METHODS for precision in BOUNDS]


@pytest.mark.parametrize(
    "accelerator, method, precision", on_each(pretend=CASES, cuda=CASES), indirect=["accelerator"]
)
def test_methods_and_precisions(accelerator, method, precision, record_property):
    model, inputs = build("gpt_neox", Size(width=accelerator.size.width * 2, depth=2, tokens=8))
    options = {"k": 5, "measures": "coupling", "final_norm": "exclude"}
    exact = tracker.measure(copy.deepcopy(model), inputs, svd="full", dtype="float64", **options)
    seen = tracker.measure(
        model.to(accelerator.device), inputs, svd=method, precision=precision, **options
    )
    s = exact.singular_value
    value_error = float((abs(seen.singular_value - s) / s.isel(rank=0)).max())
    errors = {name: float(abs(seen[name] - exact[name]).max()) for name in MISCOUPLINGS}
    record_property("singular_value", value_error)
    for name, error in errors.items():
        record_property(name, error)
    of_values, of_couplings = BOUNDS[precision]
    assert value_error < of_values
    assert max(errors["miscoupling"], errors["offdiag_normalized"]) < of_couplings
    assert bool(seen.diagnostics_complete.all()) and bool(seen.diagnostics_sliced.all())
    if precision == "bfloat16" or (precision == "tf32" and accelerator.device.type == "cuda"):
        assert value_error > 1e-6, "the products were computed in float32"
