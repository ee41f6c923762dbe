"""Reduce a unit of results to what the page and summaries show: means and quartiles, and a few values of each prompt.

A unit of a large model has coupling matrices of every prompt; reduced it has a hundredth of the size, so that the units of a
whole walk fit in memory. A Dataset with a `step` dimension gives the same values.
"""

from collections.abc import Hashable

import numpy as np
import xarray as xr

from tracker.analysis.null_levels import null_level
from tracker.analysis.statistics import (
    CURVES,
    curves,
    middle_layers,
    over_pairs,
    points_of_layer_pairs,
    quartiles,
)
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import KINDS, MEASURES, MISCOUPLINGS, UNDEFINED, VARIANTS

SAMPLES = ("prompt", "token")
PAIRS = ("layer", "layer_other")
RANKS = (1, 2, 5, 10, 20, 30, 50)
PATHS = 48  # tokens whose path on the principal plane is drawn
CHECKED = ("residual", "value_error", "derivative_error")  # the errors of each Jacobian's checks
KEPT = (UNDEFINED, "score")
OF_PATHS = ("lss", "expodistance", "alpha_mean")


def reduced(results: xr.Dataset) -> xr.Dataset:
    """Reduce one unit, or several along `step`.

    Returns:
        The curve points of `statistics.curves`, of all measures. For each m of `registry.VARIANTS`: `m_matrix` and `m_level` (k,
        layer, layer_other), the null level, means over prompts and tokens; `m_coupling` (k, pairs, prompt), the null level minus
        the mis-coupling, means over tokens. For each of `OF_PATHS`: `m_by_prompt`, medians over positions. For each
        measure by depth: `m_by_depth`, quartiles. Attributes and coordinates are kept.
    """
    # The null levels of layer pairs take most of the time: they are computed once, below.
    found: dict[Hashable, xr.DataArray] = dict(curves(results, [n for n in CURVES if n not in VARIANTS]).data_vars)
    for name in (name for name in VARIANTS if name in results):
        matrices, levels = results[name].astype(float), null_level(results, name)
        found[f"{name}_matrix"], found[f"{name}_level"] = matrices.mean(SAMPLES), levels.mean(SAMPLES)
        by_prompt, null = over_pairs(matrices), over_pairs(levels)
        found |= {f"{name}{part}": values for part, values in points_of_layer_pairs(by_prompt, null).items()}
        found[f"{name}_coupling"] = (null - by_prompt).mean("token")
    for name in (name for name in OF_PATHS if name in results):
        found[f"{name}_by_prompt"] = results[name].astype(float).median("position")
    for measure in (measure for measure in MEASURES if measure.by_depth and measure.name in results):
        samples = ("prompt", "token" if "token" in measure.dims else "position")
        found[f"{measure.name}_by_depth"] = quartiles(results[measure.name].astype(float), samples)
    if "singular_value" in results:
        ranks = [rank for rank in RANKS if rank <= results.sizes["rank"]]
        found["singular_value_median"] = results["singular_value"].sel(rank=ranks).astype(float).median(SAMPLES)
    if "matrix" in results:
        found["matrix_absolute"] = abs(results["matrix"]).mean(SAMPLES)
    found |= {  # of the first prompt at its first measured token
        measure.name: results[measure.name].isel(prompt=0, token=0, drop=True)
        for measure in MEASURES
        if measure.option == "directions" and measure.name in results
    }
    found |= _tokenwise(results) | _states(results) | _certificates(results)
    found |= {name: results[name] for name in KEPT if name in results}
    kept = xr.Dataset(found).assign_coords(
        {name: c for name, c in results.coords.items() if _fits(c, found) or name == "prompt_text"}
    )
    return kept.assign_attrs(results.attrs)


def _tokenwise(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Average over prompts the matrices over token pairs of each block, and |A| of the middle block.

    |A| is in units of the largest singular value of the Jacobian.
    """
    found: dict[Hashable, xr.DataArray] = {}
    for measure in MEASURES:
        if measure.option == "tokenwise" and measure.base in MISCOUPLINGS and measure.name in results:
            found[f"{measure.name}_matrix"] = results[measure.name].astype(float).mean("prompt")
    for kind in (kind for kind in KINDS if f"{kind}_matrix" in results):
        A = abs(results[f"{kind}_matrix"]) / results[f"{kind}_singular_value"].sel(rank=1, drop=True)
        found[f"{kind}_absolute"] = A.sel(layer=middle_layers(results)[0], drop=True).mean("prompt")
    if "pair_position" in results:
        found["pair_position"] = results["pair_position"]
    return found


def _states(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Return the prompts' lengths, the first prompt's paths on its principal plane, and the response to noise."""
    found: dict[Hashable, xr.DataArray] = {}
    if "norm" in results:
        found["length"] = results["norm"].isel(depth=0, drop=True).notnull().sum("position")
    if "pca" in results:
        plane = results["pca"].isel(prompt=0, drop=True)
        others = set(plane.dims) - {"position"}
        at = np.flatnonzero(plane.notnull().all(others).values)
        chosen = at[np.unique(np.linspace(0, len(at) - 1, min(PATHS, len(at))).round().astype(int))] if len(at) else at
        found["pca_paths"] = plane.isel(position=chosen)
    if "noise_similarity" in results:
        ends = results["noise_similarity"].sel(depth=[1, int(results["depth"][-1])])
        found["noise_similarity_ends"] = ends.astype(float).mean("position").mean("prompt").rename(depth="end")
    return {
        name: values.rename(position="path") if "position" in values.dims else values for name, values in found.items()
    }


def _certificates(results: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Count by block how the Jacobians were computed, and take the largest errors of their checks."""
    if f"{DIAGNOSTICS}residual" not in results:
        return {}
    checks = {name: results[f"{DIAGNOSTICS}{name}"] for name in (*CHECKED, "sliced", "complete", "formed")}
    there = checks["residual"].notnull()
    counts = {"jacobians": there, **{name: (checks[name] == 1) & there for name in ("sliced", "complete", "formed")}}
    found: dict[Hashable, xr.DataArray] = {f"{name}_count": values.sum(SAMPLES) for name, values in counts.items()}
    return found | {f"{name}_max": checks[name].max((*SAMPLES, "layer")) for name in CHECKED}


def _fits(coordinate: xr.DataArray, found: dict[Hashable, xr.DataArray]) -> bool:
    sizes = {dim: size for values in found.values() for dim, size in values.sizes.items()}
    return all(sizes.get(dim) == size for dim, size in coordinate.sizes.items())
