"""Reduce a unit of results to what the page and summaries show: means and quartiles, and a few values of each prompt.

A unit of a large model has coupling matrices of every prompt; reduced it has a hundredth of the size, so that the units of a
whole walk fit in memory. A Dataset with a `step` dimension gives the same values.

`read_miscouplings` reads the mis-couplings of a store without its other variables: a grid of trainings has a thousand units.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr

from tracker.analysis.curves import (
    CURVES,
    SAMPLES,
    curves,
    middle_layers,
    points_of_layer_pairs,
)
from tracker.analysis.null_levels import READ, levels
from tracker.analysis.pairs import counted_pairs
from tracker.analysis.variables import (
    coordinates,
    evenly_spaced,
    gathered,
    in_float64,
    mean,
    median,
    over_pairs,
    quantiles,
    quartiles,
)
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import KINDS, MEASURES, MISCOUPLINGS, UNDEFINED, VARIANTS
from tracker.store import Store, join, require_steps

RANKS = (1, 2, 5, 10, 20, 30, 50)
PATHS = 48  # tokens whose path on the principal plane is drawn
CHECKED = ("residual", "value_error", "derivative_error")  # the errors of each Jacobian's checks
KEPT = (UNDEFINED, "score")
PERCENTILES = [percent / 100 for percent in range(101)]
IN_SUMMARY = tuple(measure.name for measure in MEASURES if measure.summary)


def reduced(results: xr.Dataset) -> xr.Dataset:
    """Reduce one unit, or several along `step`.

    Returns:
        The curve points of `curves.curves`, of all measures. For each m of `registry.VARIANTS`: `m_matrix` and `m_level` (k,
        layer, layer_other), the null level, means over prompts and tokens; `m_coupling_by_prompt` (k, pairs, prompt), the
        null level minus the mis-coupling, means over tokens. For each of `IN_SUMMARY` what the interval of its median needs:
        `m_below` (prompt), how many values of a prompt are below the median beyond half of them, relative to the mean number of
        values of prompts that have any, and `m_percentiles`. For each measure by depth: `m_by_depth`, quartiles. Attributes and
        coordinates are kept.
    """
    # The null levels of layer pairs take most of the time: they are computed once, below.
    summary = _variables(curves(results, [n for n in CURVES if n not in VARIANTS]))
    measured = [name for name in VARIANTS if name in results]
    counted = counted_pairs(results) if measured else None
    for name in measured:
        assert counted is not None
        matrices, null = in_float64(results, name), levels(results, name)
        summary[f"{name}_matrix"] = mean(matrices, SAMPLES)
        summary[f"{name}_level"] = mean(null, SAMPLES)
        by_prompt, null = over_pairs(matrices, counted), over_pairs(null, counted)
        for part, values in points_of_layer_pairs(by_prompt, null).items():
            summary[f"{name}{part}"] = values
        summary[f"{name}_coupling_by_prompt"] = mean(null - by_prompt, ["token"])
    for name in IN_SUMMARY:
        if name in results:
            for part, values in _of_median(in_float64(results, name)).items():
                summary[f"{name}{part}"] = values
    for measure in MEASURES:
        name = measure.name
        if measure.by_depth and name in results:
            samples = ("prompt", "token" if "token" in measure.dims else "position")
            summary[f"{name}_by_depth"] = quartiles(in_float64(results, name), samples)
    # Signs of singular vectors are arbitrary, so entries of A differ in sign between prompts.
    if "matrix" in results:
        summary["matrix_absolute"] = mean(abs(results.variables["matrix"]), SAMPLES)
    summary |= _tokenwise(results) | _certificates(results)
    summary |= {name: results.variables[name] for name in KEPT if name in results}
    parts = [_singular_values(results), _states(results)]
    for part in parts:
        summary |= _variables(part)
    coords = coordinates(summary.values(), results)
    if "prompt_text" in results.coords:
        coords["prompt_text"] = results.variables["prompt_text"]
    for part in parts:
        coords |= {str(name): values for name, values in part.coords.variables.items()}
    return xr.Dataset(summary, coords, results.attrs)


def read_reduced(
    directory: str | Path, leave_out: Callable[[int, OSError | ValueError], None] | None = None
) -> xr.Dataset:
    """Return the results of a store along `step`, `reduced` unit by unit.

    Args:
        leave_out: as in `Store.curves`.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a unit is damaged, or the units make no curve.
    """
    store = Store(directory)
    return join([*map(reduced, store.curves(require_steps(store), leave_out))], store.path)


def _of_median(values: xr.Variable) -> dict[str, xr.Variable]:
    within = [str(dim) for dim in values.dims if dim not in ("step", "prompt")]
    over, defined = ("prompt", *within), values.notnull()
    middle = median(values, over)
    # A value at the median counts half: below and above then have half of all values each.
    below = ((values < middle) + 0.5 * (values == middle) - 0.5).where(defined).sum(within)
    number = defined.sum(within)
    prompts = (number > 0).sum("prompt")
    # The mean over prompts is the share below the median less a half, though prompts have different lengths.
    shares = below * prompts / number.sum("prompt").where(prompts > 0)
    return {
        "_below": shares.where(number > 0),
        "_percentiles": quantiles(values, over, PERCENTILES, "percentile"),
    }


def _variables(part: xr.Dataset) -> dict[str, xr.Variable]:
    return {str(name): part.variables[name] for name in part.data_vars}


def _singular_values(results: xr.Dataset) -> xr.Dataset:
    """Return the median singular values at `RANKS`."""
    if "singular_value" not in results:
        return xr.Dataset()
    at = [rank - 1 for rank in RANKS if rank <= results.sizes["rank"]]
    values = median(in_float64(results, "singular_value").isel(rank=at), SAMPLES)
    return xr.Dataset(
        {"singular_value_median": values}, {"rank": results.variables["rank"].isel(rank=at)}
    )


def _tokenwise(results: xr.Dataset) -> dict[str, xr.Variable]:
    """Average over prompts the matrices over token pairs of each block, and |A| of the middle block.

    |A| is in units of the largest singular value of the Jacobian.
    """
    summary: dict[str, xr.Variable] = {}
    for measure in MEASURES:
        of_tokens = measure.option == "tokenwise" and measure.base in MISCOUPLINGS
        if of_tokens and measure.name in results:
            summary[f"{measure.name}_matrix"] = mean(in_float64(results, measure.name), ["prompt"])
    for kind in (kind for kind in KINDS if f"{kind}_matrix" in results):
        middle = results["layer"].values.tolist().index(middle_layers(results)[0])
        A, s = (
            results.variables[f"{kind}_{name}"].isel(layer=middle)
            for name in ("matrix", "singular_value")
        )
        summary[f"{kind}_absolute"] = mean(abs(A) / s.isel(rank=0), ["prompt"])
    if "pair_position" in results:
        summary["pair_position"] = results.variables["pair_position"]
    return summary


def _states(results: xr.Dataset) -> xr.Dataset:
    """Return the prompts' lengths, the first prompt's paths on its principal plane, and the response to noise."""
    summary: dict[str, xr.Variable] = {}
    coords: dict[str, xr.Variable] = {}
    if "norm" in results:
        summary["length"] = results.variables["norm"].isel(depth=0).notnull().sum("position")
    if "pca" in results:
        plane = results.variables["pca"].isel(prompt=0)
        at = np.flatnonzero(
            plane.notnull().all([dim for dim in plane.dims if dim != "position"]).values
        )
        chosen = at[evenly_spaced(len(at), PATHS)]
        summary["pca_paths"] = _renamed(plane.isel(position=chosen), "position", "path")
        coords["path"] = _renamed(
            results.coords.variables["position"].isel(position=chosen), "position", "path"
        )
    if "noise_similarity" in results and results.sizes["depth"] > 1:
        ends = in_float64(results, "noise_similarity").isel(depth=[1, -1])
        summary["noise_similarity_ends"] = _renamed(
            mean(mean(ends, ["position"]), ["prompt"]), "depth", "end"
        )
        coords["end"] = _renamed(results.variables["depth"].isel(depth=[1, -1]), "depth", "end")
    return xr.Dataset(summary, coords)


def _renamed(values: xr.Variable, dim: str, to: str) -> xr.Variable:
    return xr.Variable(
        [to if name == dim else name for name in values.dims], values.values, values.attrs
    )


def _certificates(results: xr.Dataset) -> dict[str, xr.Variable]:
    """Count by block how the Jacobians were computed, and take the largest errors of their checks."""
    names = {name: f"{DIAGNOSTICS}{name}" for name in (*CHECKED, "sliced", "complete")}
    if not all(name in results for name in names.values()):
        return {}
    checks = {name: results.variables[of] for name, of in names.items()}
    measured = checks["residual"].notnull()
    counts = {
        "jacobians": measured,
        **{name: (checks[name] == 1) & measured for name in ("sliced", "complete")},
    }
    counted = {f"{name}_count": values.sum(SAMPLES) for name, values in counts.items()}
    return counted | {f"{name}_max": checks[name].max((*SAMPLES, "layer")) for name in CHECKED}


COORDINATES = ("k", "layer", "layer_other", "rank")


def read_miscouplings(directory: str | Path) -> xr.Dataset:
    """Return the curve points of each mis-coupling of the blocks alone, for each token by itself.

    Returns:
        `miscoupling` and its `null` level (step, token, measure, k, pairs): means over layer pairs and samples, as in
        `tracker.analysis.curves.curves`.

    Raises:
        FileNotFoundError: if there are no units.
        ValueError: if a unit is damaged, or units differ in prompts, tokens, blocks, K or measures.
    """
    store = Store(directory)
    steps = require_steps(store)
    read = store.curve(steps, {*MISCOUPLINGS, *READ, *COORDINATES})
    names = [name for name in MISCOUPLINGS if name in read]
    if not names:
        raise ValueError(f"{directory} holds no mis-coupling; measure `coupling`")
    parts, counted = {"miscoupling": in_float64, "null": levels}, counted_pairs(read)
    means = {}
    for part, of in parts.items():
        by_measure = [mean(over_pairs(of(read, name), counted), ["prompt"]) for name in names]
        means[part] = xr.Variable.concat(by_measure, "measure")
    # The provenance of a step, such as when it was measured, is a coordinate only where steps differ in it.
    points = gathered(means, read).reset_coords(drop=True).assign_coords(measure=names)
    return points.transpose("step", "token", "measure", "k", "pairs")
