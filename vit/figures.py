"""Figures of a grid: Figs 6a, 6b and 10 of the paper.

Panels are two in a row, so that text is readable where a page is 400 pixels wide.
"""

from textwrap import fill
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tracker.common.text import capitalised
from tracker.figures.drawing import (
    BLUE,
    GREY,
    PAIR_WORDS,
    SEQUENTIAL,
    colour_map,
    definition,
    fitted_line,
    panels,
)
from vit.answers import correlation
from vit.statistics import final_coupling, fit_units, quantity, unit_means

WIDTH, HEIGHT = 4.4, 2.5  # inches, of a figure and of a row of panels
LETTERS = 36  # at most, of a line of an axis label
TICKS = 4  # at most, of rates, in a panel of half the width
# What the axis of an outcome spans at least, so that noise does not fill it: standard errors of an accuracy, of which 64 equal
# models span about 5; and for the loss, whose error is not known, a share of the largest
LEAST_ERRORS, LEAST_SHARE = 16, 0.1


def outcome_against_coupling(grid: xr.Dataset, at: dict[str, Any], outcome: str) -> Figure:
    """Draw test accuracy or loss against coupling, a panel for each stochastic depth rate (Fig. 6a).

    Args:
        at: the token, measure, k and pairs to show.
        outcome: accuracy or loss.
    """
    rates = np.unique(grid["drop_path"])
    accuracy = grid["accuracy"].values
    errors = np.sqrt(accuracy * (1 - accuracy) / grid.attrs["images"])
    figure, axes = _panels(len(rates), beside=1.0)
    decays, of_cell = np.unique(grid["weight_decay"], return_inverse=True)
    # Yellow is hard to see on white
    shade = {"cmap": colour_map(SEQUENTIAL[:-1]), "vmin": 0, "vmax": max(len(decays) - 1, 1)}
    for panel, rate in zip(axes, rates, strict=True):
        chosen = np.flatnonzero(grid["drop_path"] == rate)
        cells = grid.isel(cell=chosen)
        x, y = final_coupling(cells, at), cells[outcome].values
        if outcome == "accuracy":
            panel.errorbar(x, y, errors[chosen], fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        panel.scatter(x, y, c=of_cell[chosen], **shade, s=10, alpha=0.35, lw=0)
        mean_x, mean_y = unit_means(cells, np.stack([x, y], 1), "drop_path").T
        means = panel.scatter(mean_x, mean_y, c=np.unique(of_cell[chosen]), **shade, s=24, zorder=3)
        title, fit = f"depth rate {rate:g}", fit_units(cells, x, y, "drop_path")
        if not fit["why"]:
            title += f"\n{correlation(fit)}"
            fitted_line(panel, mean_x, mean_y, fit, corrected=None)
        panel.set_title(title)
        panel.margins(0.1)
        # Room between labels in a panel of half the width
        panel.locator_params(axis="x", nbins=3, steps=[1, 2, 3, 4, 5, 10])
    low, high = axes[0].get_ylim()
    least = LEAST_ERRORS * errors.max() if outcome == "accuracy" else LEAST_SHARE * high
    axes[0].set_ylim(min(low, high - least))
    within = fit_units(grid, final_coupling(grid, at), grid[outcome].values, "drop_path")
    found = f"within rates: {correlation(within)}, {within['n']} weight decays"
    figure.suptitle(f"no r: {within['why']}" if within["why"] else found, fontsize=8)
    figure.supxlabel(coupling_label(grid, at))
    figure.supylabel(f"Test {outcome}")
    bar = figure.colorbar(
        means, ax=axes, ticks=range(len(decays)), location="top", aspect=40, pad=0.04
    )
    bar.ax.set_xticklabels([f"{decay:g}" for decay in decays])
    bar.set_label("weight decay")
    return figure


def coupling_against_rate(grid: xr.Dataset, at: dict[str, Any]) -> Figure:
    """Draw coupling against stochastic depth, a panel for each weight decay (Figs. 6b and 10)."""
    decays = np.unique(grid["weight_decay"])
    figure, axes = _panels(len(decays))
    for panel, decay in zip(axes, decays, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["weight_decay"] == decay)).sortby("drop_path")
        x, y = cells["drop_path"].values, final_coupling(cells, at)
        rates = np.unique(x)
        panel.plot(x, y, "o", color=BLUE, ms=3, alpha=0.5)
        panel.plot(rates, [y[x == rate].mean() for rate in rates], color=BLUE)
        panel.set_title(f"weight decay {decay:.3g}")
        panel.set_xticks(rates[:: -(-len(rates) // TICKS)])
    figure.supxlabel("Stochastic depth rate")
    figure.supylabel(coupling_label(grid, at))
    return figure


def described(grid: xr.Dataset, at: dict[str, Any]) -> tuple[str, str]:
    """Return in words which coupling is shown: what by which definition, and of which K, pairs and position."""
    what = f"{quantity(grid, at)} by {definition(at['measure'])}"
    return what, f"K = {at['k']}, {PAIR_WORDS[at['pairs']]}, {at['token']}"


def coupling_label(grid: xr.Dataset, at: dict[str, Any]) -> str:
    """Return the label of an axis of coupling."""
    what, where = described(grid, at)
    return f"{fill(capitalised(what), LETTERS)},\n{where}"


def _panels(count: int, beside: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels that share the y axis, two in a row, with room in inches for a colour bar."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, axes = panels(
        count, per_row=columns, size=(WIDTH / columns, HEIGHT + beside / rows), sharey=True
    )
    figure.get_layout_engine().set(wspace=0.1)  # type: ignore[union-attr,call-arg]  # between labels of neighbouring panels
    return figure, axes
