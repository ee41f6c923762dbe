"""What a measurement claims of Jacobians and states, against what the model computes."""

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tests.support.brute_force import Truth, couplings
from tests.support.formulas import OF_PATHS

TOLERANCE = {"float64": (1e-10, 1e-8), "float32": (1e-5, 1e-5)}  # of Jacobians, of mis-couplings


def conditioning(s: Tensor, k: int) -> float:
    """Return how much more than an error in J a mis-coupling may err: singular vectors turn by error / gap (Wedin)."""
    return max(1.0, float((s[..., :1] / -s[..., : k + 1].diff()).max()) / 10)


def ends(truth: Truth) -> dict[str, bool]:
    """Return how names of variables end, and whether they count the final norm."""
    return {"": False} | ({"_normed": True} if truth.norm is not None else {})


def jacobian_error(ds: xr.Dataset, truth: Truth) -> float:
    """Return the largest difference of a kept Jacobian's entry, relative to its largest entry where that is above 1."""
    positions = ds.token_position.values[0].astype(int)
    J = torch.stack([truth.jacobians(token) for token in positions], 1)
    largest = J.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    return float(((torch.as_tensor(ds.jacobian.values) - J).abs() / largest).max())


def assert_jacobians(ds: xr.Dataset, truth: Truth):
    """Assert that kept Jacobians, singular values and mis-couplings are those of the blocks, without and with the final norm."""
    assert ds.diagnostics_complete.all()
    assert ("miscoupling_normed" in ds) == (truth.norm is not None)
    of_jacobians, of_couplings = TOLERANCE[ds.attrs["dtype"]]
    assert jacobian_error(ds, truth) <= of_jacobians
    for i, token in enumerate(ds.token_position.values[0].astype(int)):
        found = ds.isel(token=i)
        for end, normed in ends(truth).items():
            J = truth.jacobians(token, normed=normed)
            s = torch.linalg.svdvals(J)
            seen = torch.as_tensor(found[f"singular_value{end}"].values)
            of_values = (seen - s[..., : seen.shape[-1]]).abs().amax(-1) / s[..., 0].clamp(min=1)
            assert of_values.max() <= 10 * of_jacobians
            for k in ds.k.values.tolist():
                # Only in float32 do near-degenerate pairs cost digits that the tolerance does not leave.
                factor = conditioning(s, k) if ds.attrs["dtype"] == "float32" else 1
                for name, values in couplings(J, k).items():
                    scale = max(1, float(values.max())) if name == "offdiag" else 1
                    np.testing.assert_allclose(
                        found[f"{name}{end}"].sel(k=k), values, rtol=0, atol=factor * of_couplings * scale,
                        err_msg=name,
                    )  # fmt: skip


def assert_states(ds: xr.Dataset, truth: Truth):
    """Assert that lengths of states, and their directions by the line-shape score, are those of the path of each token."""
    for end, normed in ends(truth).items():
        paths = truth.paths(normed).transpose(1, 2)
        for name in ("norm", "lss"):
            expected = [[OF_PATHS[name](path.numpy()) for path in of_one] for of_one in paths]
            found = ds[f"{name}{end}"].transpose("prompt", "position", ...)
            np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9, err_msg=name)
