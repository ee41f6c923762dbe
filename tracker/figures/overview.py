"""Figures of all results at once, which loggers also draw: the coupling matrix of a step, and curves over training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.null_levels import null_level
from tracker.analysis.statistics import curves, suspect
from tracker.figures.drawing import (
    at_step,
    banded_line,
    colour_map,
    equation,
    logarithmic_y,
    mark_step,
    panels,
    require_panels,
    training_axis,
)
from tracker.figures.palette import BLUE, GREEN, ORANGE, SERIES
from tracker.measures.registry import BY_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

COLOURS = {"miscoupling": BLUE, "offdiag_normalized": ORANGE}  # of the measures drawn of a single result
TRAJECTORY = {"lss": "Line-shape score (1: straight)", "expodistance": "Expodistance (0: exponential growth)"}
SAMPLES = ("prompt", "token")
PER_ROW = 3  # matrices


def heatmaps(
    results: Results, k: int, given: "Axes | None" = None, measure: str | None = None, step: int | None = None
) -> "Plotted":
    """Draw the matrix of pairs of blocks of each result, in the same colours.

    Args:
        measure: of pairs of blocks; None for mis-coupling m_K.
        step: None for each result's last.
    """
    measure = measure or "miscoupling"
    shown, tables = {}, []
    for name, ds in results.items():
        i = -1 if step is None else list(ds["step"].values).index(step)
        at = ds.isel(step=i).sel(k=k)
        matrix, level = (values.mean(SAMPLES) for values in (at[measure], null_level(at, measure)))
        null = float(level.where(level["layer"] != level["layer_other"]).mean())
        shown[f"{at_step(name, ds, i)}\n{_title(matrix, k)}"] = matrix, null
        tables.append(matrix.to_dataframe().assign(result=name))
    return _heatmaps(shown, given), pd.concat(tables)


def coupling_heatmap(matrix: xr.DataArray, k: int, null: float) -> "Figure":
    """Draw the (L, L) matrix of one step: rows are blocks l, columns the blocks l' in whose basis they are expressed.

    A diagonal that is 0 by definition is grey; the colours span the other entries and their null level.

    Args:
        matrix: mis-couplings (layer, layer_other), means over prompts and tokens, by the name of their measure.
        null: the mean of their null levels over l != l'.
    """
    return _heatmaps({_title(matrix, k): (matrix, null)})


def _title(matrix: xr.DataArray, k: int) -> str:
    return f"{BY_NAME[str(matrix.name)].label}, K = {k}"


def _heatmaps(shown: Mapping[str, tuple[xr.DataArray, float]], given: "Axes | None" = None) -> "Figure":
    """Draw matrices of one measure, with their null levels, by title."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    if given is None:
        columns = min(len(shown), PER_ROW)
        rows = -(-len(shown) // columns)
        figure = Figure(figsize=(4.8 * columns, 4 * rows), layout="constrained")
        panel, *more = figure.subplots(rows, columns, squeeze=False).ravel()
        places = [panel, *more]
        for unused in places[len(shown) :]:
            unused.remove()
    else:
        figure, places = panels(len(shown), given)
        given.grid(False)
    matrices = [(matrix.where(_defined(matrix)), null) for matrix, null in shown.values()]
    scale = [value for matrix, null in matrices for value in (float(matrix.min()), float(matrix.max()), null)]
    colours = colour_map().reversed().with_extremes(bad="lightgrey")
    for axes, title, (matrix, null) in zip(places, shown, matrices, strict=False):
        end = matrix.sizes["layer"] + 0.5
        extent = (0.5, end, end, 0.5)
        image = axes.imshow(matrix, cmap=colours, vmin=min(scale), vmax=max(scale), extent=extent)
        axes.set(xlabel="Block l' (basis)", ylabel="Block l (Jacobian)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, fontsize=8, pad=20)
        bar = figure.colorbar(image, ax=axes)
        bar.set_label("Mis-coupling (0: coupled)", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        bar.ax.axhline(null, color="black", lw=1)
        explained: list[Any] = [Line2D([], [], color="black", lw=1, label=f"null level {null:.2f}")]
        if matrix.isnull().any():
            explained.insert(0, Patch(color="lightgrey", label="l = l': 0 by definition"))
        # Above the axes, and the title above it: below them is the label of x, at a distance that depends on the layout.
        axes.legend(
            handles=explained,
            ncols=2,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            borderaxespad=0,
            frameon=False,
            fontsize=8,
        )
    return figure


def _defined(matrix: xr.DataArray) -> xr.DataArray:
    """Return which entries are not 0 by definition: all, if the sides of the basis are swapped."""
    return (matrix["layer"] != matrix["layer_other"]) | (BY_NAME[str(matrix.name)].variant == "vju")


def pixels(figure: "Figure") -> np.ndarray:
    """Render a figure as an RGBA image, (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def training_curves(
    results: Results, k: int, given: "Axes | None" = None, measure: str | None = None, step: int | None = None
) -> "Plotted":
    """Draw mis-coupling with its null level, LSS and expodistance over training, with quartile bands.

    Args:
        results: several are drawn over each other, each in its colour.
        measure: of pairs of blocks; None for mis-coupling m_K and, of a single result, that of the paper's equation 14 too.
        step: is marked by a line.
    """
    from matplotlib.figure import Figure

    require_panels(1 + len(TRAJECTORY), given)
    single = len(results) == 1
    measures = [measure] if measure else list(COLOURS) if single else ["miscoupling"]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    coupling, *others = figure.subplots(1, 1 + len(TRAJECTORY))
    at = {"k": k, "pairs": "mean_offdiag"}
    tables = []
    for i, (name, ds) in enumerate(results.items()):
        points, colour = curves(ds, [*measures, *TRAJECTORY]), SERIES["light"][i % len(SERIES["light"])]
        steps, marked = points["step"].values, suspect(points) != ""
        drawn, columns = [], {"result": name, "step": steps}
        for of in measures:
            of_measure = COLOURS.get(of, BLUE) if single else colour
            middle, low, high, null = (points[of + end].sel(at).values for end in ("", "_q25", "_q75", "_null"))
            banded_line(coupling, steps, middle, low, high, of_measure, equation(of) if single else name)
            level = "its null level" if single else None if i else "null level"
            coupling.plot(steps, null, color=of_measure, ls=":", label=level)
            drawn.append((coupling, middle))
            columns |= {of: middle, f"{of}_q25": low, f"{of}_q75": high, f"{of}_null": null}
        for axes, variable in zip(others, TRAJECTORY, strict=True):
            low, middle, high = (points[variable].sel(statistic=s).values for s in ("q25", "median", "q75"))
            banded_line(axes, steps, middle, low, high, GREEN if single else colour)
            drawn.append((axes, middle))
            columns |= {variable: middle, f"{variable}_q25": low, f"{variable}_q75": high}
        for axes, values in drawn if marked.any() else ():
            axes.plot(steps[marked], values[marked], "x", color=ORANGE, ms=9, label="suspect checkpoint")
        tables.append(pd.DataFrame(columns))
    title = f"Pairs of blocks l ≠ l', K = {k}" + ("" if single else f"\n{equation(measures[0])}")
    coupling.set(title=title, ylabel="Mis-coupling", ylim=(0, None))
    for axes, heading in zip(others, TRAJECTORY.values(), strict=True):
        axes.set_ylabel(heading, fontsize=9)
    lss, expodistance = others
    logarithmic_y(expodistance)
    for axes in (coupling, *others):
        training_axis(axes, np.concatenate([ds["step"].values for ds in results.values()]))
        mark_step(axes, step)
    coupling.legend(fontsize=7)
    if any(line.get_label() == "suspect checkpoint" for line in lss.lines):
        lss.legend(fontsize=7)
    (only, *_) = results.values()
    figure.suptitle(only.attrs.get("suite", "") if single else "")
    return figure, pd.concat(tables, ignore_index=True)
