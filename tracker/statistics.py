"""From labelled results to curves: what is averaged, over what, and the spread that goes with it.

A curve point of a coupling measure is, for each prompt and token, the mean over layer pairs of one choice

    mean            all pairs, the trivial diagonal included (the paper's)
    mean_offdiag    l != l'  (the headline)
    mean_adjacent   |l - l'| = 1

and over prompts and tokens their mean and quartiles. Its null level is averaged over the same pairs, as 0 on the
diagonal. Trajectory measures: median and quartiles over prompts and positions.
W&B, the figures and the page all draw these numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from tracker.coupling import MEASURES, depth_means

PAIRS = ("mean", "mean_offdiag", "mean_adjacent")
TRAJECTORY = (
    "lss",
    "expodistance",
    "expodistance_raw",
    "alpha_mean",
    "alpha_mean_raw",
    "equidistance",
    "equidistance_raw",
)
QUANTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


def curves(results: xr.Dataset, measures: Sequence[str] = MEASURES) -> xr.Dataset:
    """Curve points of a Dataset, with or without a `step` dimension.

    Args:
        measures: the coupling measures wanted, of those that the results have.

    Returns:
        For each coupling measure `m`: `m` (k, pairs), `m_q25`, `m_q75`, `m_null`; for each trajectory measure `t`: `t`
        (statistic: q25, median, q75). Scores are passed on.
    """
    # In float64, so that one step alone and the same step among others give the same sum.
    results = results.map(
        lambda values: values.astype(np.float64) if values.dtype == np.float32 else values, keep_attrs=True
    )
    out: dict[str, xr.DataArray] = {}
    for name in measures:
        if name in results:
            by_prompt = over_pairs(results[name])
            out[name] = by_prompt.mean(("prompt", "token"))
            spread = quartiles(by_prompt, ("prompt", "token"))
            for q in ("q25", "q75"):
                out[f"{name}_{q}"] = spread.sel(statistic=q, drop=True)
            out[f"{name}_null"] = over_pairs(null_matrix(results, name)).mean(("prompt", "token"))
    for name in TRAJECTORY:
        if name in results:
            out[name] = quartiles(results[name], ("prompt", "position"))
    if "score" in results:
        out["score"] = results["score"]
    return xr.Dataset(out).transpose("step", ..., missing_dims="ignore")


def quartiles(values: xr.DataArray, over: tuple[str, ...]) -> xr.DataArray:
    """Quartiles over the given dimensions, along `statistic`; NaN where there is no value at all."""
    there = values.notnull().any(over)
    spread = values.where(there, 0.0).quantile(list(QUANTILES.values()), over, skipna=True)
    return spread.rename(quantile="statistic").assign_coords(statistic=list(QUANTILES)).where(there)


def null_matrix(results: xr.Dataset, name: str) -> xr.DataArray:
    """The null level of every layer pair that has a value: that of the block described; 0 on the trivial diagonal."""
    measured = results[name]
    off_diagonal = measured["layer"] != measured["layer_other"]
    null = xr.where(off_diagonal, results[f"{name}_null"], 0.0)
    return null.where(measured.notnull()).transpose(*measured.dims)


def suspect(results: xr.Dataset) -> np.ndarray:
    """Why each step is doubted to be what its name says; "" where it is not, or where nobody has looked."""
    reasons = results.coords["suspect"].values if "suspect" in results.coords else ""
    return np.broadcast_to(np.asarray(reasons, dtype=object), results["step"].shape)


def over_pairs(matrices: xr.DataArray) -> xr.DataArray:
    """Means over layer pairs: dimensions (layer, layer_other) become `pairs`."""

    def means(values: np.ndarray) -> np.ndarray:
        return np.stack([m.numpy() for m in depth_means(torch.from_numpy(values)).values()], -1)

    reduced = xr.apply_ufunc(means, matrices, input_core_dims=[["layer", "layer_other"]], output_core_dims=[["pairs"]])
    return reduced.assign_coords(pairs=list(PAIRS))


def by_distance(matrices: xr.DataArray) -> xr.DataArray:
    """Mean over the layer pairs at each distance |l - l'| = 1 .. L - 1."""
    L = matrices.sizes["layer"]
    l = np.arange(L)
    distance = xr.DataArray(abs(l[:, None] - l), dims=("layer", "layer_other"))
    rings = [matrices.where(distance == r).mean(("layer", "layer_other")) for r in range(1, L)]
    return xr.concat(rings, xr.IndexVariable("distance", np.arange(1, L)))


def scalars(unit: xr.Dataset) -> dict[str, float]:
    """The curve points of one step, flat, under the names they have in W&B and every other log."""
    points = curves(unit)
    flat: dict[str, float] = {}
    for name in points.data_vars:
        for labels, value in _entries(points[name]):
            flat["/".join([_group(str(name)), *labels])] = value
    return flat


def _entries(values: xr.DataArray) -> list[tuple[list[str], float]]:
    if not values.dims:
        return [([], float(values))]
    dim = values.dims[0]
    return [
        ([f"k{label}" if dim == "k" else str(label), *labels], value)
        for label in values[dim].values
        for labels, value in _entries(values.sel({dim: label}))
    ]


def _group(name: str) -> str:
    if name.startswith(MEASURES):
        return f"coupling/{name}"
    return name if name == "score" else f"trajectory/{name}"
