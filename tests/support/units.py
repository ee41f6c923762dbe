"""Units that are the same, except for the rounding errors that they report."""

import numpy as np
import xarray as xr

DERIVATIVE_ERROR = "diagnostics_derivative_error"


def assert_same_units(a: xr.Dataset, b: xr.Dataset, tolerance: float = 0.0):
    assert set(a.data_vars) == set(b.data_vars)
    for name in a.data_vars:
        # Rounding errors
        if name.startswith(("diagnostics_residual", "diagnostics_value_error", DERIVATIVE_ERROR)):
            continue
        if a[name].dtype == object:  # texts
            np.testing.assert_array_equal(a[name].values, b[name].values, err_msg=name)
            continue
        np.testing.assert_allclose(
            a[name].values, b[name].values, rtol=tolerance, atol=tolerance, err_msg=name
        )
