"""Curve points of a measured Dataset: what is averaged, over what, and the spread that goes with it.

The registry names the reduction of each measure. A curve point of a coupling measure is, for each prompt and token, the mean
over layer pairs of one choice

    mean            all pairs, the trivial diagonal included (the paper's)
    mean_offdiag    l != l'  (the headline)
    mean_adjacent   |l - l'| = 1
    (the last two without pairs of layers that are one module, `pairs`)

and over prompts and tokens their mean and quartiles. Its null level is averaged over the same pairs, with 0 on the
diagonal. Trajectory measures: median and quartiles over prompts and positions.
W&B, the figures and the page all draw these values.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis import variables
from tracker.analysis.null_levels import levels
from tracker.analysis.onset import Onset, no_onset, onset
from tracker.analysis.pairs import counted_pairs, independent_pairs, is_post_norm
from tracker.analysis.regression import linear_fit
from tracker.analysis.selections import number_of_blocks, opened, require_names, with_steps
from tracker.analysis.variables import QUANTILES, gathered, in_float64, labelled, mean
from tracker.common.errors import UsageError
from tracker.measures import trajectory
from tracker.measures.dataset import compared_tokens
from tracker.measures.declaration import Measure, Reduction, point_label
from tracker.measures.registry import (
    BY_NAME,
    MEAN_OFFDIAG,
    MEAN_OFFDIAG_NULL,
    MEASURES,
    MISCOUPLINGS,
    UNDEFINED,
    UNDEFINED_COUNT,
    headline_names,
)
from tracker.store import Result

USUAL = (*MISCOUPLINGS, *(measure.name for measure in trajectory.DECLARED if measure.curve))
CURVES = tuple(measure.name for measure in MEASURES if measure.curve)
SAMPLES = ("prompt", "token")
ACROSS = ("layer", "pair_token", "pair_token_other")  # the dimensions of pairs of tokens


def curves(results: Result, measures: str | Sequence[str] = USUAL) -> xr.Dataset:
    """Return the curve points of a result, with or without a `step` dimension.

    Args:
        results: a Dataset of `measure` or `open_results`, or a part of one; or a store or its directory.
        measures: the name of a measure that has a curve, or several; those that the results lack are left out.

    Returns:
        For each measure `m` of layer pairs: `m` (k, pairs), `m_q25`, `m_q75`, `m_null`, and
        `m_coupling`, the null level minus the mis-coupling. For each `m` of token pairs the same
        over (k): means over layers and the token pairs of `compared_tokens`. For each other `m`: `m` (statistic: q25, median,
        q75) over all prompts and positions; `entropy` and products of blocks only of the last state or block;
        `noise_similarity` (noise): the mean over the positions and prompts of the last state. Scores are passed on.

    Raises:
        UsageError: for what is no result, for a part of one without what a curve needs, and for a name of no measure.
    """
    results = opened(results)
    names = [measures] if isinstance(measures, str) else measures
    require_names(names, BY_NAME, "measure")
    out: dict[str, xr.Variable] = {}
    for name in names:
        reduction = BY_NAME[name].curve
        if name in results and reduction is not None and _has_last(results, BY_NAME[name]):
            parts = REDUCTIONS[reduction](results, BY_NAME[name])
            out |= {f"{name}{part}": values for part, values in parts.items()}
    if "score" in results:
        out["score"] = results.variables["score"]
    return gathered(out, results).transpose("step", ..., missing_dims="ignore")


def _over_layer_pairs(results: xr.Dataset, measure: Measure) -> dict[str, xr.Variable]:
    counted = counted_pairs(results)
    values, null = in_float64(results, measure.name), levels(results, measure.name)
    return points_of_layer_pairs(
        variables.over_pairs(values, counted), variables.over_pairs(null, counted)
    )


def points_of_layer_pairs(by_prompt: xr.Variable, null: xr.Variable) -> dict[str, xr.Variable]:
    """Return the points of a mis-coupling, by what follows its name, from `over_pairs` of it and of its null level."""
    value, level = mean(by_prompt, SAMPLES), mean(null, SAMPLES)
    return {"": value, **_band(by_prompt, SAMPLES), "_null": level, "_coupling": level - value}


def _over_token_pairs(results: xr.Dataset, measure: Measure) -> dict[str, xr.Variable]:
    compared = compared_tokens(results)
    by_prompt, null = (
        mean(values.where(compared), ACROSS)
        for values in (in_float64(results, measure.name), levels(results, measure.name))
    )
    return {
        "": mean(by_prompt, ["prompt"]),
        **_band(by_prompt, ["prompt"]),
        "_null": mean(null, ["prompt"]),
    }


def _over_positions(results: xr.Dataset, measure: Measure) -> dict[str, xr.Variable]:
    return {"": variables.quartiles(in_float64(results, measure.name), ("prompt", *measure.dims))}


def _of_last_state(results: xr.Dataset, measure: Measure) -> dict[str, xr.Variable]:
    last = _last_state(results, measure)
    return {"": variables.quartiles(last, [str(dim) for dim in last.dims if dim != "step"])}


def _mean_of_last_state(results: xr.Dataset, measure: Measure) -> dict[str, xr.Variable]:
    return {"": mean(mean(_last_state(results, measure), ["position"]), ["prompt"])}


REDUCTIONS: Mapping[Reduction, Callable[[xr.Dataset, Measure], dict[str, xr.Variable]]] = {
    "pairs": _over_layer_pairs,
    "token pairs": _over_token_pairs,
    "quartiles": _over_positions,
    "last quartiles": _of_last_state,
    "last mean": _mean_of_last_state,
}


def _has_last(results: xr.Dataset, measure: Measure) -> bool:
    """Whether the results hold the last state, or block, where the curve is of that."""
    # The last along depth of a part of results may be that of another block.
    of_last = measure.curve in ("last quartiles", "last mean")
    return not of_last or int(results[_along_depth(measure)][-1]) == number_of_blocks(results)


def _along_depth(measure: Measure) -> str:
    return "depth" if "depth" in measure.dims else "layer"


def _last_state(results: xr.Dataset, measure: Measure) -> xr.Variable:
    """Return the values of the last state, or of the last block."""
    return in_float64(results, measure.name).isel({_along_depth(measure): -1})


def _band(values: xr.Variable, over: Sequence[str]) -> dict[str, xr.Variable]:
    spread = variables.quartiles(values, over)
    return {f"_{q}": spread.isel(statistic=list(QUANTILES).index(q)) for q in ("q25", "q75")}


def layers_in_words(results: xr.Dataset) -> str:
    """Describe which layers' Jacobians were compared across tokens, such as l' = l + 1."""
    layers = {int(l) for l in results["layer"].values}
    other = results["pair_layer_other"].dropna("layer")
    pairs = [(int(l), int(m)) for l, m in zip(other["layer"].values, other.values, strict=True)]
    apart = pairs[0][1] - pairs[0][0]
    if pairs != [(l, l + apart) for l in sorted(layers) if l + apart in layers]:
        return f"(l, l') = {', '.join(map(str, pairs))}"
    return "l' = l" + (f" {'+' if apart > 0 else '−'} {abs(apart)}" if apart else "")


def middle_layers(results: xr.Dataset) -> tuple[int, int]:
    """Return the layers l and l' in the middle of those compared across tokens."""
    other = results["pair_layer_other"].dropna("layer")
    middle = other.isel(layer=(other.sizes["layer"] - 1) // 2)
    return int(middle["layer"]), int(middle)


def quartiles(values: xr.DataArray, over: Sequence[str]) -> xr.DataArray:
    """Return quartiles over the given dimensions, along `statistic`; NaN where there is no value at all."""
    return labelled(variables.quartiles(values.variable, over), values)


def labelled_over_pairs(matrices: xr.DataArray, results: xr.Dataset) -> xr.DataArray:
    """Average values of results over layer pairs: dimensions (layer, layer_other) become `pairs`."""
    return labelled(variables.over_pairs(matrices.variable, counted_pairs(results)), matrices)


def sources(results: xr.Dataset) -> np.ndarray | None:
    """Return the cluster of each prompt as a number; None where each prompt is one by itself.

    Prompts from one source (`prompt_source`, where there are several) are not independent, and equal prompts (`prompt_digest`, or
    their text in results without it) are one: `regression.mean_interval` takes these as clusters. A prompt whose label is
    missing or "" stands for itself.
    """
    cluster = np.arange(results.sizes["prompt"])
    of_source, equal = (_codes(results, name) for name in ("prompt_source", "prompt_digest"))
    if equal is None:
        equal = _codes(results, "prompt_text")
    # One source would be one cluster, which has no interval.
    if of_source is not None and len(set(of_source)) == 1 and of_source[0] >= 0:
        of_source = None
    # Clusters with a prompt in common are one: equal prompts may be of two sources.
    for codes in (of_source, equal):
        for code in () if codes is None else set(codes[codes >= 0]):
            joined = np.isin(cluster, cluster[codes == code])
            cluster[joined] = cluster[joined].min()
    return None if len(set(cluster)) == len(cluster) else cluster


def _codes(results: xr.Dataset, name: str) -> np.ndarray | None:
    """Return a coordinate of prompts as numbers, −1 where it is missing or ""; None without it."""
    if name not in results.coords:
        return None
    labels = results.coords[name]
    labels = pd.Series((labels.isel(step=-1) if "step" in labels.dims else labels).values)
    codes, _ = pd.factorize(labels.where(labels != ""))
    return codes


def evenly_measured(steps: Sequence[float] | np.ndarray) -> bool:
    """Whether training steps are evenly spaced, except for the last, which may follow sooner: a run ends where it ends.

    >>> evenly_measured([0, 20, 40, 45]), evenly_measured([0, 1, 2, 4])
    (True, False)
    """
    steps = np.asarray(steps, float)
    gaps = np.diff(np.unique(steps[np.isfinite(steps)]))
    return len(gaps) < 2 or bool((gaps[:-1] == gaps[0]).all() and gaps[-1] <= gaps[0])


def onset_of(results: xr.Dataset, by_prompt: xr.DataArray, of_pairs: xr.DataArray) -> Onset:
    """Find the onset of the coupling of results along `step`.

    Args:
        by_prompt: null level minus mis-coupling (step, prompt), means over pairs of different blocks.
        of_pairs: the same (step, layer, layer_other), means over prompts.
    """
    if is_post_norm(results):
        return no_onset("not stated: the null level is no baseline of a post-norm model")
    departure = by_prompt.transpose("step", "prompt").values
    pairs = independent_pairs(of_pairs.transpose("step", ...), results)
    return onset(results["step"].values, departure, pairs, sources(results))


def inverse_fit(layers: np.ndarray, s: np.ndarray) -> dict[str, Any]:
    """Fit a straight line to 1 / s over depth (Figs 33 and 34), over the layers where s > 0.

    Returns:
        inverse and fitted: 1 / s and the line, at every layer; n, r2, slope, intercept: of the line, NaN as in `linear_fit`.
    """
    # Both branches of a `where` are computed: a singular value of 0 would warn of a division.
    inverse = np.where(s > 0, 1 / np.where(s > 0, s, 1), np.nan)
    x, y = layers[s > 0].astype(float), inverse[s > 0]
    fit = linear_fit(x, y)
    intercept = float(y.mean() - fit["slope"] * x.mean()) if len(y) else float("nan")
    line = {"n": fit["n"], "r2": fit["r2"], "slope": fit["slope"], "intercept": intercept}
    return {"inverse": inverse, "fitted": intercept + fit["slope"] * layers, **line}


def scalars(unit: Result) -> dict[str, float]:
    """Return the curve points of one step that loggers record, by metric name.

    The mis-coupling off the diagonal at the smallest K and its null level have short names of their own
    (`tracker.measures.registry`). The number of undefined values is there if there are any.

    Raises:
        UsageError: for several steps, and as `curves`.
    """
    results = with_steps(opened(unit), 0)
    if results.sizes["step"] > 1:
        raise UsageError(
            f"scalars are of one step, and these are {results.sizes['step']}; select one: results.isel(step=-1)"
        )
    return scalars_by_step(results)[0]


def scalars_by_step(results: xr.Dataset) -> list[dict[str, float]]:
    """Return the `scalars` of each step of results along `step`."""
    metrics = _metrics(results)
    by_step = []
    for i in range(results.sizes["step"]):
        of_step = {}
        for name, values in metrics.items():
            value = float(values[i])
            # A score that only other steps have is NaN here; a count of zero would only fill charts.
            missing = name.startswith("score/") and value != value
            if not missing and (name != UNDEFINED_COUNT or value):
                of_step[name] = value
        by_step.append(of_step)
    return by_step


def _metrics(results: xr.Dataset) -> dict[str, np.ndarray]:
    """Return the values that loggers record, by metric name, along `step`."""
    logged = [measure for measure in MEASURES if measure.logged]
    points = curves(results, [measure.name for measure in logged])
    names = {f"{m.name}{part}": m.point(part) for m in logged for part in m.logged} | {
        "score": "score"
    }
    flat = {}
    for name, metric in names.items():
        if name in points.variables:
            for labels, values in _entries(points, name):
                flat["/".join([metric, *labels])] = values
    if "miscoupling" in results:
        measure, at = BY_NAME["miscoupling"], {"k": _smallest_k(results), "pairs": "mean_offdiag"}
        flat[MEAN_OFFDIAG] = flat[measure.point(**at)]
        flat[MEAN_OFFDIAG_NULL] = flat[measure.point("_null", **at)]
    if UNDEFINED in results:
        flat[UNDEFINED_COUNT] = results.variables[UNDEFINED].sum("quantity").values
    return flat


def headlines(unit: xr.Dataset) -> tuple[str, ...]:
    """Return the names of the headline numbers of one step, in their order; `scalars` has those that were measured."""
    return headline_names(_smallest_k(unit))


def _smallest_k(unit: xr.Dataset) -> int:
    return int(unit["k"].min()) if "k" in unit.coords else 0


def _entries(points: xr.Dataset, name: str) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Return the values of a curve, over steps, with their labels along the other dimensions."""
    values = points.variables[name].transpose(..., "step", missing_dims="ignore")
    along = [str(dim) for dim in values.dims if dim != "step"]
    sizes = values.shape[: len(along)]
    labels = [[point_label(dim, label) for label in points.variables[dim].values] for dim in along]
    return list(zip(product(*labels), (values.values[at] for at in np.ndindex(sizes)), strict=True))
