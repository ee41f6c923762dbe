"""Figures of a grid: Figs 6a, 6b and 10 of the paper, coupling over training, and correlations of every definition.

Panels are two in a row, so that text is readable where a page is 400 pixels wide. Colours are those of the cycle that `style`
sets.
"""

from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tracker.common.text import capitalised
from tracker.figures.drawing import (
    PAIR_WORDS,
    SEQUENTIAL,
    SERIES,
    STYLE,
    SURFACE,
    Theme,
    colour_map,
    definition,
    panels,
    training_axis,
)
from tracker.figures.model_comparisons import correlation_heatmap
from vit.answers import LABELS, either, interval
from vit.statistics import (
    COUPLING,
    RELIABILITY,
    RELIABLE,
    couplings,
    final_coupling,
    fit_units,
    quantities,
    quantity,
    unit_means,
)

WIDTH, HEIGHT = 4.4, 2.5  # inches, of a figure and of a row of panels
LETTERS = 36  # at most, of a line of an axis label
RATES_PER_ROW = 4  # of a legend
TICKS = 4  # at most, of rates, in a panel of half the width
BLUE, ORANGE, GREY = "C0", "C1", f"C{len(SERIES['light'])}"  # of the cycle of colours


def style(theme: Theme) -> dict[Any, Any]:
    """Return matplotlib's settings of a theme: texts, surfaces, and the colours of `SERIES` with grey as the cycle."""
    from cycler import cycler

    surface = SURFACE[theme]
    ink = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "axes.titlecolor",
        "xtick.color",
        "ytick.color",
        "legend.labelcolor",
    )
    paper = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    colours = {name: surface["ink"] for name in ink} | {name: surface["paper"] for name in paper}
    rest = {
        "grid.color": surface["faint"],
        "axes.prop_cycle": cycler(color=[*SERIES[theme], surface["faint"]]),
    }
    return STYLE | colours | rest


def outcome_against_coupling(
    grid: xr.Dataset, at: dict[str, Any], outcome: str, theme: Theme = "light"
) -> Figure:
    """Draw test accuracy or loss against coupling, a panel for each stochastic depth rate (Fig. 6a).

    Args:
        at: the token, measure, k and pairs to show.
        outcome: accuracy or loss.
    """
    rates = sorted(set(grid["drop_path"].values))
    figure, axes = _panels(len(rates), beside=1.0)
    decays = sorted(set(grid["weight_decay"].values))
    ticks = np.linspace(0, 1, len(decays)) if len(decays) > 1 else np.array([0.5])
    colours, palette = dict(zip(decays, ticks, strict=True)), _palette(theme)
    shade = {"cmap": palette, "vmin": 0, "vmax": 1}
    for panel, rate in zip(axes, rates, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["drop_path"] == rate))
        x, y = final_coupling(cells, at), cells[outcome].values
        if outcome == "accuracy":
            error = np.sqrt(y * (1 - y) / grid.attrs["images"])
            panel.errorbar(x, y, error, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        panel.scatter(
            x,
            y,
            c=[colours[decay] for decay in cells["weight_decay"].values],
            **shade,
            s=10,
            alpha=0.35,
            lw=0,
        )
        means = unit_means(cells, np.stack([x, y], 1), "drop_path")
        of_mean = [colours[decay] for decay in np.unique(cells["weight_decay"].values)]
        panel.scatter(*means.T, c=of_mean, **shade, s=24, zorder=3)
        fit = fit_units(cells, x, y, "drop_path")
        title = f"depth rate {rate:g}"
        if not fit["why"]:
            ends = np.array([means[:, 0].min(), means[:, 0].max()])
            panel.plot(
                ends,
                means[:, 1].mean() + fit["slope"] * (ends - means[:, 0].mean()),
                color=ORANGE,
                lw=1.2,
            )
            title += f"\nr = {interval(fit, 'r')}"
            if np.isfinite([fit["reliability_x"], fit["reliability_y"]]).all():
                title += f"\nreliability {fit['reliability_x']:.2f}, {fit['reliability_y']:.2f}"
        panel.set_title(title)
        panel.margins(0.1)
        _few_ticks(panel)
    within = fit_units(grid, final_coupling(grid, at), grid[outcome].values, "drop_path")
    title = f"no r: {within['why']}"
    if not within["why"]:
        title = f"within rates: r = {interval(within, 'r')}, n = {within['n']} decays"
        of_coupling, of_outcome = (interval(within, f"reliability_{axis}") for axis in ("x", "y"))
        if of_coupling and of_outcome:
            title += f"\nreliability: {quantity(grid, at)} {of_coupling}, {outcome} {of_outcome}"
    figure.suptitle(title, fontsize=8)
    figure.supxlabel(coupling_label(grid, at))
    figure.supylabel(capitalised(LABELS[outcome]))
    bar = figure.colorbar(
        ScalarMappable(cmap=palette), ax=axes, ticks=ticks, location="top", aspect=40, pad=0.04
    )
    bar.ax.set_xticklabels([f"{decay:g}" for decay in decays])
    bar.set_label("weight decay")
    return figure


def coupling_against_rate(grid: xr.Dataset, at: dict[str, Any]) -> Figure:
    """Draw coupling against stochastic depth, a panel for each weight decay (Figs. 6b and 10)."""
    decays = sorted(set(grid["weight_decay"].values))
    figure, axes = _panels(len(decays))
    for panel, decay in zip(axes, decays, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["weight_decay"] == decay)).sortby("drop_path")
        x, y = cells["drop_path"].values, final_coupling(cells, at)
        rates = np.unique(x)
        panel.plot(x, y, "o", color=BLUE, ms=3, alpha=0.5)
        panel.plot(rates, [y[x == rate].mean() for rate in rates], color=BLUE)
        _mark_zero(panel, grid, at)
        panel.set_title(f"weight decay {decay:.3g}")
        panel.set_xticks(rates[:: -(-len(rates) // TICKS)])
    figure.supxlabel("Stochastic depth rate")
    figure.supylabel(coupling_label(grid, at))
    return figure


def coupling_over_training(grid: xr.Dataset, at: dict[str, Any], theme: Theme = "light") -> Figure:
    """Draw the mean and range over weight decays and seeds for each rate, over steps and, where recorded, over training loss."""
    recorded = bool(grid["training_loss"].notnull().all())
    figure, (over_steps, *over_loss) = panels(1 + recorded, per_row=1, size=(WIDTH, 2.9))
    rates = sorted(set(grid["drop_path"].values))
    step, values, palette = grid["step"].values, couplings(grid).sel(at), _palette(theme)
    for rate, shade in zip(rates, np.linspace(0, 1, len(rates)), strict=True):
        chosen, colour = np.flatnonzero(grid["drop_path"] == rate), palette(shade)
        coupling = values.isel(cell=chosen)
        over_steps.fill_between(
            step, coupling.min("cell"), coupling.max("cell"), color=colour, alpha=0.12, lw=0
        )
        line = {"color": colour, "marker": "o", "ms": 2, "lw": 1, "label": f"{rate:g}"}
        over_steps.plot(step, coupling.mean("cell"), **line)
        for axes in over_loss:
            axes.plot(
                grid["training_loss"].isel(cell=chosen).mean("cell"), coupling.mean("cell"), **line
            )
    training_axis(over_steps, step)
    for axes in over_loss:
        axes.invert_xaxis()
        axes.set_xlabel("Training loss (plain images), falling to the right")
    for axes in (over_steps, *over_loss):
        _mark_zero(axes, grid, at)
        axes.set_ylabel(coupling_label(grid, at))
    handles = over_steps.get_legend_handles_labels()
    figure.legend(
        *handles,
        loc="outside upper center",
        ncols=RATES_PER_ROW,
        title="stochastic depth rate",
        title_fontsize=7,
        frameon=False,
    )
    return figure


def correlations_with_accuracy(grid: xr.Dataset, table: pd.DataFrame, token: str) -> Figure:
    """Draw r by definition, K and layer pairs; with several rates, r within rates (`drop_path` "fixed")."""
    rows = table[(table["outcome"] == "accuracy") & (table["token"] == token)]
    rates = set(rows["drop_path"])
    rate = "fixed" if "fixed" in rates else rates.pop()
    words = {name: definition(name) for name in set(rows["measure"])}
    shown = rows.loc[rows["drop_path"] == rate].replace({"measure": words})
    figure = correlation_heatmap(shown, "accuracy", coupling=either(quantities(grid).values()))
    figure.axes[0].set_facecolor("lightgrey")  # where there is no r, under a black text
    return figure


def reliability_of_measures(table: pd.DataFrame, k: int) -> Figure:
    """Draw the reliability of accuracy, test loss and, at one K, every coupling, with intervals.

    Args:
        table: the rows of `vit.statistics.reliabilities`.
    """
    rows = table.to_dict("records")
    outcomes = [row for row in rows if row["variable"] in LABELS]
    of_k = [row for row in rows if row["variable"] not in LABELS and row["k"] == k]
    labels = [LABELS[row["variable"]] for row in outcomes]
    labels += dict.fromkeys(
        f"{definition(row['measure'])}, {PAIR_WORDS[row['pairs']]}" for row in of_k
    )
    figure, (axes,) = panels(1, size=(WIDTH, 0.9 + 0.24 * len(labels)))
    tokens = list(dict.fromkeys(row["token"] for row in of_k))
    series: list[tuple[str | None, list[dict], str, float]] = [(None, outcomes, GREY, 0)]
    for i, token in enumerate(tokens):
        of_token = [row for row in of_k if row["token"] == token]
        series.append((token, of_token, f"C{i}", len(outcomes) + 0.3 * (i - (len(tokens) - 1) / 2)))
    for label, records, colour, first in series:
        value, low, high = np.array([[row[name] for name in RELIABILITY] for row in records]).T
        place = first + np.arange(len(records))
        axes.errorbar(
            value,
            place,
            xerr=[value - low, high - value],
            fmt="o",
            ms=3,
            lw=1,
            color=colour,
            label=label,
        )
    axes.axvline(RELIABLE, color=GREY, ls=":", lw=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    coupling = either(row["variable"] for row in of_k)
    axes.set_xlabel(f"Reliability within rates ({coupling}: K = {k})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=len(tokens))
    return figure


def described(grid: xr.Dataset, at: dict[str, Any]) -> str:
    """Return in words which coupling is shown."""
    return ", ".join(_words(grid, at))


def coupling_label(grid: xr.Dataset, at: dict[str, Any]) -> str:
    """Return the label of an axis of coupling."""
    what, where = _words(grid, at)
    return f"{fill(capitalised(what), LETTERS)},\n{where}"


def _words(grid: xr.Dataset, at: dict[str, Any]) -> tuple[str, str]:
    what = f"{quantity(grid, at)} by {definition(at['measure'])}"
    return what, f"K = {at['k']}, {PAIR_WORDS[at['pairs']]}, {at['token']}"


def _palette(theme: Theme) -> Colormap:
    """Return the colour map of ordered things, without the end that the theme's surface hides."""
    low, high = (0.0, 0.9) if theme == "light" else (0.35, 1.0)
    colours = colour_map(SEQUENTIAL)
    return colour_map([to_hex(colours(low + (high - low) * i / 10)) for i in range(11)])


def _mark_zero(panel: Axes, grid: xr.Dataset, at: dict[str, Any]) -> None:
    """Draw the coupling of unrelated blocks, if the grid holds their level."""
    if quantity(grid, at) == COUPLING:
        panel.axhline(0, color=GREY, ls=":", lw=1)


def _few_ticks(panel: Axes) -> None:
    """Leave room between the labels of ticks in a panel of half the width."""
    panel.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 3, 4, 5, 10]))


def _panels(count: int, beside: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels that share the y axis, two in a row, with room in inches for a colour bar."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, axes = panels(
        count, per_row=columns, size=(WIDTH / columns, HEIGHT + beside / rows), sharey=True
    )
    figure.get_layout_engine().set(wspace=0.1)  # type: ignore[union-attr,call-arg]  # between labels of neighbouring panels
    return figure, axes
