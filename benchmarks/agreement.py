"""The certificate of a coupling measurement, and its agreement with the published algorithm."""

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
