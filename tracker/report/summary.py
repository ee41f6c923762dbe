"""What the page needs of one unit of results: everything averaged over prompts but what is shown of each prompt.

A unit of a large model holds coupling matrices of every prompt; its summary is a hundredth of that, so that a whole walk's
fits in memory. A Dataset with a `step` dimension gives the same numbers.
"""

from collections.abc import Hashable

import numpy as np
import xarray as xr

from tracker.analysis.statistics import (
    compared_tokens,
    curves,
    largest_singular_values,
    middle_layers,
    null_matrix,
    over_pairs,
    quartiles,
)
from tracker.measures.registry import KINDS, MISCOUPLINGS, VARIANTS

SAMPLES = ("prompt", "token")
PAIRS = ("layer", "layer_other")
TOKEN_PAIRS = ("pair_token", "pair_token_other")
BY_DEPTH = (
    "norm_raw",
    "norm",
    "lss_window",
    "expodistance_raw_window",
    "expodistance_window",
    "equidistance_raw_window",
    "equidistance_window",
    "entropy",
)
RANKS = (1, 2, 5, 10, 20, 30, 50)
PATHS = 48  # tokens whose path on the principal plane is drawn
PROVEN = ("residual", "value_error", "derivative_error")  # of each Jacobian, how far its proof was off
KEPT = ("undefined", "score")


def summary(results: xr.Dataset) -> xr.Dataset:
    """Of one unit, or of several along `step`.

    Returns:
        The curve points of `statistics.curves`, and for each of `registry.VARIANTS`, m: `m_matrix` (k,
        layer, layer_other) and `m_level` (k, layer), means over prompts and tokens; `m_by_prompt` and `m_null_by_prompt`
        (k, prompt), means over l != l'. By depth: quartiles. Attributes and coordinates are kept.
    """
    with_swapped = results.assign(
        {f"{name}_vju_null": results[f"{name}_null"] for name in MISCOUPLINGS if f"{name}_vju" in results}
    )
    points = curves(with_swapped, VARIANTS)
    found = dict(points.data_vars)
    for name in (name for name in points.data_vars if f"{name}_null" in points):
        matrices = with_swapped[name].astype(float)
        found[f"{name}_matrix"] = matrices.mean(SAMPLES)
        found[f"{name}_level"] = with_swapped[f"{name}_null"].astype(float).mean(SAMPLES)
        for end, values in (("by_prompt", matrices), ("null_by_prompt", null_matrix(with_swapped, str(name)))):
            found[f"{name}_{end}"] = over_pairs(values.astype(float)).sel(pairs="mean_offdiag", drop=True).mean("token")
    for name in BY_DEPTH:
        if name in results:
            found[f"{name}_by_depth"] = quartiles(results[name].astype(float), ("prompt", "position"))
    if "singular_value" in results:
        ranks = [rank for rank in RANKS if rank <= results.sizes["rank"]]
        found["singular"] = results["singular_value"].sel(rank=ranks).astype(float).median(SAMPLES)
    if "matrix" in results:
        found["absolute"] = abs(results["matrix"]).mean(SAMPLES)
    found |= _tokenwise(results) | _states(results) | _certificates(results)
    found |= {name: results[name] for name in KEPT if name in results}
    kept = xr.Dataset(found).assign_coords(
        {name: c for name, c in results.coords.items() if _fits(c, found) or name == "prompt_text"}
    )
    return kept.assign_attrs(results.attrs)


def _tokenwise(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Of each kind and measure: matrices over tokens by block, and their mean over token pairs and blocks with its quartiles.

    |A| is of the middle block, in units of the largest singular value of the Jacobian described.
    """
    found: dict[Hashable, xr.DataArray] = {}
    kinds = [kind for kind in KINDS if f"{kind}_{MISCOUPLINGS[0]}" in results]
    for kind in kinds:
        for name in (name for name in MISCOUPLINGS if f"{kind}_{name}" in results):
            matrices = results[f"{kind}_{name}"].astype(float)
            compared = compared_tokens(results)
            null = results[f"{kind}_{name}_null"].astype(float).where(compared & matrices.notnull())
            found[f"{kind}_{name}_matrix"] = matrices.mean("prompt")
            by_prompt = matrices.where(compared).mean(("layer", *TOKEN_PAIRS))
            found[f"{kind}_{name}"] = by_prompt.mean("prompt")
            found[f"{kind}_{name}_spread"] = quartiles(by_prompt, ("prompt",))
            found[f"{kind}_{name}_null"] = null.mean(("layer", *TOKEN_PAIRS)).mean("prompt")
        if f"{kind}_matrix" in results:
            A = abs(results[f"{kind}_matrix"]) / largest_singular_values(results, kind)
            found[f"{kind}_absolute"] = A.sel(layer=middle_layers(results)[0], drop=True).mean("prompt")
    if kinds:
        found["pair_position"] = results["pair_position"]
    return found


def _states(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Prompts' lengths, the first prompt's paths on its principal plane, and the response to noise."""
    found: dict[Hashable, xr.DataArray] = {}
    if "norm_raw" in results:
        found["length"] = results["norm_raw"].isel(depth=0, drop=True).notnull().sum("position")
    if "pca" in results:
        plane = results["pca"].isel(prompt=0, drop=True)
        others = set(plane.dims) - {"position"}
        at = np.flatnonzero(plane.notnull().all(others).values)
        chosen = at[np.unique(np.linspace(0, len(at) - 1, min(PATHS, len(at))).round().astype(int))] if len(at) else at
        found["plane"] = plane.isel(position=chosen)
    if "noise_similarity" in results:
        ends = results["noise_similarity"].sel(depth=[1, int(results["depth"][-1])])
        found["similarity"] = ends.astype(float).mean("position").mean("prompt").rename(depth="end")
    return {
        name: values.rename(position="path") if "position" in values.dims else values for name, values in found.items()
    }


def _certificates(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """How the Jacobians of each block were found, and how well they are proven."""
    if "residual" not in results:
        return {}
    there = results["residual"].notnull()
    counts = {"jacobians": there, **{name: (results[name] == 1) & there for name in ("sliced", "complete", "formed")}}
    found: dict[Hashable, xr.DataArray] = {f"{name}_count": values.sum(SAMPLES) for name, values in counts.items()}
    return found | {f"{name}_max": results[name].max((*SAMPLES, "layer")) for name in PROVEN}


def _fits(coordinate: xr.DataArray, found: dict[Hashable, xr.DataArray]) -> bool:
    sizes = {dim: size for values in found.values() for dim, size in values.sizes.items()}
    return all(sizes.get(dim) == size for dim, size in coordinate.sizes.items())
