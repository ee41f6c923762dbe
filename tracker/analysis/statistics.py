"""From labelled results to curves: what is averaged, over what, and the spread that goes with it.

A curve point of a coupling measure is, for each prompt and token, the mean over layer pairs of one choice

    mean            all pairs, the trivial diagonal included (the paper's)
    mean_offdiag    l != l'  (the headline)
    mean_adjacent   |l - l'| = 1

and over prompts and tokens their mean and quartiles. Its null level is averaged over the same pairs, as 0 on the
diagonal. Trajectory measures: median and quartiles over prompts and positions.
W&B, the figures and the page all draw these numbers.

Of what is measured beside these, logs get the curves of `curves_beside`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from tracker.analysis.regression import group_means, holm, linear_fit
from tracker.measures.coupling import depth_means
from tracker.measures.dataset import pair_layers
from tracker.measures.registry import KINDS, MISCOUPLINGS

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
BEFORE_NORM = ("miscoupling_raw", "offdiag_normalized_raw")  # in logs, of the measures before the final norm
HEADLINE = "coupling/mean_offdiag"  # in logs: the mis-coupling off the diagonal, for the smallest K


def curves(results: xr.Dataset, measures: Sequence[str] = MISCOUPLINGS) -> xr.Dataset:
    """Curve points of a Dataset, with or without a `step` dimension.

    Args:
        measures: the coupling measures wanted, of those that the results have.

    Returns:
        For each coupling measure `m`: `m` (k, pairs), `m_q25`, `m_q75`, `m_null`; for each trajectory measure `t`: `t`
        (statistic: q25, median, q75). Scores are passed on.
    """
    results = _in_float64(results)
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


def curves_beside(results: xr.Dataset) -> xr.Dataset:
    """Curve points of what is measured beside the usual, as far as it was, with or without a `step` dimension.

    Returns:
        `m_vju` (k, pairs), as `m` in `curves`, whose null level off the diagonal is also its own; those of `BEFORE_NORM` with
        their `m_null` (k, pairs); for each kind of token pairs `kind_m` and `kind_m_null` (k): the mean over layers and the
        token pairs of `compared_tokens`, then over prompts; `entropy` (statistic), nats, after the last block;
        `noise_similarity` (noise): the mean over positions, then prompts, after the last block.
    """
    results = _in_float64(results)
    out: dict[str, xr.DataArray] = {}
    for name in (name for name in BEFORE_NORM if name in results):
        for m, values in ((name, results[name]), (f"{name}_null", null_matrix(results, name))):
            out[m] = over_pairs(values).mean(("prompt", "token"))
    for name in MISCOUPLINGS:
        if f"{name}_vju" in results:
            out[f"{name}_vju"] = over_pairs(results[f"{name}_vju"]).mean(("prompt", "token"))
        for kind in KINDS:
            if f"{kind}_{name}" in results:
                measured = results[f"{kind}_{name}"]
                null = results[f"{kind}_{name}_null"].where(measured.notnull())
                for m, values in ((f"{kind}_{name}", measured), (f"{kind}_{name}_null", null)):
                    compared = values.where(compared_tokens(results))
                    out[m] = compared.mean(("layer", "pair_token", "pair_token_other")).mean("prompt")
    if "entropy" in results:
        out["entropy"] = quartiles(results["entropy"].isel(depth=-1, drop=True), ("prompt", "position"))
    if "noise_similarity" in results:
        out["noise_similarity"] = results["noise_similarity"].isel(depth=-1, drop=True).mean("position").mean("prompt")
    return xr.Dataset(out).transpose("step", ..., missing_dims="ignore")


def compared_tokens(results: xr.Dataset) -> xr.DataArray:
    """The token pairs of each layer that count in a mean: all, as in the paper, but no Jacobian in its own basis.

    That is t = t' where l' = l: 0 by definition. Where l' is another block, t = t' is a pair like the others.
    """
    own_block = pair_layers(results) == results["layer"]
    return ~(own_block & (results["pair_token"] == results["pair_token_other"]))


def layers_in_words(results: xr.Dataset) -> str:
    """Which layers' Jacobians were compared across tokens, such as l' = l + 1."""
    layers = {int(l) for l in results["layer"].values}
    other = pair_layers(results).dropna("layer")
    pairs = [(int(l), int(m)) for l, m in zip(other["layer"].values, other.values, strict=True)]
    apart = pairs[0][1] - pairs[0][0]
    if pairs != [(l, l + apart) for l in sorted(layers) if l + apart in layers]:
        return f"(l, l') = {', '.join(map(str, pairs))}"
    return "l' = l" + (f" {'+' if apart > 0 else '−'} {abs(apart)}" if apart else "")


def middle_layers(results: xr.Dataset) -> tuple[int, int]:
    """The layers l and l' in the middle of those compared across tokens."""
    other = pair_layers(results).dropna("layer")
    middle = other.isel(layer=(other.sizes["layer"] - 1) // 2)
    return int(middle["layer"]), int(middle)


def largest_singular_values(results: xr.Dataset, kind: str) -> xr.DataArray:
    """Of the Jacobians described across tokens, over (layer, pair_token); results need `kind_matrix`."""
    if f"{kind}_singular_value" in results:
        return results[f"{kind}_singular_value"].sel(rank=1, drop=True)
    # Older results do not have them, but have each Jacobian in its own basis: l' = l, where A is diag(s).
    tokens = results["pair_token"]
    A = results[f"{kind}_matrix"].sel(row=1, column=1, drop=True)
    return A.where(tokens == results["pair_token_other"]).max("pair_token_other")


def _in_float64(results: xr.Dataset) -> xr.Dataset:
    """So that one step alone and the same step among others give the same sum."""
    return results.map(
        lambda values: values.astype(np.float64) if values.dtype == np.float32 else values, keep_attrs=True
    )


def quartiles(values: xr.DataArray, over: tuple[str, ...]) -> xr.DataArray:
    """Quartiles over the given dimensions, along `statistic`; NaN where there is no value at all."""
    there = values.notnull().any(over)
    spread = values.where(there, 0.0).quantile(list(QUANTILES.values()), over, skipna=True)
    return spread.rename(quantile="statistic").assign_coords(statistic=list(QUANTILES)).where(there)


def null_matrix(results: xr.Dataset, name: str) -> xr.DataArray:
    """The null level of every layer pair that has a value: that of the block described; 0 on the trivial diagonal.

    With swapped bases (`m_vju`) the diagonal is not trivial: V^T J U of a block's own bases is not S.
    """
    measured = results[name]
    off_diagonal = (measured["layer"] != measured["layer_other"]) | name.endswith("_vju")
    null = xr.where(off_diagonal, results[f"{name}_null"], 0.0)
    return null.where(measured.notnull()).transpose(*measured.dims)


def sources(results: xr.Dataset) -> np.ndarray | None:
    """What each prompt was drawn from, as numbers: the coordinate `prompt_source`, None where there is none.

    Prompts from one source are not independent: `regression.mean_interval` takes these as clusters. A prompt whose label is
    missing or "" stands for itself.
    """
    if "prompt_source" not in results.coords:
        return None
    found = results.coords["prompt_source"]
    labels = pd.Series((found.isel(step=-1) if "step" in found.dims else found).values)
    codes, _ = pd.factorize(labels.where(labels != ""))
    return np.where(codes < 0, len(codes) + np.arange(len(codes)), codes)


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


def correlations(
    coupling: xr.DataArray, y: np.ndarray, groups: np.ndarray | None = None, clusters: np.ndarray | None = None
) -> pd.DataFrame:
    """`linear_fit` of y on each coupling (sample, measure, k, pairs), a row for each measure, K and choice of pairs.

    p_holm is p corrected for all rows. Where clusters are given and some samples share one, cluster_n, cluster_r, cluster_r2 and
    cluster_p are of the fit in which each cluster counts once, as its mean.
    """
    stacked = coupling.stack(which=("measure", "k", "pairs"))
    rows = []
    for i, (measure, k, pairs) in enumerate(stacked["which"].values):
        row = {"measure": str(measure), "k": int(k), "pairs": str(pairs), **linear_fit(stacked.values[:, i], y, groups)}
        if clusters is not None and len(np.unique(clusters)) < len(y):
            x, of_y, *kinds = group_means(clusters, stacked.values[:, i], y, *([] if groups is None else [groups]))
            fit = linear_fit(x, of_y, *kinds)
            row |= {f"cluster_{name}": fit[name] for name in ("n", "r", "r2", "p")}
        rows.append(row)
    found = pd.DataFrame(rows)
    return found.assign(p_holm=holm(found["p"].to_numpy()))


def inverse_fit(layers: np.ndarray, s: np.ndarray) -> dict[str, Any]:
    """The straight line of 1 / s over depth (Figs 33 and 34), over the layers where s > 0.

    Returns:
        inverse and fitted: 1 / s and the line, at every layer; n, r2, slope, intercept: of the line, NaN as in `linear_fit`.
    """
    inverse = np.where(s > 0, 1 / np.where(s > 0, s, 1), np.nan)
    x, y = layers[s > 0].astype(float), inverse[s > 0]
    fit = linear_fit(x, y)
    intercept = float(y.mean() - fit["slope"] * x.mean()) if len(y) else float("nan")
    line = {"n": fit["n"], "r2": fit["r2"], "slope": fit["slope"], "intercept": intercept}
    return {"inverse": inverse, "fitted": intercept + fit["slope"] * layers, **line}


def scalars(unit: xr.Dataset) -> dict[str, float]:
    """The curve points of one step, flat, under the names they have in W&B and every other log.

    The headline and its null level stand once more under `HEADLINE` and `HEADLINE`_null.
    """
    flat: dict[str, float] = {}
    for points in (curves(unit), curves_beside(unit)):
        for name in points.data_vars:
            for labels, value in _entries(points[name]):
                flat["/".join([_group(str(name)), *labels])] = value
    if "miscoupling" in unit:
        k = min(int(k) for k in unit["k"].values)
        for null in ("", "_null"):
            flat[HEADLINE + null] = flat[f"coupling/miscoupling{null}/k{k}/mean_offdiag"]
    return flat


def _entries(values: xr.DataArray) -> list[tuple[list[str], float]]:
    if not values.dims:
        return [([], float(values))]
    dim = values.dims[0]
    return [
        ([_label(str(dim), label), *labels], value)
        for label in values[dim].values
        for labels, value in _entries(values.sel({dim: label}))
    ]


def _label(dim: str, label: object) -> str:
    if dim == "noise":
        return noise_label(float(str(label)))
    return f"k{label}" if dim == "k" else str(label)


def noise_label(level: float) -> str:
    """A noise level in a metric's name, where a dot would read as a path to W&B."""
    return f"{100 * level:g}pct"


def _group(name: str) -> str:
    for kind in KINDS:
        if name.startswith(f"{kind}_"):
            return f"tokens/{kind}/{name.removeprefix(f'{kind}_')}"
    if name.startswith(MISCOUPLINGS):
        return f"coupling/{name}"
    return name if name == "score" else f"trajectory/{name}"
