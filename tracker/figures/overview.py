"""Figures of one result, which loggers also draw: the coupling matrix of a step, and curves over training."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.statistics import curves, suspect
from tracker.figures.drawing import banded_line, training_axis
from tracker.figures.palette import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

COLOURS = {"miscoupling": BLUE, "offdiag_normalized": ORANGE}
TRAJECTORY = {"lss": "Line-shape score", "expodistance": "Expodistance, before final norm"}


def last_heatmap(results: Results, k: int) -> "Plotted":
    """Draw `coupling_heatmap` of the last step of the single result."""
    (ds,) = results.values()
    last = ds.isel(step=-1)
    return coupling_heatmap(last, k), last["miscoupling"].sel(k=k).mean(("prompt", "token")).to_dataframe()


def all_curves(results: Results, k: int) -> "Plotted":
    """Draw `training_curves` of the single result, its suite as title."""
    (ds,) = results.values()
    points = curves(ds)
    return training_curves(points, k, ds.attrs.get("suite", "")), points.sel(k=k, pairs="mean_offdiag").to_dataframe()


def coupling_heatmap(unit: xr.Dataset, k: int, measure: str = "miscoupling") -> "Figure":
    """Draw the (L, L) matrix of one step: rows are blocks l, columns the blocks l' in whose basis they are expressed."""
    from matplotlib.figure import Figure

    matrix = unit[measure].sel(k=k).mean(("prompt", "token"))
    L = matrix.sizes["layer"]
    figure = Figure(figsize=(4.6, 4), layout="constrained")
    axes = figure.subplots()
    top = max(1.0, float(matrix.max()))
    image = axes.imshow(matrix, cmap="viridis_r", vmin=0, vmax=top, extent=(0.5, L + 0.5, L + 0.5, 0.5))
    after_norm = unit.attrs.get("final_norm") == "include" and not measure.endswith("_raw")
    title = f"{measure}, K = {k}" + ("\nlast block with the final norm" if after_norm else "")
    axes.set(xlabel="basis of block l'", ylabel="block l")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label="0 = perfectly coupled")
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
        banded_line(coupling, step, middle, low, high, colour, measure.replace("_", " "))
        coupling.plot(step, points[f"{measure}_null"].sel(at), color=colour, ls=":", label="its null level")
    coupling.set(title=f"Mis-coupling, l ≠ l', K = {k}", ylim=(0, None))
    coupling.legend(fontsize=7)
    medians = {name: points[name].sel(statistic="median") for name in TRAJECTORY}
    for axes, (name, heading) in zip(others, TRAJECTORY.items(), strict=True):
        low, high = (points[name].sel(statistic=s) for s in ("q25", "q75"))
        banded_line(axes, step, medians[name], low, high, GREEN)
        axes.set(title=heading)
    lss, expodistance = others
    _logarithmic(expodistance)
    marked = suspect(points) != ""
    if marked.any():
        for axes, values in zip((coupling, *others), (points["miscoupling"].sel(at), *medians.values()), strict=True):
            axes.plot(step[marked], values[marked], "x", color=ORANGE, ms=9, label="suspect checkpoint")
        lss.legend(fontsize=7)
    for axes in (coupling, *others):
        training_axis(axes, step)
    figure.suptitle(title)
    return figure


def _logarithmic(axes: "Axes") -> None:
    """Make y logarithmic, with labels at 2, 3 and 5 times the powers of ten too."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
