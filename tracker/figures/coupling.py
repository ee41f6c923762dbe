"""Figures of coupling between blocks over training, between layers and by layer, and the couplings that figures show.

Coupling is the null level minus the mis-coupling; by the paper's convention it is minus the mis-coupling, and is called so
(`choices.Choices`). Intervals are 95 % t intervals of means over prompts, clustered by their sources where results
record them (`regression.clustered_mean`).
"""

from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import (
    SAMPLES,
    curves,
    labelled_over_pairs,
    onset_of,
)
from tracker.analysis.null_levels import null_level
from tracker.analysis.onset import Onset, pairs_of_blocks
from tracker.analysis.pairs import where_counted
from tracker.analysis.variables import evenly_spaced
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    GREEN,
    GREY,
    LETTERS_OF_LABEL,
    LETTERS_OF_LEGEND,
    ORANGE,
    PAIR_WORDS,
    SERIES,
    at_step,
    banded_line,
    definition,
    label_y,
    legend_below,
    logarithmic_y,
    mark_step,
    of_means,
    panels,
    shades,
    training_axis,
)
from tracker.measures.declaration import WITH_NORM
from tracker.measures.registry import BY_NAME
from tracker.store import by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

# Of the measures drawn of a single result
COLOURS = {"miscoupling": BLUE, "offdiag_normalized": ORANGE}
TRAJECTORY = {
    "lss": "Line-shape score\n(1: straight)",
    "expodistance": "Expodistance\n(0: exponential growth)",
}
MEASURE = "offdiag_normalized"  # the paper's "normalized"
HALF = 0.5  # of the largest coupling


def training_curves(results: Results, choices: Choices) -> "Plotted":
    """Draw coupling, LSS and expodistance over training, with quartile bands.

    Several results are drawn over each other, each in its colour, and runs of a recipe in one. Unless a measure is chosen,
    coupling by m_K is shown and, of a single result, that by the paper's equation 14 too.
    """
    figure, axes = panels(1 + len(TRAJECTORY), choices.ax, size=(3.3, 3.2))
    coupling, lss, expodistance = axes
    single = len(results) == 1
    colours = {choices.variable(measure): colour for measure, colour in COLOURS.items()}
    measures = list(colours) if single else list(colours)[:1]
    if choices.measure:
        measures = [choices.measure]
    paths = {choices.variable(path): heading for path, heading in TRAJECTORY.items()}
    recipes = choices.recipes or {name: [name] for name in results}
    # Lines of a recipe have one colour, and the first has its label.
    of_lines = {
        name: (colour, recipe if name == names[0] else None)
        for (recipe, names), colour in zip(recipes.items(), cycle(SERIES["light"]), strict=False)
        for name in names
    }
    tables, any_suspect = [], False
    for name, ds in results.items():
        points = curves(ds, [*measures, *paths])
        columns: dict[str, Any] = {"result": name, "step": points["step"].values}
        of_result, of_recipe = (None, None) if single else of_lines[name]
        for measure in measures:
            label = f"by {definition(measure)}" if single else of_recipe
            colour = of_result or colours.get(measure, BLUE)
            columns |= _draw_curve(coupling, points, measure, choices, colour, label)
        for panel, path in zip((lss, expodistance), paths, strict=True):
            columns |= _draw_curve(panel, points, path, choices, of_result or GREEN, None)
        tables.append(pd.DataFrame(columns))
        any_suspect |= (by_step(points, "suspect") != "").any()
    title = f"Pairs of blocks, {PAIR_WORDS[choices.pairs]}, K = {choices.k}"
    title += "" if single else f"\nby {definition(measures[0])}"
    coupling.axhline(0, color=GREY, ls=":", label="unrelated blocks")
    coupling.set(title=title, ylabel="Coupling\n(0: unrelated blocks)")
    for panel, (path, heading) in zip((lss, expodistance), paths.items(), strict=True):
        norm = WITH_NORM if BY_NAME[path].variant == "normed" else ""
        panel.set(ylabel=heading, title=norm)
    logarithmic_y(expodistance)
    for panel in axes:
        training_axis(panel, *(ds["step"].values for ds in results.values()), scale=choices.axis)
        mark_step(panel, choices.step)
    legend_below(coupling)
    if any_suspect:
        legend_below(lss)
    (first, *_) = results.values()
    figure.suptitle(first.attrs.get("suite", "") if single else "")
    return figure, tables


def _draw_curve(
    panel: "Axes",
    points: xr.Dataset,
    variable: str,
    choices: Choices,
    colour: str,
    label: str | None,
) -> dict[str, np.ndarray]:
    """Draw a variable of `curves`, of a mis-coupling the coupling, with quartiles and suspect steps; return columns."""
    steps, marked = points["step"].values, by_step(points, "suspect") != ""
    if "statistic" in points[variable].dims:
        q25, middle, q75 = points[variable].transpose("statistic", "step").values
        columns = {variable: middle, f"{variable}_q25": q25, f"{variable}_q75": q75}
    else:
        at = points.sel(k=choices.k, pairs=choices.pairs)
        ends = ("", "_q25", "_q75", "_null")
        value, q25, q75, null = (at[f"{variable}{end}"].values for end in ends)
        middle, name = null - value, f"{variable}_coupling"
        columns = {name: middle, f"{name}_q25": null - q75, f"{name}_q75": null - q25}
        columns |= {variable: value, f"{variable}_null": null}
    banded_line(panel, {"step": steps, **columns}, colour, label)
    if marked.any():
        values = middle[marked]
        panel.plot(steps[marked], values, "x", color=ORANGE, ms=9, label="suspect checkpoint")
    return columns


def over_training(results: Results, choices: Choices) -> "Plotted":
    """Draw the mean coupling over prompts with its interval, that of unrelated blocks, and the onset (Fig. 1b)."""
    figure, axes = panels(len(results), choices.ax, sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        coupling, unrelated = (
            _of_prompts(values, ds, choices) for values in _of_pairs(ds, choices)
        )
        began = _onset(ds, choices)
        columns = of_means(coupling, "step", ds, coupling_word(choices))
        banded_line(panel, columns, BLUE)
        columns["unrelated"] = unrelated.mean("prompt").values
        panel.plot("step", "unrelated", data=columns, color=GREY, ls=":", label="unrelated blocks")
        _mark_onset(panel, began)
        training_axis(panel, columns["step"], [began.low], scale=choices.axis)
        mark_step(panel, choices.step)
        panel.set_title(name)
        legend_below(panel)
        of_onset = {"onset_after": began.earlier, "onset_by": began.later}
        of_onset |= {"onset_low": began.low, "onset_high": began.high}
        rows.append(pd.DataFrame({"result": name, **columns, **of_onset}))
    label_y(axes, axis_of_coupling(choices))
    return figure, rows


def _onset(ds: xr.Dataset, choices: Choices) -> Onset:
    """Return the onset of the coupling that is shown, by the package's convention."""
    below = _below_null(ds, choices)
    return onset_of(ds, _departure(below, ds), below.mean(SAMPLES))


def _departure(below: xr.DataArray, ds: xr.Dataset) -> xr.DataArray:
    """Return how far each prompt is below the null level, the mean over pairs of different blocks and tokens."""
    return labelled_over_pairs(below, ds).sel(pairs="mean_offdiag").mean("token")


def _mark_onset(panel: "Axes", began: Onset) -> None:
    """Shade the steps between which the onset lies, lighter over its whole interval, and state them in the legend."""
    label = fill(f"onset: {began.words}", LETTERS_OF_LEGEND)
    if not began.found:
        panel.plot([], [], " ", label=label)
        return
    panel.axvspan(began.low, began.high, color=ORANGE, alpha=0.12, lw=0)
    # The edges show a bracket of no width: an onset at step 0.
    style = {"facecolor": (ORANGE, 0.15), "edgecolor": ORANGE, "lw": 0.8}
    panel.axvspan(began.earlier, began.later, label=label, **style)


def layer_graph(results: Results, choices: Choices) -> "Plotted":
    """Draw blocks as nodes on a circle; width and opacity of an edge show their coupling, the mean of both directions."""
    from matplotlib.collections import LineCollection

    shown = [(name, ds, i) for name, ds in results.items() for i in _around_onset(ds, choices)]
    figure, axes = panels(len(shown), choices.ax)
    tables = []
    for name, ds, i in shown:
        matrix = _below_null(ds.isel(step=i), choices).mean(SAMPLES)
        matrix = matrix if choices.paper else where_counted(matrix, ds)
        values = pairs_of_blocks(matrix.transpose("layer", "layer_other").values)
        first, second = np.triu_indices(ds.sizes["layer"], 1)
        edges = {"layer": first + 1, "layer_other": second + 1, "coupling": values}
        tables.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **edges}))
    table = pd.concat(tables, ignore_index=True)
    # One scale for all panels; where no pair is coupled, no edge is drawn.
    top = max(table["coupling"].max(), np.finfo(float).tiny)
    for panel, edges, (name, ds, i) in zip(axes, tables, shown, strict=True):
        L = ds.sizes["layer"]
        angles = np.pi / 2 - 2 * np.pi * np.arange(L) / L
        places = np.stack([np.cos(angles), np.sin(angles)], 1)
        ends = places[edges[["layer", "layer_other"]].values - 1]
        weights = (edges["coupling"] / top).clip(0).fillna(0).values
        colours = [(BLUE, weight) for weight in weights]
        lines = LineCollection(list(ends), linewidths=0.3 + 2.5 * weights, colors=colours, zorder=1)
        panel.add_collection(lines)
        panel.scatter(*places.T, s=90, color="white", edgecolor=GREY, zorder=2)
        for layer, (x, y) in enumerate(places, 1):
            panel.text(x, y, str(layer), ha="center", va="center", fontsize=6, zorder=3)
        panel.set(aspect="equal", title=at_step(name, ds, i))
        panel.axis("off")
    label = f"coupling by {_defined(choices)}: {top:.2f}; thinner: less"
    axes[0].plot([], [], color=BLUE, lw=2.8, label=label)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), frameon=False)
    return figure, tables


def _around_onset(ds: xr.Dataset, choices: Choices) -> list[int]:
    """Return the indices of the last step before the onset, the first at half of the largest coupling, and the last step.

    Without an onset: at most three evenly spaced steps.
    """
    began, count = _onset(ds, choices), ds.sizes["step"]
    if not began.found:
        return evenly_spaced(count, 3)
    coupling = _departure(_below_null(ds, choices), ds).mean("prompt").values
    # The first measured step where the onset is at or before it
    before = max(int((ds["step"].values < began.later).sum()) - 1, 0)
    half = int((coupling >= HALF * np.nanmax(coupling)).argmax())
    return sorted({before, half, count - 1})


def by_layer(results: Results, choices: Choices) -> "Plotted":
    """Draw the mean coupling of each layer with all others after the last step, one line per result."""
    figure, (panel,) = panels(1, choices.ax)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        matrices, _ = _of_pairs(ds.isel(step=-1), choices)
        # The paper counts the pairs of one module.
        apart = matrices.where(matrices["layer"] != matrices["layer_other"])
        counted = apart if choices.paper else where_counted(matrices, ds)
        of_layers = counted.mean("token").mean("layer_other")
        columns = of_means(of_layers, "layer", ds, coupling_word(choices))
        banded_line(panel, columns, colour, name)
        rows.append(pd.DataFrame({"result": name, **columns}))
    panel.set(xlabel="Block l", ylabel=axis_of_coupling(choices))
    legend_below(panel)
    return figure, rows


def coupling_of_prompts(ds: xr.Dataset, choices: Choices) -> xr.DataArray:
    """Return the coupling of each prompt, the mean over pairs of blocks and tokens."""
    coupling, _ = _of_pairs(ds, choices)
    return _of_prompts(coupling, ds, choices)


def _of_prompts(of_pairs: xr.DataArray, ds: xr.Dataset, choices: Choices) -> xr.DataArray:
    return labelled_over_pairs(of_pairs, ds).sel(pairs=choices.pairs).mean("token")


def _of_pairs(ds: xr.Dataset, choices: Choices) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the coupling of each pair of blocks, and that of unrelated blocks."""
    at, measure = ds.sel(k=choices.k), _measure(choices)
    level = null_level(at, measure)
    if choices.paper:
        return -at[measure].astype(float), -level
    return _below_null(ds, choices), xr.zeros_like(level)


def _below_null(ds: xr.Dataset, choices: Choices) -> xr.DataArray:
    """Return the null level minus the mis-coupling of each pair of blocks, by either convention."""
    at, measure = ds.sel(k=choices.k), _measure(choices)
    return null_level(at, measure) - at[measure].astype(float)


def _measure(choices: Choices) -> str:
    return choices.measure or choices.variable(MEASURE)


def coupling_word(choices: Choices) -> str:
    """Return what the convention's coupling is called: the word stands for the null level minus the mis-coupling alone."""
    return "minus mis-coupling" if choices.paper else "coupling"


def coupling_name(choices: Choices) -> str:
    """Return the coupling shown, with its definition and K."""
    return f"{coupling_word(choices)} by {_defined(choices)}"


def _defined(choices: Choices) -> str:
    return f"{definition(_measure(choices))}, K = {choices.k}"


def axis_of_coupling(choices: Choices) -> str:
    """Return the label of an axis of couplings."""
    label = BY_NAME[_measure(choices)].label
    text = f"Coupling: null level − {label}"
    if choices.paper:
        text = f"Minus {label}, {PAIR_WORDS[choices.pairs]}"
    return fill(f"{text}, K\u00a0=\u00a0{choices.k}", LETTERS_OF_LABEL, break_on_hyphens=False)
