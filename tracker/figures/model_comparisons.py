"""Figures that compare results, one point per result, or prompts of a result: one property against another, with its fit.

Also: R^2 in subsets of the results.

Values are those after the last step. Intervals of R^2 treat results as independent (Fisher's z); intervals of a coupling are over
its prompts. Where results are not independent (`across_models.cluster_labels`), a second fit has one point per cluster.

The table of models (Table 1). Scores and training tokens are those after the last step.
"""

from collections.abc import Callable, Mapping, Sequence
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
    controlled_fit,
    fit_line,
    independence_note,
    mean_score,
    properties_of,
    shared,
    subset_fits,
    tokens_seen,
)
from tracker.analysis.curves import sources
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
    axis_of_coupling,
    coupling_name,
    coupling_of_prompts,
    coupling_word,
)
from tracker.figures.drawing import (
    BLUE,
    GREY,
    LETTERS_OF_LABEL,
    ORANGE,
    fit_text,
    fitted_line,
    label_y,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

    # A table with a row for each point, and its columns x and y
    Points = tuple[pd.DataFrame, str, str]

COUPLING, SCORE = "coupling", "score"
BENCHMARK = "gsm8k"
OF_PROMPTS = {"difficulty": "Difficulty of the prompt", "tokens": "Tokens of the prompt"}
LETTERS_PER_INCH = 19  # of a note below a figure


def comparison(
    results: Results,
    choices: Choices,
    *,
    shown: Sequence[tuple[str, str]] = ((COUPLING, SCORE),),
    every_k: bool = False,
    exponential: bool = False,
) -> "Plotted":
    """Draw properties of the results against each other, a panel for each pair (x, y), with its fit.

    Where sizes are among them, the fit of score on coupling with all sizes controlled for is stated, too.

    Args:
        shown: sizes, training tokens, coupling and score.
        every_k: repeat the panels for every K that all results have.
        exponential: draw an exponential fit, too.
    """
    properties: dict[str, Property] = {**SIZES, TRAINING_TOKENS: tokens_seen}
    _, score = mean_score(results)
    pairs = []
    for k in shared(results, "k") if every_k else [choices.k]:
        of_k = _coupling(replace(choices, k=k))
        properties |= of_k
        properties.setdefault(SCORE, score)
        coupling = next(iter(of_k))
        pairs += [tuple(coupling if of == COUPLING else of for of in pair) for pair in shown]
    named = {name for pair in pairs for name in pair}
    of_points = {name: take for name, take in properties.items() if _without_end(name) in named}
    table = _with_properties(results, of_points)
    figure, _ = _scatter([(table, x, y) for x, y in pairs], choices, exponential)
    notes = []
    if named > SIZES.keys():
        fit = controlled_fit(table, coupling)
        notes = [
            f"coupling and score, controlled for blocks, width and parameters: {fit_text(fit)} (uncorrected)"
        ]
        if fit["averaged"]:
            notes[0] += f"; {_of_averaged(fit)}"
    _annotate(figure, results, table, choices, notes)
    return figure, [table]


def benchmark_against_mean(results: Results, choices: Choices) -> "Plotted":
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
    table = _with_properties(results, properties)
    figure, _ = _scatter([(table, "mean score", task)], choices)
    _annotate(figure, results, table, choices)
    return figure, [table]


def by_prompt(results: Results, choices: Choices) -> "Plotted":
    """Draw the coupling of each prompt after the last step against its length and, where it is known, its difficulty."""
    word = coupling_word(choices)
    tables = {name: _of_prompts(name, ds, choices) for name, ds in results.items()}
    shown = [(name, x) for name, table in tables.items() for x in OF_PROMPTS if x in table]
    # Each prompt is a cluster by itself.
    points = {name: table.assign(cluster=table.index) for name, table in tables.items()}
    figure, axes = _scatter([(points[name], x, word) for name, x in shown], choices)
    for panel, (name, x) in zip(axes, shown, strict=True):
        title = f"{name}\n{panel.get_title()}"
        count = len(set(tables[name]["source"])) if "source" in tables[name] else 0
        if count > 1:
            title += f"\np treats prompts of {count} sources as independent"
        panel.set(title=title, xlabel=OF_PROMPTS[x], ylabel="")
    label_y(axes, axis_of_coupling(choices))
    if choices.ax is None and not any("difficulty" in table for table in tables.values()):
        figure.suptitle("Coupling of each prompt against its length")
    return figure, list(tables.values())


def _of_prompts(name: str, ds: xr.Dataset, choices: Choices) -> pd.DataFrame:
    """Return the row of each prompt."""
    last = ds.isel(step=-1)
    columns = {
        "result": name,
        "prompt": last["prompt_text"].values,
        "tokens": last["norm"].isel(depth=0).notnull().sum("position").values,
        coupling_word(choices): coupling_of_prompts(last, choices).values,
    }
    for column, coordinate in (("difficulty", "difficulty"), ("source", "prompt_source")):
        if coordinate in ds.coords:
            columns[column] = last[coordinate].values
    return pd.DataFrame(columns)


def subsets(results: Results, choices: Choices) -> "Plotted":
    """Draw R^2 of coupling and score for subsets of the results (Table 4)."""
    coupling = coupling_name(choices)
    properties = {**_coupling(choices), SCORE: mean_score(results)[1]}
    properties |= {"parameters": SIZES["parameters"], "architecture": architecture}
    table = _with_properties(results, properties)
    fits = subset_fits(table, coupling)
    figure, (axes,) = panels(1, choices.ax, size=(6.4, 1.2 + 0.32 * len(fits)))
    y = np.arange(len(fits))[::-1]
    r2 = fits["r2"].where(fits["n"] >= FEWEST_POINTS)
    ends = [r2 - fits["r2_low"], fits["r2_high"] - r2]
    axes.errorbar(r2, y, xerr=ends, fmt="o", color=BLUE, ms=4, capsize=2)
    labels = []
    for fit, drawn in zip(fits.to_dict("records"), r2.notna(), strict=True):
        text = f"n = {fit['n']}, p = {fit['p']:.2g} ({fit['p_holm']:.2g} corrected)"
        labels.append(f"{fit['subset']}\n{text if drawn else fit_text(fit)}")
    axes.set_yticks(y, labels)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(fits) - 0.4), xlabel=f"R² of score on {coupling}")
    _annotate(figure, results, table, choices)
    return figure, [fits]


def _scatter(
    shown: "Sequence[Points]", choices: Choices, exponential: bool = False
) -> "tuple[Figure, list[Axes]]":
    """Draw a panel for each x and y, with the points and their fit; a table has a column `cluster` where points share some.

    Bars are the intervals in the columns "NAME low" and "NAME high" of a table.
    """
    same_y = len({y for _, _, y in shown}) == 1
    figure, axes = panels(len(shown), choices.ax, sharey=same_y)
    fits = [fit_line(*points) for points in shown]
    # The panels are tests of one question.
    corrected = holm(np.array([fit["p"] for fit in fits]))
    for panel, (table, x_name, y_name), fit, p in zip(axes, shown, fits, corrected, strict=True):
        x, y = table[x_name].to_numpy(), table[y_name].to_numpy()
        bars = {"xerr": _bars(table, x_name), "yerr": _bars(table, y_name)}
        panel.errorbar(x, y, **bars, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        panel.scatter(x, y, s=16, color=BLUE, zorder=3)
        text = fitted_line(panel, x, y, fit, p if len(shown) > 1 else None)
        if fit["averaged"]:
            text += f"\n{_of_averaged(fit)}"
        curve = exponential_fit(x, y)
        if exponential and curve["n"] >= FEWEST_POINTS:
            text = f"exponential fit: R² = {curve['r2']:.2f}\n{text}"
            along = np.linspace(x.min(), x.max(), 50)
            panel.plot(along, curve["a"] * np.exp(curve["b"] * along), color=ORANGE, ls="--", lw=1)
        x_label, y_label = (fill(label, LETTERS_OF_LABEL) for label in (x_name, y_name))
        panel.set(title=text, xlabel=x_label, ylabel=y_label)
    return figure, axes


def _of_averaged(fit: Mapping[str, Any]) -> str:
    averaged = fit["averaged"]
    return f"clusters averaged (n = {averaged['n']}):\n{fit_text(averaged)}"


def _annotate(
    figure: "Figure",
    results: Results,
    table: pd.DataFrame,
    choices: Choices,
    lines: Sequence[str] = (),
) -> None:
    """Write lines below a figure, and a note on the independence of the results that a table has."""
    compared = {name: results[name] for name in table["result"]}
    _write_below(figure, choices, [*lines, independence_note(compared)])


def _write_below(figure: "Figure", choices: Choices, lines: Sequence[str]) -> None:
    """Write lines below a figure or the given axes."""
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    note = "\n".join(fill(line, letters) for line in lines)
    if choices.ax is None:
        figure.supxlabel(note, fontsize=7)
    else:
        choices.ax.set_xlabel(f"{choices.ax.get_xlabel()}\n{note}".strip(), fontsize=7)


def _bars(table: pd.DataFrame, name: str) -> Any:
    """Return the distances from each value to the ends of its interval, (2, n); None without intervals."""
    ends = [f"{name} low", f"{name} high"]
    if ends[0] not in table:
        return None
    return np.abs(table[ends].to_numpy() - table[[name]].to_numpy()).T


def _without_end(name: str) -> str:
    return name.removesuffix(" low").removesuffix(" high")


def _with_properties(results: Results, properties: Mapping[str, Callable]) -> pd.DataFrame:
    """Return a row for each result that has all properties; an interval may be missing.

    Raises:
        UsageError: if fewer than `MIN_POINTS` results have them.
    """
    needed = [name for name in properties if _without_end(name) == name]
    table = properties_of(results, properties).dropna(subset=needed, ignore_index=True)
    if len(table) < MIN_POINTS:
        raise UsageError(
            f"{len(table)} of {len(results)} results have {', '.join(needed)}; the figure needs at least {MIN_POINTS}: give "
            "more results"
        )
    return table


def _coupling(choices: Choices) -> dict[str, Property]:
    """Return as properties of a result: its coupling after the last step, and the ends of its interval over prompts."""

    def of_prompts(ds: xr.Dataset) -> xr.DataArray:
        return coupling_of_prompts(ds.isel(step=-1), choices)

    def end_of_interval(which: int) -> Property:
        return lambda ds: float(mean_interval(of_prompts(ds).values, sources(ds))[which])

    name = coupling_name(choices)
    return {
        name: lambda ds: float(of_prompts(ds).mean()),
        f"{name} low": end_of_interval(0),
        f"{name} high": end_of_interval(1),
    }


def table_of_models(results: Results, choices: Choices) -> "Plotted":
    """Draw architecture, sizes, training tokens and mean score of each result; NaN where unknown.

    The mean is over the benchmarks that all results with scores have.
    """
    scored = {
        name: ds
        for name, ds in results.items()
        if "score" in ds and ds["score"].isel(step=-1).notnull().any()
    }
    properties = {"architecture": architecture, **SIZES, TRAINING_TOKENS: tokens_seen}
    table = (
        properties_of(results, properties).drop(columns="cluster").astype(dict.fromkeys(SIZES, int))
    )
    benchmarks: list[str] = []
    table[SCORE] = np.nan
    if scored:
        benchmarks, score = mean_score(scored)
        table[SCORE] = [score(ds) if name in scored else np.nan for name, ds in results.items()]
    cells = {str(name): _texts(str(name), values.tolist()) for name, values in table.items()}
    letters = [max(map(len, (name, *texts))) for name, texts in cells.items()]
    size = 1 + 0.1 * sum(letters), 1.2 + 0.25 * len(table)
    figure, (axes,) = panels(1, choices.ax, size=size)
    axes.axis("off")
    drawn = axes.table(
        list(zip(*cells.values(), strict=True)),
        colLabels=list(cells),
        colWidths=[count / sum(letters) for count in letters],
        loc="center",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    notes = ["scores of benchmarks: joined by a walk, see docs/checkpoints.md"]
    if benchmarks:
        notes = [f"score: mean of {', '.join(benchmarks)}"]
    if np.isnan(table[TRAINING_TOKENS].to_numpy(float)).any():
        notes.append(
            "training tokens: read by a walk from the names of checkpoints, see docs/checkpoints.md"
        )
    _write_below(figure, choices, notes)
    return figure, [table]


def _texts(name: str, column: list[Any]) -> list[str]:
    """Return the cells of a column; a dash where a value is unknown."""
    forms = {SCORE: "{:.4f}", TRAINING_TOKENS: "{:,.0f}"}
    form = forms.get(name, "{:,}" if isinstance(column[0], int) else "{}")
    return ["—" if value != value else form.format(value) for value in column]
