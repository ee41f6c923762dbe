"""Figures that compare results, one point per result: one property against another, subsets, definitions of coupling.

Values are those after the last step. Intervals of R^2 treat results as independent (Fisher's z); intervals of a coupling are over
its prompts. Where results are not independent (`across_models.cluster_labels`), a second fit has one point per cluster.

The table of models (Table 1). Scores and training tokens are those after the last step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import (
    SIZES,
    TRAINING_TOKENS,
    Property,
    Results,
    architecture,
    cluster_labels,
    controlled_fit,
    final_couplings,
    fit_line,
    independence_note,
    mean_score,
    shared,
    subset_fits,
    tokens_seen,
)
from tracker.analysis.curves import correlations, curves, sources
from tracker.analysis.regression import (
    FEWEST_POINTS,
    MIN_POINTS,
    exponential_fit,
    holm,
    mean_interval,
)
from tracker.common.errors import UsageError
from tracker.figures.choices import Choices
from tracker.figures.coupling import (
    coupling_name,
    coupling_of_prompts,
    coupling_word,
)
from tracker.figures.drawing import (
    BLUE,
    DIVERGING,
    GREY,
    LETTERS_OF_LABEL,
    ORANGE,
    PAIR_WORDS,
    colour_map,
    definition,
    fit_text,
    fitted_line,
    panels,
)
from tracker.measures.declaration import NORMED
from tracker.measures.registry import MISCOUPLINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted


BENCHMARK = "gsm8k"
LETTERS_PER_INCH = 19  # of a note below a figure
INCHES_PER_LETTER = 0.065  # of a label of 8 points


def score_against_coupling(
    results: Results, choices: Choices, target: "Axes | None", *, exponential: bool = False
) -> "Plotted":
    """Draw the score against coupling, with a straight line and, if `exponential`, an exponential fit (Figs 1a and 7)."""
    coupling, properties = _coupling_and_score(results, choices)
    return _scatter(results, properties, [(coupling, "score")], target, exponential)


def score_against_coupling_by_k(
    results: Results, choices: Choices, target: "Axes | None"
) -> "Plotted":
    """Draw the score against coupling for every K that all results have (Fig. 36)."""
    ks = shared(results, "k")
    properties: dict[str, Property] = {}
    shown = []
    for k in ks:
        coupling, of_k = _coupling_and_score(results, replace(choices, k=k))
        properties |= of_k
        shown.append((coupling, "score"))
    return _scatter(results, properties, shown, target)


def score_against_sizes(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the score against depth, width, parameters and coupling, and fit coupling with the sizes controlled for (Fig. 35)."""
    coupling, properties = _coupling_and_score(results, choices)
    shown = [(name, "score") for name in (*SIZES, coupling)]
    figure, table = _scatter(results, SIZES | properties, shown, target)
    fit = controlled_fit(table, coupling)
    text = f"coupling and score, controlled for blocks, width and parameters: {fit_text(fit)} (uncorrected)"
    if fit["averaged"]:
        text += f"; clusters averaged (n = {fit['averaged']['n']}): {fit_text(fit['averaged'])}"
    _annotate(figure, _in_table(results, table), [text], target)
    return figure, table


def against_training_tokens(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw coupling and score against the number of training tokens (Fig. 8)."""
    coupling, properties = _coupling_and_score(results, choices)
    shown = [(TRAINING_TOKENS, coupling), (TRAINING_TOKENS, "score")]
    return _scatter(results, {TRAINING_TOKENS: tokens_seen} | properties, shown, target)


def benchmark_against_mean(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
    """Draw the score on GSM8K against the mean score over the benchmarks that all results have, GSM8K included (Fig. 31).

    Raises:
        UsageError: if not all results have a score on GSM8K.
    """
    benchmarks, score = mean_score(results)
    variants = [task for task in benchmarks if BENCHMARK in task.lower()]
    if not variants:
        raise UsageError(
            f"the results have {', '.join(benchmarks)} in common, but not {BENCHMARK}; join its scores: --scores FILE"
        )
    task = min(variants, key=len)  # prefer "gsm8k" to "gsm8k_cot"
    properties: dict[str, Property] = {
        "mean score": score,
        task: lambda ds: float(ds["score"].isel(step=-1).sel(task=task)),
    }
    return _scatter(results, properties, [("mean score", task)], target)


def subsets(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw R^2 of coupling and score for subsets of the results (Table 4)."""
    coupling, properties = _coupling_and_score(results, choices)
    table = _properties(
        results, properties | {"parameters": SIZES["parameters"], "architecture": architecture}
    )
    fits = subset_fits(table, coupling)
    figure, (axes,) = panels(1, target, size=(6.4, 1.2 + 0.32 * len(fits)))
    y = np.arange(len(fits))[::-1]
    r2 = fits["r2"].where(fits["n"] >= FEWEST_POINTS)
    ends = np.abs([fits["r2_low"] - r2, fits["r2_high"] - r2])
    axes.errorbar(r2, y, xerr=ends, fmt="o", color=BLUE, ms=4, capsize=2)
    labels = []
    for fit, drawn in zip(fits.to_dict("records"), r2.notna(), strict=True):
        text = f"n = {fit['n']}, p = {fit['p']:.2g} ({fit['p_holm']:.2g} corrected)"
        labels.append(f"{fit['subset']}\n{text if drawn else fit_text(fit)}")
    axes.set_yticks(y, labels)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(fits) - 0.4), xlabel=f"R² of score on {coupling}")
    _annotate(figure, _in_table(results, table), [], target)
    return figure, fits


def definitions(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the correlation of the score with coupling by each mis-coupling, K and choice of layer pairs."""
    score = mean_score(results)[1]
    measures = [*MISCOUPLINGS, *(f"{name}{NORMED}" for name in MISCOUPLINGS)]
    points = {name: curves(ds.isel(step=[-1]), measures) for name, ds in results.items()}
    couplings = final_couplings(points, below_null=not choices.paper)
    scores = np.array([score(ds) for ds in results.values()])
    table = correlations(couplings, scores, clusters=cluster_labels(results))
    labels = {name: definition(name) for name in measures}
    figure = correlation_heatmap(
        table.replace({"measure": labels}), "score", target, coupling_word(choices)
    )
    _annotate(figure, results, [], target)
    return figure, table


def correlation_heatmap(
    table: pd.DataFrame, y: str, target: "Axes | None" = None, coupling: str = "coupling"
) -> "Figure":
    """Draw r of coupling and y by definition, layer pairs and K; a star marks corrected p below 0.05.

    Of fewer than `FEWEST_POINTS` points, the number of points is drawn instead of r.

    Args:
        table: the rows of `statistics.correlations`.
        coupling: what they hold of a definition, in words.
    """
    ks = sorted(set(table.k))
    definitions = list(dict.fromkeys(zip(table.measure, table.pairs, strict=True)))
    rows = table.set_index(["measure", "pairs", "k"])
    labels = [f"{measure}, {PAIR_WORDS[pairs]}" for measure, pairs in definitions]
    beside = 1.5 + INCHES_PER_LETTER * max(map(len, labels))  # labels, and the bar of colours
    size = beside + 0.9 * len(ks), 0.9 + 0.33 * len(definitions)
    figure, (axes,) = panels(1, target, size=size)
    axes.grid(False)
    enough = rows.r.where(rows.n >= FEWEST_POINTS)
    r = np.array([[enough[(measure, pairs, k)] for k in ks] for measure, pairs in definitions])
    image = axes.imshow(r, cmap=colour_map(DIVERGING), vmin=-1, vmax=1, aspect="auto")
    for i, j in np.ndindex(r.shape):
        star = "*" if rows.p_holm[(*definitions[i], ks[j])] < 0.05 else ""
        colour = "white" if abs(r[i, j]) > 0.6 else "black"
        text = (
            f"{r[i, j]:z.2f}{star}".replace("-", "−")
            if np.isfinite(r[i, j])
            else f"n = {rows.n[(*definitions[i], ks[j])]}"
        )
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(ks)), [f"K = {k}" for k in ks])
    axes.set_yticks(range(len(definitions)), labels, fontsize=8)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(f"Correlation r of {coupling} and {y}\n(*: p < 0.05, corrected)")
    return figure


def _scatter(
    results: Results,
    properties: Mapping[str, Property],
    shown: Sequence[tuple[str, str]],
    target: "Axes | None",
    exponential: bool = False,
) -> "Plotted":
    """Draw a panel for each pair of properties (x, y), with one point per result and the fit.

    Args:
        properties: functions of a result; "NAME low" and "NAME high" are the interval of NAME.
    """
    table = _properties(results, properties)
    figure, axes = panels(len(shown), target, sharey=len({y for _, y in shown}) == 1)
    fits = [fit_line(table, x, y) for x, y in shown]
    # The panels are tests of one question.
    corrected = holm(np.array([fit["p"] for fit in fits]))
    for panel, (x_name, y_name), fit, p in zip(axes, shown, fits, corrected, strict=True):
        x, y = table[x_name].to_numpy(), table[y_name].to_numpy()
        bars = {"xerr": _bars(table, x_name), "yerr": _bars(table, y_name)}
        panel.errorbar(x, y, **bars, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        panel.scatter(x, y, s=16, color=BLUE, zorder=3)
        text = fitted_line(panel, x, y, fit, p if len(shown) > 1 else None)
        if fit["averaged"]:
            text += (
                f"\nclusters averaged (n = {fit['averaged']['n']}):\n{fit_text(fit['averaged'])}"
            )
        curve = exponential_fit(x, y)
        if exponential and curve["n"] >= FEWEST_POINTS:
            text = f"exponential fit: R² = {curve['r2']:.2f}\n{text}"
            along = np.linspace(x.min(), x.max(), 50)
            panel.plot(along, curve["a"] * np.exp(curve["b"] * along), color=ORANGE, ls="--", lw=1)
        x_label, y_label = (fill(label, LETTERS_OF_LABEL) for label in (x_name, y_name))
        panel.set(title=text, xlabel=x_label, ylabel=y_label)
    _annotate(figure, _in_table(results, table), [], target)
    return figure, table


def _annotate(
    figure: "Figure", compared: Results, texts: Sequence[str], target: "Axes | None"
) -> None:
    """Write texts below a figure or the given axes, and a note on the independence of the results compared."""
    _note(figure, [*texts, independence_note(compared)], target)


def _note(figure: "Figure", lines: Sequence[str], target: "Axes | None") -> None:
    """Write lines below a figure or the given axes."""
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    note = "\n".join(fill(line, letters) for line in lines if line)
    if target is None:
        figure.supxlabel(note, fontsize=7)
    else:
        target.set_xlabel(f"{target.get_xlabel()}\n{note}".strip(), fontsize=7)


def _in_table(results: Results, table: pd.DataFrame) -> Results:
    return {name: results[name] for name in table["result"]}


def _bars(table: pd.DataFrame, name: str) -> Any:
    """Return the distances from each value to the ends of its interval, (2, n); None without intervals."""
    if f"{name} low" not in table:
        return None
    return np.abs([table[f"{name} low"] - table[name], table[f"{name} high"] - table[name]])


def _properties(results: Results, properties: Mapping[str, Property]) -> pd.DataFrame:
    """Return a row for each result that has all properties; an interval may be missing.

    Raises:
        UsageError: if fewer than `MIN_POINTS` results have them.
    """
    rows = [
        {"result": name, "cluster": cluster, **{p: take(ds) for p, take in properties.items()}}
        for (name, ds), cluster in zip(results.items(), cluster_labels(results), strict=True)
    ]
    needed = [name for name in properties if not name.endswith((" low", " high"))]
    table = pd.DataFrame(rows).dropna(subset=needed, ignore_index=True)
    if len(table) < MIN_POINTS:
        raise UsageError(
            f"{len(table)} of {len(results)} results have {', '.join(needed)}; the figure needs at least {MIN_POINTS}: give "
            "more results"
        )
    return table


def _coupling_and_score(results: Results, choices: Choices) -> tuple[str, dict[str, Property]]:
    """Return the name of the coupling, and as properties: the coupling, its interval over prompts, and the score."""

    def of_prompts(ds: xr.Dataset) -> xr.DataArray:
        return coupling_of_prompts(ds.isel(step=[-1]), choices).transpose("step", "prompt")

    def interval(ds: xr.Dataset, end: int) -> float:
        return float(mean_interval(of_prompts(ds).values, sources(ds))[end][0])

    name = coupling_name(choices)
    return name, {
        name: lambda ds: float(of_prompts(ds).mean()),
        f"{name} low": lambda ds: interval(ds, 0),
        f"{name} high": lambda ds: interval(ds, 1),
        "score": mean_score(results)[1],
    }


def table_of_models(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
    """Draw architecture, sizes, training tokens and mean score of each result; NaN where unknown.

    The mean is over the benchmarks that all results with scores have.
    """
    scored = {
        name: ds
        for name, ds in results.items()
        if "score" in ds and ds["score"].isel(step=-1).notnull().any()
    }
    benchmarks, score = mean_score(scored) if scored else ([], lambda _: float("nan"))
    rows = []
    for name, ds in results.items():
        row: dict[str, Any] = {"result": name, "architecture": architecture(ds)}
        row |= {size: int(take(ds)) for size, take in SIZES.items()}
        row[TRAINING_TOKENS] = tokens_seen(ds)
        row["score"] = score(ds) if name in scored else float("nan")
        rows.append(row)
    table = pd.DataFrame(rows)
    return _draw_table(table, benchmarks, target), table


def _draw_table(table: pd.DataFrame, benchmarks: list[str], target: "Axes | None") -> "Figure":
    cells = [
        [_cell(str(column), value) for column, value in row.items()]
        for row in table.to_dict("records")
    ]
    widths = [
        max(map(len, (column, *texts)))
        for column, texts in zip(table, zip(*cells, strict=True), strict=True)
    ]
    width = 1 + 0.1 * sum(widths)
    figure, (axes,) = panels(1, target, size=(width, 1.2 + 0.25 * len(cells)))
    axes.axis("off")
    shares = [width / sum(widths) for width in widths]
    drawn = axes.table(
        cells, colLabels=[str(column) for column in table], colWidths=shares, loc="center"
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    notes = (
        [f"score: mean of {', '.join(benchmarks)}"]
        if benchmarks
        else ["scores of benchmarks: joined by a walk, see docs/checkpoints.md"]
    )
    if np.isnan(table[TRAINING_TOKENS].to_numpy(float)).any():
        notes.append(
            "training tokens: read by a walk from the names of checkpoints, see docs/checkpoints.md"
        )
    _note(figure, notes, target)
    return figure


def _cell(column: str, value: Any) -> str:
    """Return the text of a cell; a dash where the value is unknown."""
    if isinstance(value, float) and np.isnan(value):
        return "—"
    if column == "score":
        return f"{value:.4f}"
    if column == TRAINING_TOKENS:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
