"""Agreement of coupling measurements: between two methods, and with the published algorithm."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor


def certificate(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise the certificates of the singular vectors and the ways in which the Jacobians were computed."""
    return {
        "residual": float(dataset["diagnostics_residual"].max()),
        "complete": bool(dataset["diagnostics_complete"].all()),
        "full_svd": float(dataset["diagnostics_full_svd"].mean()),
        "sliced": float(dataset["diagnostics_sliced"].mean()),
        "smallest_gap": float(dataset["diagnostics_singular_gap"].min()),
    }


def differences(dataset: "xr.Dataset", other: "xr.Dataset") -> dict[str, float]:
    """Return the largest difference of each mis-coupling and, relative to s_1, of the singular values."""
    from tracker.measures.registry import MISCOUPLINGS

    largest = {name: float(abs(dataset[name] - other[name]).max()) for name in MISCOUPLINGS}
    s, t = dataset["singular_value"], other["singular_value"]
    return largest | {"singular_value": float((abs(s - t) / s.isel(rank=0)).max())}


def errors(
    dataset: "xr.Dataset", J: "list[Tensor]", expected: "Tensor", s: "Tensor", by_name: dict
) -> dict[str, float]:
    """Return the largest differences from the published algorithm for the first prompt; both are computed in float32."""
    import torch

    first = dataset.isel(prompt=0, token=0, k=0)
    measured = torch.from_numpy(first["singular_value"].values).to(s)
    norm = torch.linalg.matrix_norm
    largest = {"singular_value": float(((measured - s).abs() / s[:, :1]).max())}
    if J:
        largest["jacobian"] = float((norm(torch.stack(J) - expected) / norm(expected)).max())
    for name, values in by_name.items():
        largest[name] = float((torch.from_numpy(first[name].values) - values).abs().max())
    return largest
