"""Figures of a grid: Figs 6a, 6b and 10 of the paper, coupling over training, and correlations of every definition.

Panels are two in a row, so that text is readable where a page is 400 pixels wide.
"""

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from tracker.figures.drawing import BLUE, FEWEST_POINTS, GREY, ORANGE, PAIR_WORDS, SERIES, panels, shades, training_axis
from tracker.figures.model_comparisons import correlation_heatmap
from vit.answers import LABELS, interval
from vit.statistics import RELIABILITY, RELIABLE, final_coupling, fit_settings, setting_labels, setting_means

WIDTH, HEIGHT = 4.4, 2.5  # inches, of a figure and of a row of panels


def outcome_against_coupling(grid: xr.Dataset, at: dict[str, Any], outcome: str) -> Figure:
    """Draw test accuracy or loss against coupling, a panel for each stochastic depth rate (Fig. 6a).

    Args:
        at: the token, measure, k and pairs to show.
        outcome: accuracy or loss.
    """
    rates = sorted(set(grid["drop_path"].values))
    figure, axes = _panels(len(rates))
    decays = sorted(set(grid["weight_decay"].values))
    ticks = np.linspace(0, 1, len(decays))
    colours = dict(zip(decays, ticks, strict=True))
    for panel, rate in zip(axes, rates, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["drop_path"] == rate))
        x, y = -cells["miscoupling"].isel(step=-1).sel(at).values, cells[outcome].values
        if outcome == "accuracy":
            error = np.sqrt(y * (1 - y) / grid.attrs["images"])
            panel.errorbar(x, y, error, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        colour = [colours[decay] for decay in cells["weight_decay"].values]
        panel.scatter(x, y, c=colour, cmap="viridis", vmin=0, vmax=1, s=10, alpha=0.35, lw=0)
        means = setting_means(cells, np.stack([x, y], 1))
        of_setting = [colours[decay] for decay in setting_labels(cells, "weight_decay")]
        panel.scatter(*means.T, c=of_setting, cmap="viridis", vmin=0, vmax=1, s=24, zorder=3)
        fit = fit_settings(cells, x, y, "drop_path")
        title = f"depth rate {rate:g}"
        if fit["n"] >= FEWEST_POINTS and np.isfinite(fit["r"]):
            ends = np.array([means[:, 0].min(), means[:, 0].max()])
            panel.plot(ends, means[:, 1].mean() + fit["slope"] * (ends - means[:, 0].mean()), color=ORANGE, lw=1.2)
            title += f"\nr = {interval(fit, 'r')}"
            if np.isfinite([fit["reliability_x"], fit["reliability_y"]]).all():
                title += f"\nreliability {fit['reliability_x']:.2f}, {fit['reliability_y']:.2f}"
        panel.set_title(title)
    within = fit_settings(grid, final_coupling(grid, at), grid[outcome].values, "drop_path")
    if len(rates) > 1 and within["n"] >= FEWEST_POINTS and np.isfinite(within["r"]):
        title = f"within rates: r = {interval(within, 'r')}"
        of_coupling, of_outcome = (interval(within, f"reliability_{axis}") for axis in ("x", "y"))
        if of_coupling and of_outcome:
            title += f"\nreliability: coupling {of_coupling}, {outcome} {of_outcome}"
        figure.suptitle(title, fontsize=8)
    figure.supxlabel(coupling_label(at))
    figure.supylabel(LABELS[outcome])
    bar = figure.colorbar(
        ScalarMappable(cmap="viridis"), ax=list(axes), ticks=ticks, location="bottom", aspect=40, pad=0.02
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
        x, y = cells["drop_path"].values, -cells["miscoupling"].isel(step=-1).sel(at).values
        null = -cells["null"].isel(step=-1).sel(at).values
        rates = sorted(set(x))
        y_mean, null_mean = ([values[x == rate].mean() for rate in rates] for values in (y, null))
        panel.plot(x, y, "o", color=BLUE, ms=3, alpha=0.5)
        panel.plot(rates, y_mean, color=BLUE, label="coupling")
        if np.isfinite(null_mean).any():
            panel.plot(rates, null_mean, color=GREY, ls=":", label="null level")
        panel.set_title(f"weight decay {decay:.3g}")
    figure.supxlabel("stochastic depth rate")
    figure.supylabel(coupling_label(at))
    axes[0].legend()
    return figure


def coupling_over_training(grid: xr.Dataset, at: dict[str, Any]) -> Figure:
    """Draw the mean and range over weight decays and seeds for each rate, over steps and, where recorded, over training loss."""
    recorded = bool(grid["training_loss"].notnull().all())
    figure, (over_steps, *over_loss) = panels(1 + recorded, per_row=1, size=(WIDTH, 2.9))
    rates = sorted(set(grid["drop_path"].values))
    step = grid["step"].values
    for rate, colour in zip(rates, shades(len(rates)), strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["drop_path"] == rate))
        coupling = -cells["miscoupling"].sel(at)
        over_steps.fill_between(step, coupling.min("cell"), coupling.max("cell"), color=colour, alpha=0.12, lw=0)
        line = {"color": colour, "marker": "o", "ms": 2, "lw": 1, "label": f"depth rate {rate:g}"}
        over_steps.plot(step, coupling.mean("cell"), **line)
        for axes in over_loss:
            axes.plot(cells["training_loss"].mean("cell"), coupling.mean("cell"), **line)
    null = -grid["null"].sel(at).mean("cell")
    if null.notnull().any():
        over_steps.plot(step, null, color=GREY, ls=":", label="null level")
    training_axis(over_steps, step)
    over_steps.legend()
    for axes in over_loss:
        axes.invert_xaxis()
        axes.set_xlabel("training loss (plain images), falling to the right")
    for axes in (over_steps, *over_loss):
        axes.set_ylabel(coupling_label(at))
    return figure


def correlations_with_accuracy(table: pd.DataFrame, token: str) -> Figure:
    """Draw r by mis-coupling, K and layer pairs; with several rates, r within rates (`drop_path` "fixed")."""
    rows = table[(table["outcome"] == "accuracy") & (table["token"] == token)]
    rates = set(rows["drop_path"])
    rate = "fixed" if "fixed" in rates else rates.pop()
    return correlation_heatmap(rows.loc[rows["drop_path"] == rate], "accuracy")


def reliability_of_measures(table: pd.DataFrame, k: int) -> Figure:
    """Draw the reliability of accuracy, test loss and, at one K, every coupling, with intervals.

    Args:
        table: the rows of `vit.statistics.reliabilities`.
    """
    rows = table.to_dict("records")
    outcomes = [row for row in rows if row["variable"] != "coupling"]
    couplings = [row for row in rows if row["variable"] == "coupling" and row["k"] == k]
    labels = [LABELS[row["variable"]] for row in outcomes]
    labels += dict.fromkeys(f"{row['measure']}, {PAIR_WORDS[row['pairs']]}" for row in couplings)
    figure, (axes,) = panels(1, size=(WIDTH, 0.9 + 0.24 * len(labels)))
    tokens = list(dict.fromkeys(row["token"] for row in couplings))
    series: list[tuple[str | None, list[dict], str, float]] = [(None, outcomes, "black", 0)]
    for i, token in enumerate(tokens):
        of_token = [row for row in couplings if row["token"] == token]
        series.append((token, of_token, SERIES["light"][i], len(outcomes) + 0.3 * (i - (len(tokens) - 1) / 2)))
    for label, records, colour, first in series:
        value, low, high = np.array([[row[name] for name in RELIABILITY] for row in records]).T
        place = first + np.arange(len(records))
        axes.errorbar(value, place, xerr=[value - low, high - value], fmt="o", ms=3, lw=1, color=colour, label=label)
    axes.axvline(RELIABLE, color=GREY, ls=":", lw=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel(f"reliability within rates (coupling: K = {k})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=len(tokens))
    return figure


def coupling_label(at: dict[str, Any]) -> str:
    """Return the label of an axis of coupling."""
    return f"−{at['measure']}, K = {at['k']},\n{PAIR_WORDS[at['pairs']]}, {at['token']}"


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels that share the y axis, two in a row."""
    columns = min(count, 2)
    return panels(count, per_row=columns, size=(WIDTH / columns, HEIGHT), sharey=True)
