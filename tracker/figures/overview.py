"""Figures of one result, which loggers also draw: the coupling matrix of a step, and curves over training."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.null_levels import null_level
from tracker.analysis.statistics import curves, suspect
from tracker.figures.drawing import banded_line, logarithmic_y, panels, require_panels, training_axis
from tracker.figures.palette import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

COLOURS = {"miscoupling": BLUE, "offdiag_normalized": ORANGE}
NAMES = {"miscoupling": "‖A − S‖ / ‖S‖", "offdiag_normalized": "‖A − Diag A‖ / ‖A‖ (eq. 14)"}
TRAJECTORY = {"lss": "Line-shape score (1: straight)", "expodistance": "Expodistance (0: exponential growth)"}


def last_heatmap(results: Results, k: int, given: "Axes | None" = None) -> "Plotted":
    """Draw `coupling_heatmap` of the last step of the single result."""
    (ds,) = results.values()
    last = ds.isel(step=-1).sel(k=k)
    matrix, level = (
        values.mean(("prompt", "token")) for values in (last["miscoupling"], null_level(last, "miscoupling"))
    )
    null = float(level.where(level["layer"] != level["layer_other"]).mean())
    return coupling_heatmap(matrix, k, null, given), matrix.to_dataframe()


def all_curves(results: Results, k: int, given: "Axes | None" = None) -> "Plotted":
    """Draw `training_curves` of the single result, its suite as title."""
    require_panels(3, given)
    (ds,) = results.values()
    points = curves(ds)
    return training_curves(points, k, ds.attrs.get("suite", "")), points.sel(k=k, pairs="mean_offdiag").to_dataframe()


def coupling_heatmap(matrix: xr.DataArray, k: int, null: float, given: "Axes | None" = None) -> "Figure":
    """Draw the (L, L) matrix of one step: rows are blocks l, columns the blocks l' in whose basis they are expressed.

    The diagonal, 0 by definition, is grey and outside of the colour scale, which spans the other entries and their null level.

    Args:
        matrix: mis-couplings (layer, layer_other), means over prompts and tokens.
        null: the mean of their null levels over l != l'.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    others = matrix.where(matrix["layer"] != matrix["layer_other"])
    scale = [float(others.min()), float(others.max()), null]
    explained: list[Any] = [
        Patch(color="lightgrey", label="l = l': 0 by definition"),
        Line2D([], [], color="black", lw=1, label=f"null level {null:.2f}"),
    ]
    L = others.sizes["layer"]
    if given is None:
        figure = Figure(figsize=(4.8, 4), layout="constrained")
        axes = figure.subplots()
    else:
        figure, (axes,) = panels(1, given)
        axes.grid(False)
    colours = colormaps["viridis_r"].with_extremes(bad="lightgrey")
    extent = (0.5, L + 0.5, L + 0.5, 0.5)
    image = axes.imshow(others, cmap=colours, vmin=min(scale), vmax=max(scale), extent=extent)
    axes.set(xlabel="Block l' (basis)", ylabel="Block l (Jacobian)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"K = {k}", fontsize=8, pad=20)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("Mis-coupling (0: coupled)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.axhline(null, color="black", lw=1)
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


def pixels(figure: "Figure") -> np.ndarray:
    """Render a figure as an RGBA image, (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def training_curves(points: xr.Dataset, k: int, title: str = "") -> "Figure":
    """Draw mis-coupling with its null level, LSS and expodistance over training, with quartile bands.

    Args:
        points: the Dataset of `statistics.curves`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    coupling, *others = figure.subplots(1, 3)
    step = points["step"].values
    at = {"k": k, "pairs": "mean_offdiag"}
    for measure, colour in COLOURS.items():
        middle, low, high = (points[measure + end].sel(at) for end in ("", "_q25", "_q75"))
        banded_line(coupling, step, middle, low, high, colour, NAMES[measure])
        coupling.plot(step, points[f"{measure}_null"].sel(at), color=colour, ls=":", label="its null level")
    coupling.set(title=f"Pairs of blocks l ≠ l', K = {k}", ylabel="Mis-coupling", ylim=(0, None))
    coupling.legend(fontsize=7)
    medians = {name: points[name].sel(statistic="median") for name in TRAJECTORY}
    for axes, (name, heading) in zip(others, TRAJECTORY.items(), strict=True):
        low, high = (points[name].sel(statistic=s) for s in ("q25", "q75"))
        banded_line(axes, step, medians[name], low, high, GREEN)
        axes.set_ylabel(heading, fontsize=9)
    lss, expodistance = others
    logarithmic_y(expodistance)
    marked = suspect(points) != ""
    if marked.any():
        for axes, values in zip((coupling, *others), (points["miscoupling"].sel(at), *medians.values()), strict=True):
            axes.plot(step[marked], values[marked], "x", color=ORANGE, ms=9, label="suspect checkpoint")
        lss.legend(fontsize=7)
    for axes in (coupling, *others):
        training_axis(axes, step)
    figure.suptitle(title)
    return figure
