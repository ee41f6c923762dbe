"""Measurements that are the same."""

from collections.abc import Iterable

import numpy as np
import xarray as xr

DERIVATIVE_ERROR = "diagnostics_derivative_error"


def assert_same(
    found: xr.Dataset,
    expected: xr.Dataset,
    names: Iterable[str],
    rtol: float = 0.0,
    atol: float = 0.0,
):
    """Assert that two measurements have the same values in these variables, to the last bit or within a tolerance."""
    for name in names:
        value, other = found[name].values, expected[name].values
        if other.dtype.kind == "f":
            np.testing.assert_allclose(value, other, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(value, other, err_msg=name)


def assert_same_units(a: xr.Dataset, b: xr.Dataset, tolerance: float = 0.0):
    """Assert that two units have the same values in all variables, except for the rounding errors that they report."""
    assert set(a.data_vars) == set(b.data_vars)
    errors = ("diagnostics_residual", "diagnostics_value_error", DERIVATIVE_ERROR)
    names = [name for name in a.data_vars if not name.startswith(errors)]
    assert_same(a, b, names, tolerance, tolerance)
