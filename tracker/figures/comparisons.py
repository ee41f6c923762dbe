"""Plots that set results beside each other, a point for each: one property against another, over subsets, by definition.

Each gives the figure and the numbers it plots, as `plots` does. Intervals of R^2 take results as independent (Fisher's z), those
of a coupling are over its prompts. Where results are twins (`twins`), a second fit counts each cluster of them once.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import (
    SIZES,
    TRAINING_TOKENS,
    Property,
    architecture,
    controlled_fit,
    final_couplings,
    fit_line,
    mean_score,
    shared_ks,
    subset_fits,
    tokens_seen,
)
from tracker.analysis.clusters import cluster_labels, independence_note
from tracker.analysis.regression import MIN_POINTS, exponential_fit, holm, mean_interval
from tracker.analysis.statistics import correlations, curves, sources
from tracker.figures.drawing import PAIR_WORDS, fit_words, fitted_line, panels
from tracker.figures.palette import BLUE, DIVERGING, GREY, ORANGE
from tracker.figures.plots import Results, prompt_couplings
from tracker.measures.registry import MISCOUPLINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tracker.figures.plots import Plotted

NORMALISED, PAIRS = "offdiag_normalized", "mean_offdiag"
BENCHMARK = "gsm8k"
WRAPPED = 19  # letters of a note to the inch


def against_score(results: Results, k: int, exponential: bool = False) -> "Plotted":
    """The score against coupling (Figs 1a and 7)."""
    coupling, properties = _scored(results, k)
    return _models(results, properties, [(coupling, "score")], exponential)


def every_k(results: Results, _: int) -> "Plotted":
    """The same for every K that all results have (Fig. 36)."""
    ks = shared_ks(results)
    properties: dict[str, Property] = {}
    for k in ks:
        properties |= _scored(results, k)[1]
    return _models(results, properties, [(f"coupling, K = {k}", "score") for k in ks])


def sizes(results: Results, k: int) -> "Plotted":
    """The score against depth, width, parameters and coupling, and against coupling with the others held fixed (Fig. 35)."""
    coupling, scored = _scored(results, k)
    shown = [(name, "score") for name in (*SIZES, coupling)]
    figure, table = _models(results, SIZES | scored, shown)
    fit = controlled_fit(table, coupling)
    said = f"coupling and score, blocks, width and parameters held fixed: {fit_words(fit)} (uncorrected)"
    if fit["averaged"]:
        said += f"; clusters averaged (n = {fit['averaged']['n']}): {fit_words(fit['averaged'])}"
    _note(figure, results, table, said)
    return figure, table


def over_tokens(results: Results, k: int) -> "Plotted":
    """Coupling and score against the tokens trained on (Fig. 8)."""
    coupling, scored = _scored(results, k)
    return _models(
        results, {TRAINING_TOKENS: tokens_seen} | scored, [(TRAINING_TOKENS, coupling), (TRAINING_TOKENS, "score")]
    )


def against_the_mean(results: Results) -> "Plotted":
    """The score on GSM8K against the mean score over the benchmarks that all results have, GSM8K among them (Fig. 31).

    Raises:
        ValueError: if not all results have it.
    """
    benchmarks, score = mean_score(results)
    named = [task for task in benchmarks if BENCHMARK in task.lower()]
    if not named:
        raise ValueError(
            f"the results have {', '.join(benchmarks)} in common, but not {BENCHMARK}; join its scores: --scores FILE"
        )
    one = min(named, key=len)  # the plain task, where a variant of it is there too
    properties: dict[str, Property] = {
        "mean score": score,
        one: lambda ds: float(ds["score"].isel(step=-1).sel(task=one)),
    }
    return _models(results, properties, [("mean score", one)])


def subsets(results: Results, k: int) -> "Plotted":
    """R^2 of coupling and score for subsets of the results (Table 4)."""
    coupling, scored = _scored(results, k)
    table = _table(results, scored | {"parameters": SIZES["parameters"], "architecture": architecture})
    fits = subset_fits(table, coupling, "score", "architecture", "parameters", "cluster")
    figure = _of_subsets(fits)
    _note(figure, results, table)
    figure.axes[0].set_xlabel(f"R² of score on {coupling}", fontsize=8)
    return figure, fits


def definitions(results: Results, _: int) -> "Plotted":
    """How well the score follows each mis-coupling, K and choice of layer pairs after the last step."""
    score = mean_score(results)[1]
    measures = [*MISCOUPLINGS, *(f"{name}_raw" for name in MISCOUPLINGS)]
    coupling = final_couplings({name: curves(ds.isel(step=[-1]), measures) for name, ds in results.items()})
    table = correlations(coupling, np.array([score(ds) for ds in results.values()]), clusters=cluster_labels(results))
    figure = what_follows(table, "score")
    figure.supxlabel(fill(independence_note(results), int(WRAPPED * figure.get_figwidth())), fontsize=7)
    return figure, table


def what_follows(table: pd.DataFrame, y: str) -> "Figure":
    """R of coupling and y by mis-coupling, K and layer pairs; a star where p, corrected, is below 0.05."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    ks, kinds = sorted(set(table.k)), list(dict.fromkeys(zip(table.measure, table.pairs, strict=True)))
    found = table.set_index(["measure", "pairs", "k"])
    figure = Figure(figsize=(2.8 + 0.9 * len(ks), 0.9 + 0.33 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    r = np.array([[found.r[(measure, pairs, k)] for k in ks] for measure, pairs in kinds])
    colours = LinearSegmentedColormap.from_list("diverging", DIVERGING)
    image = axes.imshow(r, cmap=colours, vmin=-1, vmax=1, aspect="auto")
    for i, j in np.ndindex(r.shape):
        star = "*" if found.p_holm[(*kinds[i], ks[j])] < 0.05 else ""
        ink = "white" if abs(r[i, j]) > 0.6 else "black"
        axes.text(j, i, f"{r[i, j]:.2f}{star}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(ks)), [f"K = {k}" for k in ks])
    axes.set_yticks(range(len(kinds)), [f"{measure}, {PAIR_WORDS[pairs]}" for measure, pairs in kinds], fontsize=8)
    figure.colorbar(image, label=f"r of coupling and {y}; *: p < 0.05, corrected")
    return figure


def _models(
    results: Results, properties: Mapping[str, Property], shown: Sequence[tuple[str, str]], exponential: bool = False
) -> "Plotted":
    """A panel for each pair of properties (x, y), a point for each result, with the fit.

    Args:
        properties: what to take from each result; "NAME low" and "NAME high" are the interval of NAME.
    """
    table = _table(results, properties)
    figure, axes = panels(len(shown), sharey=len({y for _, y in shown}) == 1)
    lines = [fit_line(table, x, y) for x, y in shown]
    tried = holm(np.array([found["p"] for found in lines]))
    for panel, (name, against), found, corrected in zip(axes, shown, lines, tried, strict=True):
        x, y = table[name].to_numpy(), table[against].to_numpy()
        bars = {"xerr": _bars(table, name), "yerr": _bars(table, against)}
        panel.errorbar(x, y, **bars, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        panel.scatter(x, y, s=16, color=BLUE, zorder=3)
        said = fitted_line(panel, x, y, found, corrected if len(shown) > 1 else None)
        if found["averaged"]:
            said += f"\nclusters averaged (n = {found['averaged']['n']}):\n{fit_words(found['averaged'])}"
        if exponential:
            fit = exponential_fit(x, y)
            said = f"exponential fit: R² = {fit['r2']:.2f}\n{said}"
            along = np.linspace(x.min(), x.max(), 50)
            panel.plot(along, fit["a"] * np.exp(fit["b"] * along), color=ORANGE, ls="--", lw=1)
        panel.set_title(said, fontsize=8)
        panel.set_xlabel(name, fontsize=8)
        panel.set_ylabel(against, fontsize=8)
    _note(figure, results, table)
    return figure, table


def _note(figure: "Figure", results: Results, table: pd.DataFrame, said: str = "") -> None:
    """Below a figure: what is said, and how far the results in the table are independent."""
    compared = {name: results[name] for name in table["result"]}
    lines = [*([said] if said else []), independence_note(compared)]
    width = int(WRAPPED * figure.get_figwidth())
    figure.supxlabel("\n".join(fill(line, width) for line in lines), fontsize=7)


def _of_subsets(table: pd.DataFrame) -> "Figure":
    """R^2 of each of `subset_fits`."""
    figure, (axes,) = panels(1)
    figure.set_size_inches(6.4, 1.2 + 0.32 * len(table))
    place = np.arange(len(table))[::-1]
    ends = np.abs([table["r2_low"] - table["r2"], table["r2_high"] - table["r2"]])
    axes.errorbar(table["r2"], place, xerr=ends, fmt="o", color=BLUE, ms=4, capsize=2)
    labels = [
        f"{fit['subset']}\nn = {fit['n']}, p = {fit['p']:.2g} ({fit['p_holm']:.2g} corrected)"
        for fit in table.to_dict("records")
    ]
    axes.set_yticks(place, labels, fontsize=7)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(table) - 0.4))
    return figure


def _bars(table: pd.DataFrame, name: str) -> Any:
    """Below and above each value, as far as its interval goes; None where it has none."""
    if f"{name} low" not in table:
        return None
    return np.abs([table[f"{name} low"] - table[name], table[f"{name} high"] - table[name]])


def _table(results: Results, properties: Mapping[str, Property]) -> pd.DataFrame:
    """A row for each result that has all of them; an interval may be lacking.

    Raises:
        ValueError: if too few have.
    """
    rows = [
        {"result": name, "cluster": cluster, **{p: take(ds) for p, take in properties.items()}}
        for (name, ds), cluster in zip(results.items(), cluster_labels(results), strict=True)
    ]
    needed = [name for name in properties if not name.endswith((" low", " high"))]
    table = pd.DataFrame(rows).dropna(subset=needed, ignore_index=True)
    if len(table) < MIN_POINTS:
        raise ValueError(
            f"{len(table)} of {len(results)} results have all that is compared ({', '.join(needed)}); it takes {MIN_POINTS}"
        )
    return table


def _coupling(k: int) -> Property:
    def take(ds: xr.Dataset) -> float:
        by_prompt = prompt_couplings(ds, NORMALISED, PAIRS, k)["coupling"]
        return float(by_prompt.isel(step=-1).mean())

    return take


def _scored(results: Results, k: int) -> tuple[str, dict[str, Property]]:
    """The coupling's name; it, its interval over prompts, and the score."""
    name = f"coupling, K = {k}"
    properties = {name: _coupling(k), **_interval(name, k), "score": mean_score(results)[1]}
    return name, properties


def _interval(name: str, k: int) -> dict[str, Property]:
    def end(which: int) -> Property:
        def take(ds: xr.Dataset) -> float:
            last = prompt_couplings(ds.isel(step=[-1]), NORMALISED, PAIRS, k)["coupling"]
            return float(mean_interval(last.transpose("step", "prompt").values, sources(ds))[which][0])

        return take

    return {f"{name} low": end(0), f"{name} high": end(1)}
