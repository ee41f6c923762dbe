"""Measurements of every architecture on the device against the CPU in float64."""

import copy

import numpy as np
import pytest

import tracker
from tests.support.accelerators import on_each
from tests.support.models import FAMILIES, build

# The largest errors allowed, relative to the largest value. In float64 the families' own float32 (softmax, rotary
# positions) remains; logarithms of small singular values enlarge it.
BOUNDS = {"float64": 1e-4, "float32": 5e-3}
CHECKS = (
    "diagnostics_residual",
    "diagnostics_value_error",
    "diagnostics_derivative_error",
    "diagnostics_independent_error",
)  # rounding errors themselves
CASES = [(name,) for name in FAMILIES]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "accelerator, name",
    on_each(pretend=[("gpt_neox",)], cuda=CASES),
    indirect=["accelerator"],
)
def test_every_measure_equals_that_of_the_cpu(accelerator, name, dtype, record_property):
    model, inputs = build(name)
    exact = tracker.measure(
        copy.deepcopy(model), inputs, k=4, measures="all,tokenwise", dtype="float64"
    )
    seen = tracker.measure(
        model.to(accelerator.device), inputs, k=4, measures="all,tokenwise", dtype=dtype
    )
    assert set(seen.data_vars) == set(exact.data_vars)
    errors = {}
    for variable in exact.data_vars:
        a, b = exact[variable].values, seen[variable].values
        if str(variable).removesuffix("_normed") in CHECKS or a.dtype.kind not in "fiub":
            continue
        if variable == "noise_similarity" and dtype == "float32":  # of other noise
            continue
        # A pair of singular vectors has a common sign, free to choose
        if str(variable).endswith("matrix"):
            a, b = abs(a), abs(b)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=str(variable))
        errors[variable] = float(
            np.nanmax(abs(a.astype(float) - b), initial=0) / np.nanmax(abs(a), initial=1)
        )
    worst = max(errors, key=lambda variable: errors[variable])
    record_property(str(worst), errors[worst])
    assert errors[worst] < BOUNDS[dtype], worst
    assert seen.diagnostics_complete.all()
