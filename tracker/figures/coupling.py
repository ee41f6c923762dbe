"""Figures of coupling between blocks: over training, between layers, by layer, and by prompt.

Coupling is minus mis-coupling. Intervals are 95 % t intervals of means over prompts, clustered by their sources where results
record them (`regression.clustered_mean`).
"""

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.null_levels import null_level
from tracker.analysis.onset import Onset, onset, pairs_of_blocks
from tracker.analysis.regression import holm, linear_fit
from tracker.analysis.statistics import labelled_over_pairs, sources
from tracker.figures.drawing import (
    at_step,
    equation,
    evenly_spaced,
    fitted_line,
    label_y,
    mark_step,
    mean_line,
    panels,
    shades,
    training_axis,
)
from tracker.figures.palette import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

MEASURE, PAIRS = "offdiag_normalized", "mean_offdiag"
AGAINST = {"difficulty": "Difficulty of the prompt", "tokens": "Tokens of the prompt"}
LETTERS_OF_ONSET = 44  # of a line in the legend of a panel
LETTERS_OF_LABEL = 44  # of a line beside a panel


def over_training(
    results: Results, k: int, given: "Axes | None" = None, measure: str | None = None, step: int | None = None
) -> "Plotted":
    """Draw the mean over prompts with its interval, the null level, and the onset (Fig. 1b).

    Args:
        measure: of pairs of blocks; None for the paper's.
        step: is marked by a line.
    """
    measure = measure or MEASURE
    figure, axes = panels(len(results), given, sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        at = ds.sel(k=k)
        levels, steps, source = null_level(at, measure), ds["step"].values, sources(ds)
        coupling, null = (_by_prompt(values) for values in (at[measure], levels))
        matrices = (levels - at[measure]).mean(("prompt", "token")).transpose("step", "layer", "layer_other")
        departure = (coupling - null).transpose("step", "prompt")
        began = onset(steps, departure.values, pairs_of_blocks(matrices.values), source)
        null = null.mean("prompt").values
        mean = mean_line(panel, coupling, source, BLUE)
        panel.plot(steps, null, color=GREY, ls=":", label="null level")
        _mark_onset(panel, began)
        training_axis(panel, [*steps, began.low])
        mark_step(panel, step)
        panel.set_title(name, fontsize=9)
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
        columns = {"step": steps, "coupling": mean["mean"], "low": mean["low"], "high": mean["high"], "null": null}
        columns |= {"onset_after": began.earlier, "onset_by": began.later}
        columns |= {"onset_low": began.low, "onset_high": began.high}
        rows.append(pd.DataFrame({"result": name, **columns}))
    label_y(axes, _label(k, measure))
    return figure, pd.concat(rows, ignore_index=True)


def _mark_onset(panel: "Axes", began: Onset) -> None:
    """Shade the steps between which the onset lies, lighter over its whole interval, and state them in the legend."""
    label = fill(f"onset: {began.words}", LETTERS_OF_ONSET)
    if not began.found:
        panel.plot([], [], " ", label=label)
        return
    panel.axvspan(began.low, began.high, color=ORANGE, alpha=0.12, lw=0)
    # The edges show a bracket of no width: an onset at step 0.
    panel.axvspan(began.earlier, began.later, facecolor=(ORANGE, 0.15), edgecolor=ORANGE, lw=0.8, label=label)


def layer_graph(results: Results, k: int, given: "Axes | None" = None) -> "Plotted":
    """Draw layers as nodes on a circle; width and opacity of an edge show how far the coupling is above its null level."""
    shown = [(name, ds, i) for name, ds in results.items() for i in evenly_spaced(ds.sizes["step"], 3)]
    figure, axes = panels(len(shown), given)
    rows = []
    for name, ds, i in shown:
        at = ds.isel(step=i).sel(k=k)
        gain = (null_level(at, MEASURE) - at[MEASURE]).mean(("prompt", "token")).transpose("layer", "layer_other")
        first, second = np.triu_indices(len(gain), 1)
        edges = {"layer": first + 1, "layer_other": second + 1, "coupling_above_null": pairs_of_blocks(gain.values)}
        rows.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **edges}))
    table = pd.concat(rows, ignore_index=True)
    top = max(table["coupling_above_null"].max(), np.finfo(float).tiny)
    for panel, part, (name, ds, i) in zip(axes, rows, shown, strict=True):
        angle = np.pi / 2 - 2 * np.pi * np.arange(ds.sizes["layer"]) / ds.sizes["layer"]
        x, y = np.cos(angle), np.sin(angle)
        for a, b, value in part[["layer", "layer_other", "coupling_above_null"]].itertuples(index=False):
            weight = max(0.0, value / top)
            panel.plot(x[[a - 1, b - 1]], y[[a - 1, b - 1]], color=BLUE, lw=0.3 + 2.5 * weight, alpha=weight, zorder=1)
        panel.scatter(x, y, s=90, color="white", edgecolor=GREY, zorder=2)
        for layer in range(len(x)):
            panel.text(x[layer], y[layer], str(layer + 1), ha="center", va="center", fontsize=6, zorder=3)
        panel.set(aspect="equal", title=at_step(name, ds, i))
        panel.title.set_fontsize(8)
        panel.axis("off")
    axes[0].plot([], [], color=BLUE, lw=2.8, label=f"{top:.2f} below the null level; thinner: less")
    axes[0].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.02), frameon=False)
    return figure, table


def by_layer(results: Results, k: int, given: "Axes | None" = None) -> "Plotted":
    """Draw the mean coupling of each layer with all others after the last step, one line per result."""
    figure, (axes,) = panels(1, given)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        matrices = -ds[MEASURE].isel(step=-1).sel(k=k).mean("token")
        others = matrices.where(matrices["layer"] != matrices["layer_other"]).mean("layer_other")
        columns = mean_line(axes, others, sources(ds), colour, name)
        columns = {"layer": columns["layer"], "coupling": columns.pop("mean"), **columns}
        rows.append(pd.DataFrame({"result": name, **columns}))
    axes.set_xlabel("Block l", fontsize=8)
    axes.set_ylabel(_label(k), fontsize=8)
    axes.legend(fontsize=7)
    return figure, pd.concat(rows, ignore_index=True)


def by_prompt(results: Results, k: int, given: "Axes | None" = None) -> "Plotted":
    """Draw the coupling of each prompt after the last step against its length and, where it is known, its difficulty."""
    tables = {name: pd.DataFrame({"result": name, **_prompt_columns(ds, k)}) for name, ds in results.items()}
    shown = [(name, x) for name, table in tables.items() for x in ("difficulty", "tokens") if x in table]
    figure, axes = panels(len(shown), given)
    points = [(tables[name][x].to_numpy(), tables[name]["coupling"].to_numpy()) for name, x in shown]
    fits = [linear_fit(x, y) for x, y in points]
    corrected = holm(np.array([fit["p"] for fit in fits]))
    for panel, (name, against), (x, y), fit, p in zip(axes, shown, points, fits, corrected, strict=True):
        panel.scatter(x, y, s=12, color=BLUE)
        text = fitted_line(panel, x, y, fit, p if len(shown) > 1 else None)
        count = len(set(tables[name]["source"])) if "source" in tables[name] else 0
        if count > 1:
            text += f"\np treats prompts of {count} sources as independent"
        panel.set_title(f"{name}\n{text}", fontsize=8)
        panel.set_xlabel(AGAINST[against], fontsize=8)
    label_y(axes, _label(k))
    if given is None and not any(x == "difficulty" for _, x in shown):
        figure.suptitle("Coupling of each prompt against its length", fontsize=10)
    return figure, pd.concat(tables.values(), ignore_index=True)


def _prompt_columns(ds: xr.Dataset, k: int) -> dict[str, np.ndarray]:
    last = ds.isel(step=-1)
    columns = {
        "prompt": last["prompt_text"].values,
        "tokens": last["norm"].isel(depth=0).notnull().sum("position").values,
        "coupling": coupling_of_prompts(last, k).values,
    }
    columns |= {"difficulty": last["difficulty"].values} if "difficulty" in ds.coords else {}
    columns |= {"source": last["prompt_source"].values} if "prompt_source" in ds.coords else {}
    return columns


def coupling_of_prompts(ds: xr.Dataset, k: int) -> xr.DataArray:
    """Return the coupling of each prompt, the mean over l != l' and tokens."""
    return _by_prompt(ds[MEASURE].sel(k=k))


def _by_prompt(matrices: xr.DataArray) -> xr.DataArray:
    return -labelled_over_pairs(matrices.astype(float)).sel(pairs=PAIRS).mean("token")


def _label(k: int, measure: str = MEASURE) -> str:
    return fill(f"Coupling: −{equation(measure)}, K = {k}", LETTERS_OF_LABEL)
