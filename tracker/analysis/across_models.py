"""Results set beside each other, a point for each: what each has after its last step, and fits of one property on another.

Numbers alone; `comparisons` draws them for print, the page draws `across`. Intervals of R^2 take results as independent
(Fisher's z), those of a coupling are over its prompts; where results are twins (`twins`), a second fit counts them once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.clusters import clusters, independence
from tracker.analysis.jsonable import jsonable
from tracker.analysis.regression import FEWEST, exponential_fit, holm, linear_fit, mean_interval, partial_correlation
from tracker.analysis.statistics import PAIRS, correlations, sources
from tracker.measures.coupling import VARIANTS

Results = Mapping[str, xr.Dataset]
Property = Callable[[xr.Dataset], float]

SIZES: dict[str, Property] = {
    "blocks": lambda ds: float(ds.sizes["layer"]),
    "width": lambda ds: float(ds.attrs["width"]),
    "parameters": lambda ds: float(ds.attrs["parameters"]),
}
TOKENS = "training tokens"
ALIKE = ("final_norm", "dtype", "precision", "tokens", "inputs_sha256")  # what results in one figure have to share


def shared_ks(results: Results) -> list[int]:
    """The numbers of singular vectors that all results with layer pairs were measured with, ascending."""
    measured = [{int(k) for k in ds["k"].values} for ds in results.values() if "k" in ds.coords]
    return sorted(set.intersection(*measured)) if measured else []


def mean_score(results: Results) -> tuple[list[str], Property]:
    """The benchmarks that all results have after their last step, and the mean score over them.

    Raises:
        ValueError: if they have none in common.
    """
    last = {name: ds["score"].isel(step=-1) for name, ds in results.items()}
    shared = set.intersection(
        *({str(task) for task in score["task"].values[score.notnull()]} for score in last.values())
    )
    if not shared:
        raise ValueError(
            f"{', '.join(results)} have no benchmark in common at their last steps; join others: --scores FILE"
        )
    return sorted(shared), lambda ds: float(ds["score"].isel(step=-1).sel(task=sorted(shared)).mean())


def tokens_seen(ds: xr.Dataset) -> float:
    """How many tokens the model was trained on; NaN where nothing tells."""
    # One number where all steps have the same, as a single one has.
    return float(np.ravel(ds["tokens_seen"])[-1]) if "tokens_seen" in ds.coords else float("nan")


def family(ds: xr.Dataset) -> str:
    """The architecture: the name of the model's class."""
    return str(ds.attrs["model_class"]).rpartition(".")[2]


def once(table: pd.DataFrame, cluster: str = "cluster") -> pd.DataFrame | None:
    """The rows of each cluster averaged to one; None where no two rows share one."""
    if not table[cluster].duplicated().any():
        return None
    return pd.DataFrame(table.groupby(cluster, sort=False).mean(numeric_only=True))


def subset_fits(
    table: pd.DataFrame, x: str, y: str, family: str, size: str, cluster: str | None = None
) -> pd.DataFrame:
    """`linear_fit` of y on x over all rows, each family of four or more and all but it, and the smaller and the larger half.

    Args:
        table: a row for each result, with the columns named.
        cluster: of these, what results that are not independent share.

    Returns:
        A row for each subset of four or more, and for all with each cluster averaged, if that is fewer; p_holm is p corrected
        for their number.
    """
    chosen = {"all": np.full(len(table), True)}
    kinds = table[family].value_counts()
    for kind in kinds.index if len(kinds) > 1 else ():
        chosen[f"{kind} only"] = (table[family] == kind).to_numpy()
        if len(kinds) > 2:  # without one of two families is the other one only
            chosen[f"without {kind}"] = (table[family] != kind).to_numpy()
    middle = table[size].median()
    chosen[f"{size} up to {middle:.3g}"] = (table[size] <= middle).to_numpy()
    chosen[f"{size} above {middle:.3g}"] = (table[size] > middle).to_numpy()
    parts = {name: table.loc[there] for name, there in chosen.items()}
    if cluster and (means := once(table, cluster)) is not None:
        parts = {"all": table, "all, clusters averaged": means} | parts
    out = pd.DataFrame(
        [
            {"subset": name, **linear_fit(part[x].to_numpy(), part[y].to_numpy())}
            for name, part in parts.items()
            if len(part) >= FEWEST
        ]
    )
    return out.assign(p_holm=holm(out["p"].to_numpy()))


def across(summaries: Results) -> dict[str, Any]:
    """What the page shows of several results' scores and couplings after their last steps, JSON-able.

    Args:
        summaries: as `summary` makes them, measured alike.

    Returns:
        models: the names of those compared, in whose order all lists are; clusters: theirs, and independence: a note on
        them; benchmarks, score, sizes, and fits of the score on each size; coupling: by measure, K and pairs its values,
        their interval over prompts (l != l' alone), and the fits of the score on it: linear, exponential, with sizes held
        fixed, and in subsets; and its own on each size.

    Raises:
        ValueError: if fewer than four results have what is compared.
    """
    compared = {name: ds for name, ds in summaries.items() if "score" in ds and ds.sizes.get("layer", 1) > 1}
    if len(compared) < FEWEST:
        raise ValueError(f"{len(compared)} of {len(summaries)} results have scores and layer pairs; it takes {FEWEST}")
    benchmarks, score = mean_score(compared)
    table = pd.DataFrame({name: [take(ds) for ds in compared.values()] for name, take in SIZES.items()})
    table["score"], table["family"] = [[take(ds) for ds in compared.values()] for take in (score, family)]
    table["cluster"] = clusters(compared)
    tokens = [tokens_seen(ds) for ds in compared.values()]
    if np.isfinite(tokens).all():
        table[TOKENS] = tokens
    sizes = [name for name in (*SIZES, TOKENS) if name in table]
    coupling = last_couplings(compared)
    fits = correlations(coupling, table["score"].to_numpy())
    found: dict[str, Any] = {}
    for fit in fits.to_dict("records"):
        measure, k, pairs = (
            fit.pop(name) for name in ("measure", "k", "pairs")
        )  # what is left are the fit's own numbers
        values = coupling.sel(measure=measure, k=k, pairs=pairs).values
        at = table.assign(coupling=values)
        by_k = found.setdefault(measure, {}).setdefault(int(k), {})
        by_k[pairs] = {
            "values": jsonable(values),
            "interval": [jsonable(end) for end in _intervals(compared, measure, k)]
            if pairs == "mean_offdiag"
            else None,
            "fit": _line(at, "coupling", "score", fit),
            "exponential": jsonable(exponential_fit(values, at["score"].to_numpy())),
            "held": jsonable(held_fixed(at, "coupling")),
            "subsets": jsonable(
                subset_fits(at, "coupling", "score", "family", "parameters", "cluster").to_dict("list")
            ),
            "on": {name: _line(at, name, "coupling") for name in sizes},
        }
    return {
        "models": list(compared),
        "clusters": table["cluster"].tolist(),
        "independence": independence(compared),
        "benchmarks": benchmarks,
        "score": jsonable(table["score"].to_numpy()),
        "sizes": {name: jsonable(table[name].to_numpy()) for name in sizes},
        "on": {name: _line(table, name, "score") for name in sizes},
        "coupling": found,
        "tried": int(np.isfinite(fits["p"].to_numpy()).sum()),
    }


def last_couplings(points: Results) -> xr.DataArray:
    """Over (result, measure, k, pairs), of the measures and K that all have, after the last step.

    Args:
        points: of each result, as `statistics.curves` or `summary` gives them.

    Raises:
        ValueError: if they share none.
    """
    # Without the coordinates of steps, which only some of the results may have.
    last = [ds.isel(step=-1).reset_coords(drop=True) for ds in points.values()]
    ks = shared_ks(points)
    names = [name for name in VARIANTS if all(name in ds for ds in last)]
    if not ks or not names:
        raise ValueError("the results share no K and measure of coupling; walk again with the same --k and --measures")
    chosen = [-ds[names].sel(k=ks, pairs=list(PAIRS)).to_array("measure") for ds in last]
    return xr.concat(chosen, "result").transpose("result", "measure", "k", "pairs")


def _intervals(compared: Results, measure: str, k: int) -> list[np.ndarray]:
    """Lower and upper end, over prompts."""
    ends = []
    for ds in compared.values():
        by_prompt = -ds[f"{measure}_by_prompt"].sel(k=k).isel(step=-1).values
        ends.append(mean_interval(by_prompt, sources(ds)))
    return [np.array(end) for end in zip(*ends, strict=True)]


def line(table: pd.DataFrame, x: str, y: str) -> dict[str, Any]:
    """`linear_fit` of y on x over the rows; "once": over those with each cluster averaged, None where all are their own."""
    return _both(table, lambda rows: linear_fit(rows[x].to_numpy(), rows[y].to_numpy()))


def held_fixed(table: pd.DataFrame, x: str) -> dict[str, Any]:
    """`partial_correlation` of x and score, the sizes held fixed; "once" as `line` has it."""

    def fit(rows: pd.DataFrame) -> dict[str, float]:
        sizes = [rows[name].to_numpy() for name in SIZES]
        return partial_correlation(rows[x].to_numpy(), rows["score"].to_numpy(), sizes)

    return _both(table, fit)


def _both(table: pd.DataFrame, fit: Callable[[pd.DataFrame], dict[str, float]]) -> dict[str, Any]:
    means = once(table)
    return {**fit(table), "once": None if means is None else fit(means)}


def _line(table: pd.DataFrame, x: str, y: str, fit: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """`line`, with what is known of its fit already, and where it begins."""
    found = line(table, x, y)
    return jsonable({**found, **(fit or {}), "intercept": table[y].mean() - found["slope"] * table[x].mean()})
