"""Elements of figures: colours, panels, axes, lines with bands, fitted lines and their text.

The colours of figures and of pages have a light and a dark theme; figures use the light one. `SERIES` colours are those of Okabe
and Ito (jfly.uni-koeln.de/color), which colour-blind readers can tell apart, darker on white where the originals have too little
contrast.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.curves import evenly_measured, quartiles, sources
from tracker.analysis.regression import FEWEST_POINTS, clustered_mean, mean_interval
from tracker.common.errors import UsageError
from tracker.common.text import capitalised
from tracker.measures.registry import BY_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from tracker.analysis.across_models import Results
    from tracker.figures.choices import Axis

    # A figure, and tables of the numbers that it plots
    Plotted = tuple[Figure, Sequence[pd.DataFrame]]

Theme = Literal["light", "dark"]

SERIES: Mapping[Theme, tuple[str, ...]] = {  # of lines and markers, in this order
    "light": ("#0072B2", "#D55E00", "#007A5A", "#A6477F", "#8A6100", "#1a1d21", "#2B7FB8"),
    "dark": ("#56B4E9", "#E69F00", "#00B386", "#CC79A7", "#F0E442", "#e8eaed", "#FF8C42"),
}
SURFACE: Mapping[Theme, Mapping[str, str]] = {
    "light": {
        "ink": "#1a1d21",  # text
        "faint": "#5a626b",  # captions, error bars
        "line": "#dde1e6",  # rules and grid lines
        "ghost": "#c4c9cf",  # curves in the background
        "paper": "#ffffff",
        "accent": "#0b62a0",  # links, focus
        "warn": "#d55e00",
    },
    "dark": {
        "ink": "#e8eaed",
        "faint": "#a9b1ba",
        "line": "#333a42",
        "ghost": "#515a64",
        "paper": "#14171b",
        "accent": "#6cb8f0",
        "warn": "#ff8c42",
    },
}
STYLE: dict[Any, Any] = {  # of the texts of figures, as matplotlib's settings
    "figure.titlesize": 10,
    "figure.labelsize": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
}
BLUE, ORANGE, GREEN, *_ = SERIES["light"]
GREY = SURFACE["light"]["faint"]
# Of mis-couplings, from coupled (last) to uncoupled, and of |A|, from 0 to large (last): viridis, evenly spaced.
SEQUENTIAL = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
DIVERGING = ("#67001f", "#d6604d", "#f7f7f7", "#4393c3", "#053061")  # from -1 to 1, evenly spaced


LETTERS_OF_LABEL = 34
LETTERS_OF_LEGEND = 44  # of a line
BELOW_AXIS = 0.42  # inches from an x axis to its legend
MOST_MARKERS = 60  # of a line
PER_ROW = 4  # panels, at most
STEP_TICKS = 6  # at most one more than this on an axis of training steps
LIGHTEST = 0.59  # place in `SEQUENTIAL` of the lightest of ordered lines
PAIR_WORDS = {"mean": "all pairs", "mean_offdiag": "l ≠ l'", "mean_adjacent": "|l − l'| = 1"}


def css_variables(theme: Theme) -> str:
    """Return the declarations of a CSS rule: a variable for each colour of `SURFACE`, and the colour scheme.

    >>> css_variables("light")[:34]
    '--ink: #1a1d21; --faint: #5a626b; '
    """
    return (
        " ".join(f"--{name}: {colour};" for name, colour in SURFACE[theme].items())
        + f" color-scheme: {theme};"
    )


def panels(
    count: int,
    target: "Axes | None" = None,
    per_row: int | None = None,
    size: tuple[float, float] | None = None,
    **options: Any,
) -> "tuple[Figure, list[Axes]]":
    """Return a figure of `count` panels; `options` are those of `Figure.subplots`.

    Args:
        target: the caller's axes, which become the only panel.
        per_row: the panels of a row. Default: as equal in number as possible, and at most four.
        size: inches of a panel. Default: small.

    Raises:
        UsageError: if axes are given and the figure has several panels.
    """
    from matplotlib.figure import Figure

    if target is not None:
        if count != 1:
            raise UsageError(
                f"ax= takes a figure of one panel, and this one has {count}; leave ax out"
            )
        target.grid(alpha=0.3)
        return target.get_figure(root=True), [target]  # type: ignore[return-value]
    columns = per_row or -(-count // -(-count // PER_ROW))
    rows = -(-count // columns)
    inches = (size[0] * columns, size[1] * rows) if size else (1 + 2.8 * columns, 0.5 + 2.8 * rows)
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.grid(alpha=0.3)
        panel.locator_params(axis="x", nbins=5)
    return figure, list(axes[:count])


def label_y(axes: "Sequence[Axes]", label: str) -> None:
    """Label the y axis that panels share, once for each row of panels."""
    for panel in axes:
        place = panel.get_subplotspec()
        if len(axes) == 1 or place is None or place.is_first_col():
            panel.set_ylabel(label)


def legend_below(axes: "Axes") -> None:
    """Add the legend of a panel below its x axis, where it covers no data."""
    from matplotlib.transforms import ScaledTranslation

    longest = max(map(len, axes.get_legend_handles_labels()[1]), default=1)
    columns = max(1, LETTERS_OF_LEGEND // (longest + 8))  # 8: the line and the space beside it
    below = ScaledTranslation(0, -BELOW_AXIS, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=axes.transAxes + below,
        frameon=False,
        ncols=columns,
    )


def at_step(name: str, ds: xr.Dataset, i: int) -> str:
    """Return the name of a result, with the training step of its unit i if it is known."""
    step = ds["step"].values[i]
    return name if np.isnan(step) else f"{name}, step {step:,}"


def first_and_last_steps(results: "Results") -> list[tuple[str, xr.Dataset, int]]:
    """Return the name of each result, the result, and the index of its first and of its last step: an entry for each step."""
    return [
        (name, ds, i) for name, ds in results.items() for i in sorted({0, ds.sizes["step"] - 1})
    ]


def training_axis(
    axes: "Axes", *runs: Sequence[float] | np.ndarray, scale: "Axis" = "auto"
) -> None:
    """Make x an axis of training steps, with a tick at the last.

    On a logarithmic axis, step 0 is as far from the first later step as twice that step. The page's axis has the same scale.

    Args:
        runs: the measured steps of each run.
        scale: "auto" for a linear axis if the steps of each run are evenly spaced, else a logarithmic one.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    every = np.concatenate([np.asarray(steps, float) for steps in runs])
    shown = np.unique(every[np.isfinite(every)])
    later = shown[shown > 0]
    uneven = not all(map(evenly_measured, runs))
    logarithmic = len(later) > 0 and (scale == "log" or (scale == "auto" and uneven))
    offered = shown
    if logarithmic:
        # matplotlib divides linscale by 1 - 1 / base.
        axes.set_xscale("symlog", linthresh=later[0], linscale=0.9 * np.log10(2))
    elif len(later):
        round_steps = MaxNLocator(STEP_TICKS, integer=True).tick_values(shown[0], shown[-1])
        within = (round_steps >= shown[0]) & (round_steps < shown[-1])
        offered = np.append(round_steps[within], shown[-1])
    if len(later):
        transform = axes.xaxis.get_transform()
        first, last = transform.transform(shown[[0, -1]])
        # A single step has no extent, and still needs an axis.
        room = last - first or last
        margin = room / 30
        axes.set_xlim(*transform.inverted().transform([first - margin, last + margin]))
        ticks, taken = [shown[-1]], -np.inf
        for step, place in zip(offered, transform.transform(offered), strict=True):
            if taken + room / STEP_TICKS <= place <= last - room / STEP_TICKS:
                ticks.append(step)
                taken = place
        axes.set_xticks(sorted(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.12g}")
    axes.set_xlabel("Training step" + " (log scale)" * logarithmic)
    axes.grid(alpha=0.3)


def mark_step(axes: "Axes", step: float | None) -> None:
    """Draw a vertical line at a training step, if one is given."""
    if step is not None:
        axes.axvline(step, color=GREY, lw=0.8, label=f"step {step:,}")


def axis_label(variable: str) -> str:
    """Return the label of a measured variable, with its unit unless it is a pure number."""
    measure = BY_NAME[variable]
    label = capitalised(measure.label)
    return fill(label + ("" if measure.unit == "1" else f" [{measure.unit}]"), LETTERS_OF_LABEL)


def definition(variable: str) -> str:
    """Return the label of a mis-coupling without that word, for figures of coupling.

    >>> definition("offdiag_normalized")
    'eq. 14'
    """
    return BY_NAME[variable].label.removeprefix("mis-coupling").lstrip(", ")


def scale_y(axes: "Axes", variable: str) -> None:
    """Give y the scale of a measured variable."""
    if BY_NAME[variable].axis == "logarithmic":
        logarithmic_y(axes)
    if BY_NAME[variable].axis == "from zero":
        axes.set_ylim(bottom=0)


def logarithmic_y(axes: "Axes") -> None:
    """Make y logarithmic, with plain numbers at powers of ten and, over fewer than three decades, between them."""

    def between(y: float, _: float) -> str:
        low, high = axes.get_ylim()
        return f"{y:g}" if high < 4 * low or (high < 1000 * low and f"{y:e}"[0] in "235") else ""

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(between)


def banded_line(
    axes: "Axes", columns: Mapping[str, Any], color: Any, label: str | None = None
) -> None:
    """Draw a line, with markers unless they would run into each other, and a band around it.

    Args:
        columns: of the table of the figure; the first four are x, the line, and the lower and the upper end of the band.
    """
    x, middle, low, high = list(columns.values())[:4]
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    marker = "o" if len(x) <= MOST_MARKERS else ""
    axes.plot(x, middle, color=color, marker=marker, ms=3, label=label)


def of_quartiles(values: xr.DataArray, along: str) -> dict[str, np.ndarray]:
    """Return the median and quartiles over all dimensions but one, as the columns of a `banded_line`."""
    spread = quartiles(values, [str(dim) for dim in values.dims if dim != along])
    names = ("median", "q25", "q75")
    return {along: values[along].values, **{s: spread.sel(statistic=s).values for s in names}}


def of_means(
    by_prompt: xr.DataArray, along: str, results: xr.Dataset, name: str = "mean"
) -> dict[str, np.ndarray]:
    """Return means over prompts, by this name, with their 95 % intervals, as the columns of a `banded_line`."""
    values = by_prompt.transpose(along, "prompt").values
    (mean, *_), (low, high) = clustered_mean(values), mean_interval(values, sources(results))
    return {along: by_prompt[along].values, name: mean, "low": low, "high": high}


def fitted_line(
    panel: "Axes",
    x: np.ndarray,
    y: np.ndarray,
    fit: Mapping[str, float],
    corrected: float | None,
) -> str:
    """Draw the straight line of `regression.linear_fit`, and return its R^2, interval and p as text.

    Of fewer than `FEWEST_POINTS` points, no line is drawn and the text says so.

    Args:
        corrected: p corrected for multiple tests, if there are several.
    """
    if fit["n"] < FEWEST_POINTS or not np.isfinite(fit["r2"]):
        return fit_text(fit)
    ends = np.array([np.min(x), np.max(x)])
    panel.plot(ends, np.mean(y) + fit["slope"] * (ends - np.mean(x)), color=ORANGE, lw=1.2)
    text = fit_text(fit)
    return text if corrected is None else f"{text}\n{corrected:.2g} corrected (Holm)"


def fit_text(fit: Mapping[str, float]) -> str:
    """Return R^2 with its interval, and p, as text; of fewer than `FEWEST_POINTS` points, their number instead."""
    if fit["n"] < FEWEST_POINTS:
        return f"n = {fit['n']}: fewer than {FEWEST_POINTS} points, no fit"
    if not np.isfinite(fit["r2"]):
        return "no fit: the points have no spread"
    return f"R² = {fit['r2']:.2f} [{fit['r2_low']:.2f}, {fit['r2_high']:.2f}], p = {fit['p']:.2g}"


def colour_map(colours: Sequence[str] = SEQUENTIAL) -> "Colormap":
    """Return the colour map through evenly spaced colours of the palette."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("palette", colours)


def shades(count: int) -> list[Any]:
    """Return `count` colours from dark to light for ordered things such as steps, distinct in greyscale print.

    The lightest has a contrast of 3 with white, as WCAG asks of graphics.
    """
    colours = colour_map()
    return [colours(LIGHTEST * i / max(count - 1, 1)) for i in range(count)]
