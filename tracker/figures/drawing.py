"""What figures are drawn with, and the two that loggers draw as well: a coupling matrix, and curves over training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from tracker.analysis.statistics import suspect
from tracker.figures.palette import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAIR_WORDS = {"mean": "all pairs", "mean_offdiag": "l ≠ l'", "mean_adjacent": "|l − l'| = 1"}


def coupling_heatmap(unit: xr.Dataset, k: int, measure: str = "miscoupling") -> "Figure":
    """The (L, L) matrix of one step: rows the block described, columns the block that lends its basis."""
    from matplotlib.figure import Figure

    matrix = unit[measure].sel(k=k).mean(("prompt", "token"))
    L = matrix.sizes["layer"]
    figure = Figure(figsize=(4.6, 4), layout="constrained")
    axes = figure.subplots()
    top = max(1.0, float(matrix.max()))
    image = axes.imshow(matrix, cmap="viridis_r", vmin=0, vmax=top, extent=(0.5, L + 0.5, L + 0.5, 0.5))
    normed = unit.attrs.get("final_norm") == "include" and not measure.endswith("_raw")
    title = f"{measure}, K = {k}" + ("\nlast block with the final norm" if normed else "")
    axes.set(xlabel="basis of block l'", ylabel="block l")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label="0 = perfectly coupled")
    return figure


def pixels(figure: "Figure") -> np.ndarray:
    """A figure as an image, (height, width, 4), for loggers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def training_curves(points: xr.Dataset, k: int, title: str = "") -> "Figure":
    """Mis-coupling, LSS and expodistance over training steps, from `statistics.curves`; quartile bands, null level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    coupling, lss, growth = figure.subplots(1, 3)
    step = points["step"].values
    at = {"k": k, "pairs": "mean_offdiag"}
    for measure, colour, label in (
        ("miscoupling", BLUE, "miscoupling"),
        ("offdiag_normalized", ORANGE, "offdiag normalized"),
    ):
        middle, low, high = (points[measure + end].sel(at) for end in ("", "_q25", "_q75"))
        banded_line(coupling, step, middle, low, high, colour, label)
        coupling.plot(step, points[f"{measure}_null"].sel(at), color=colour, ls=":", label="its null level")
    coupling.set(title=f"Mis-coupling, l ≠ l', K = {k}", ylim=(0, None))
    coupling.legend(fontsize=7)
    for axes, name, heading in (
        (lss, "lss", "Line-shape score"),
        (growth, "expodistance_raw", "Expodistance, before final norm"),
    ):
        low, middle, high = (points[name].sel(statistic=s) for s in ("q25", "median", "q75"))
        banded_line(axes, step, middle, low, high, GREEN)
        axes.set(title=heading)
    growth.set_yscale("log")
    growth.yaxis.set_major_formatter("{x:g}")
    growth.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
    doubted = suspect(points) != ""
    if doubted.any():
        for axes, values in (
            (coupling, points["miscoupling"].sel(at)),
            (lss, points["lss"].sel(statistic="median")),
            (growth, points["expodistance_raw"].sel(statistic="median")),
        ):
            axes.plot(step[doubted], values[doubted], "x", color=ORANGE, ms=9, label="suspect checkpoint")
        lss.legend(fontsize=7)
    for axes in (coupling, lss, growth):
        training_axis(axes, step[-1])
    figure.suptitle(title)
    return figure


def banded_line(axes: "Axes", x: Any, middle: Any, low: Any, high: Any, color: Any, label: str | None = None) -> None:
    """A line through points, and the band from low to high about it."""
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    axes.plot(x, middle, color=color, marker="o", ms=3, label=label)


def training_axis(axes: "Axes", last: float) -> None:
    """Make x an axis of training steps up to `last`."""
    axes.set_xscale("symlog", linthresh=1)  # linear up to 1, so that step 0 has a place
    axes.set_xlim(-0.2, 1.3 * last)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)


def panels(count: int, **options: Any) -> "tuple[Figure, list[Axes]]":
    """A figure of small panels, four in a row."""
    from matplotlib.figure import Figure

    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 0.5 + 2.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=7)
        panel.locator_params(axis="x", nbins=5)
    return figure, list(axes[:count])


def fitted_line(
    panel: "Axes", x: np.ndarray, y: np.ndarray, fit: Mapping[str, float], corrected: float | None = None
) -> str:
    """Draw the straight line of `regression.linear_fit`, and say how good it is.

    Args:
        corrected: p, where several were tried.
    """
    if not np.isfinite(fit["r2"]):
        return "no line: fewer than 4 points, or no spread"
    ends = np.array([np.min(x), np.max(x)])
    panel.plot(ends, np.mean(y) + fit["slope"] * (ends - np.mean(x)), color=ORANGE, lw=1.2)
    said = fit_words(fit)
    return said if corrected is None else f"{said}\n{corrected:.2g} corrected (Holm)"


def fit_words(fit: Mapping[str, float]) -> str:
    """R^2 with its interval, and p."""
    if not np.isfinite(fit["r2"]):
        return "too few to say, or no spread"
    return f"R² = {fit['r2']:.2f} [{fit['r2_low']:.2f}, {fit['r2_high']:.2f}], p = {fit['p']:.2g}"


def shades(count: int) -> list[Any]:
    """Colours from dark to light, told apart in grey print: of ordered things, such as steps."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]
