"""Comparison of several results: one point per result, after its last step, and fits of one property on another.

    coupling = null level - mis-coupling; the score is the mean over the benchmarks that all results share

Null levels differ between models (except for offdiag_normalized, where they depend on K alone), so couplings of several models
are distances from them.

Results may depend on each other: a fit over models is repeated with one point per cluster, its mean. Variants of one model form
a cluster: same class, depth, width, parameter count, and name up to `-deduped`, `-seedN`, `-data-seedN` or `-weight-seedN`
(Pythia 70m and 70m-deduped; one model measured twice). Models of one suite also share data and recipe, which their names do not
show: the attribute `cluster` of a result, or `--clusters`, assigns other clusters.

`tracker.figures.model_comparisons` draws these numbers for print; the page draws those of `compare_models`. Fits are those of
`regression`; intervals of a coupling are over its prompts.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.curves import sources
from tracker.analysis.doubts import describe_differences
from tracker.analysis.regression import (
    MIN_POINTS,
    cluster_means,
    exponential_fit,
    holm,
    linear_fit,
    mean_interval,
    partial_correlation,
)
from tracker.analysis.selections import number_of_blocks
from tracker.analysis.variables import PAIRS
from tracker.common.errors import UsageError
from tracker.measures.registry import VARIANTS

# The end of a name that tells trainings of one model apart, as in Pythia's
VARIANT = re.compile(r"[-_](deduped|((data|weight)[-_])?seed[-_]?\d+)(?=[-_]|$)", re.IGNORECASE)


def cluster_labels(results: Mapping[str, xr.Dataset]) -> np.ndarray:
    """Return a label for each result: its attribute `cluster`, else the name of the first variant of the same model."""
    first: dict[tuple, str] = {}
    return np.array(
        [
            str(ds.attrs.get("cluster") or first.setdefault(_model(name, ds), name))
            for name, ds in results.items()
        ]
    )


def _model(result: str, ds: xr.Dataset) -> tuple:
    """Return a key that variants of one model share; a model without a name has no variants."""
    name = (
        str(ds.attrs.get("suite") or ds.attrs.get("model_name") or "")
        .rstrip("/")
        .rpartition("/")[2]
        .lower()
    )
    if not name:
        return (result,)
    # The last part of a path may name several models.
    sizes = (
        ds.attrs["model_class"],
        ds.sizes.get("layer"),
        ds.attrs["width"],
        ds.attrs["parameters"],
    )
    return (VARIANT.sub("", name), *map(str, sizes))


def independence_note(results: Mapping[str, xr.Dataset]) -> str:
    """State, for readers of a fit over these results, how independent they are and which of them are averaged."""
    classes, labels = {ds.attrs["model_class"] for ds in results.values()}, cluster_labels(results)
    plural = "s" if len(classes) > 1 else ""
    note = (
        f"{len(results)} models of {len(classes)} architecture{plural}: p and intervals treat models as independent, although "
        "models of one suite share data and training recipe."
    )
    names = np.array(list(results))
    clusters = [names[labels == label] for label in dict.fromkeys(labels)]
    averaged = "; ".join(", ".join(members) for members in clusters if len(members) > 1)
    return f"{note} Clusters averaged in the second fit: {averaged}." if averaged else note


def assign_clusters(results: Mapping[str, xr.Dataset], text: str | None) -> dict[str, xr.Dataset]:
    """Set the attribute `cluster` of results as "NAME=CLUSTER,NAME=CLUSTER" gives it; the others are returned as they are.

    Raises:
        UsageError: for an entry not of this form, or with a name that is not among the results.
    """
    pairs = [pair.strip().rpartition("=") for pair in (text or "").split(",") if pair.strip()]
    for name, equals, cluster in pairs:
        if not (equals and cluster and name in results):
            raise UsageError(
                f"--clusters {text}: {(name + equals + cluster)!r} is not NAME=CLUSTER with one of {', '.join(results)}"
            )
    labels = {name: cluster for name, _, cluster in pairs}
    return {
        name: ds.assign_attrs(cluster=labels[name]) if name in labels else ds
        for name, ds in results.items()
    }


Results = Mapping[str, xr.Dataset]
Property = Callable[[xr.Dataset], float]

SIZES: dict[str, Property] = {
    "blocks": lambda ds: float(number_of_blocks(ds)),
    "width": lambda ds: float(ds.attrs["width"]),
    "parameters": lambda ds: float(ds.attrs["parameters"]),
}
TRAINING_TOKENS = "training tokens"


def shared(results: Results, name: str) -> list[Any]:
    """Return the values of a coordinate, K or training steps, that all results with it have, ascending."""
    measured = [
        {at for at in ds[name].values.tolist() if at == at}
        for ds in results.values()
        if name in ds.coords
    ]
    return sorted(set.intersection(*measured)) if measured else []


def mean_score(results: Results) -> tuple[list[str], Property]:
    """Return the benchmarks for which all results have a score after their last step, and the mean score over them.

    Raises:
        UsageError: if the results share no benchmark.
    """
    last = {name: ds["score"].isel(step=-1) for name, ds in results.items()}
    shared = set.intersection(
        *({str(task) for task in score["task"].values[score.notnull()]} for score in last.values())
    )
    if not shared:
        raise UsageError(
            f"{', '.join(results)} have no benchmark in common at their last steps; join others: --scores FILE"
        )
    benchmarks = sorted(shared)
    return benchmarks, lambda ds: float(ds["score"].isel(step=-1).sel(task=benchmarks).mean())


def tokens_seen(ds: xr.Dataset) -> float:
    """Return the number of training tokens after the last step; NaN where it is not recorded."""
    # xarray keeps one number where all steps have the same, as a single step has.
    return float(np.ravel(ds["tokens_seen"])[-1]) if "tokens_seen" in ds.coords else float("nan")


def architecture(ds: xr.Dataset) -> str:
    """Return the name of the model's class."""
    return str(ds.attrs["model_class"]).rpartition(".")[2]


def properties_of(results: Results, properties: Mapping[str, Callable]) -> pd.DataFrame:
    """Return a row for each result: its name, its cluster, and what these functions give of it."""
    columns = {name: [take(ds) for ds in results.values()] for name, take in properties.items()}
    return pd.DataFrame({"result": list(results), "cluster": cluster_labels(results), **columns})


def final_couplings(points: Results) -> xr.DataArray:
    """Collect couplings, null level minus mis-coupling, after the last step, for the measures and K that all results have.

    Args:
        points: for each result, the Dataset of `curves.curves` or of the page's summary.

    Returns:
        Coupling, (result, measure, k, pairs).

    Raises:
        UsageError: if the results share no K or no measure.
    """
    # Coordinates of the step, which only some results may have, would not align.
    last = [ds.isel(step=-1).reset_coords(drop=True) for ds in points.values()]
    ks = shared(points, "k")
    names = [name for name in VARIANTS if all(name in ds for ds in last)]
    if not ks or not names:
        raise UsageError(
            "the results share no K and measure of coupling; measure again with the same --k and --measures"
        )
    pairs = {"k": ks, "pairs": list(PAIRS)}
    chosen = []
    for ds in last:
        couplings = xr.Dataset({name: ds[f"{name}_coupling"] for name in names})
        chosen.append(couplings.sel(pairs).to_array("measure"))
    return xr.concat(chosen, "result").transpose("result", "measure", "k", "pairs")


def correlations(coupling: xr.DataArray, y: np.ndarray) -> pd.DataFrame:
    """`linear_fit` of y on each coupling (sample, measure, k, pairs), a row for each measure, K and choice of pairs.

    p_holm is p corrected for all rows.
    """
    stacked = coupling.stack(which=("measure", "k", "pairs"))
    rows = []
    for i, (measure, k, pairs) in enumerate(stacked["which"].values):
        fit = linear_fit(stacked.values[:, i], y)
        rows.append({"measure": str(measure), "k": int(k), "pairs": str(pairs), **fit})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_numpy()))


def fit_line(table: pd.DataFrame, x: str, y: str) -> dict[str, Any]:
    """Fit y on x over the rows (`linear_fit`).

    Returns:
        The fit; "averaged" is the fit with one point per cluster, None where each row is its own cluster.
    """
    return _with_averaged(table, lambda rows: linear_fit(rows[x].to_numpy(), rows[y].to_numpy()))


def controlled_fit(table: pd.DataFrame, x: str) -> dict[str, Any]:
    """Correlate x and the score with blocks, width and parameters controlled for (`partial_correlation`).

    Returns:
        As `fit_line` does.
    """

    def fit(rows: pd.DataFrame) -> dict[str, float]:
        sizes = [rows[name].to_numpy() for name in SIZES]
        return partial_correlation(rows[x].to_numpy(), rows["score"].to_numpy(), sizes)

    return _with_averaged(table, fit)


def _with_averaged(
    table: pd.DataFrame, fit: Callable[[pd.DataFrame], dict[str, float]]
) -> dict[str, Any]:
    means = cluster_means(table, table["cluster"].to_numpy())
    return {**fit(table), "averaged": None if means is None else fit(means)}


def subset_fits(table: pd.DataFrame, x: str) -> pd.DataFrame:
    """Fit the score on x (`linear_fit`) over all rows, over and without each architecture, and over the halves by parameters.

    Args:
        table: one row per result, with the columns x, score, architecture, parameters and cluster.

    Returns:
        One row per subset of at least `MIN_POINTS` rows, and one for the means of the clusters of all rows, if any two share
        a cluster; p_holm is p corrected for the number of subsets.
    """
    chosen = {"all": np.full(len(table), True)}
    counts = table["architecture"].value_counts()
    for name in counts.index if len(counts) > 1 else ():
        chosen[f"{name} only"] = (table["architecture"] == name).to_numpy()
        if len(counts) > 2:  # of two, "without one" is "the other only"
            chosen[f"without {name}"] = (table["architecture"] != name).to_numpy()
    # Among models of similar size: size alone may make score and coupling agree.
    middle = table["parameters"].median()
    chosen[f"parameters up to {middle:,.0f}"] = (table["parameters"] <= middle).to_numpy()
    chosen[f"parameters above {middle:,.0f}"] = (table["parameters"] > middle).to_numpy()
    subsets = {name: table.loc[rows] for name, rows in chosen.items()}
    if (means := cluster_means(table, table["cluster"].to_numpy())) is not None:
        subsets = {"all": table, "all, clusters averaged": means} | subsets
    out = pd.DataFrame(
        [
            {"subset": name, **linear_fit(rows[x].to_numpy(), rows["score"].to_numpy())}
            for name, rows in subsets.items()
            if len(rows) >= MIN_POINTS
        ]
    )
    return out.assign(p_holm=holm(out["p"].to_numpy()))


def compare_models(summaries: Results) -> dict[str, Any]:
    """Compute the page's comparison of scores and couplings after the last steps, as JSON.

    Args:
        summaries: one summary (`analysis.reduction`) per result.

    Returns:
        models: names of the results compared, in the order of every list; independence: a note on their clusters; benchmarks,
        score, sizes; size_fits: the fits of the score on each size; tests: the number of couplings tested.
        coupling: by measure, K and pairs, its values, their interval over prompts (for l != l'), fits of the score on it
        (fit, exponential, controlled for sizes, subsets), size_fits: its own on each size, and approximate: the results whose
        null level is, which have no interval.

    Raises:
        UsageError: if fewer than `MIN_POINTS` results have scores and layer pairs, or these differ in their conventions.
    """
    compared = {
        name: ds for name, ds in summaries.items() if "score" in ds and ds.sizes.get("layer", 1) > 1
    }
    if len(compared) < MIN_POINTS:
        raise UsageError(
            f"{len(compared)} of {len(summaries)} results have scores and layer pairs; a fit needs {MIN_POINTS}"
        )
    if differences := describe_differences(compared):
        raise UsageError(f"they were not measured alike: they differ in {'; '.join(differences)}")
    benchmarks, score = mean_score(compared)
    properties = {**SIZES, TRAINING_TOKENS: tokens_seen}
    table = properties_of(compared, {**properties, "score": score, "architecture": architecture})
    # A fit over those that state their training tokens would be of other models.
    sizes = [name for name in properties if np.isfinite(table[name].to_numpy()).all()]
    couplings = final_couplings(compared)
    fits = correlations(couplings, table["score"].to_numpy())
    by_measure: dict[str, Any] = {}
    for fit in fits.to_dict("records"):
        measure, k, pairs = (fit[name] for name in ("measure", "k", "pairs"))
        rows = table.assign(coupling=couplings.sel(measure=measure, k=k, pairs=pairs).values)
        interval = _intervals(compared, measure, k) if pairs == "mean_offdiag" else None
        by_measure.setdefault(measure, {}).setdefault(int(k), {})[pairs] = {
            **_coupling_fits(rows, sizes),
            "interval": interval,
            "fit": _line(rows, "coupling", "score") | {"p_holm": fit["p_holm"]},
        }
    return jsonable(
        {
            "models": list(compared),
            "independence": independence_note(compared),
            "benchmarks": benchmarks,
            "score": table["score"].to_numpy(),
            "sizes": {name: table[name].to_numpy() for name in sizes},
            "size_fits": {name: _line(table, name, "score") for name in sizes},
            "coupling": by_measure,
            "tests": int(np.isfinite(fits["p"].to_numpy()).sum()),
        }
    )


def _coupling_fits(rows: pd.DataFrame, sizes: list[str]) -> dict[str, Any]:
    values = rows["coupling"].to_numpy()
    return {
        "values": values,
        "exponential": exponential_fit(values, rows["score"].to_numpy()),
        "controlled": controlled_fit(rows, "coupling"),
        "subsets": subset_fits(rows, "coupling").to_dict("list"),
        "size_fits": {name: _line(rows, name, "coupling") for name in sizes},
    }


def _intervals(compared: Results, measure: str, k: int) -> np.ndarray:
    """Return the lower and the upper ends of the intervals over prompts, (2, result)."""
    ends = []
    for ds in compared.values():
        by_prompt = ds[f"{measure}_coupling_by_prompt"].sel(k=k, pairs="mean_offdiag").isel(step=-1)
        ends.append(mean_interval(by_prompt.values, sources(ds)))
    return np.transpose(ends)


def _line(table: pd.DataFrame, x: str, y: str) -> dict[str, Any]:
    """Return `fit_line` with its intercept."""
    fit = fit_line(table, x, y)
    return {**fit, "intercept": table[y].mean() - fit["slope"] * table[x].mean()}


def jsonable(value: Any) -> Any:
    """Convert numbers, arrays, and lists and mappings of them to JSON values; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {key: jsonable(entry) for key, entry in value.items()}
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list):
        return list(map(jsonable, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
