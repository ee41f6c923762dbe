"""Figures of a grid: Figs 6a, 6b and 10 of the paper, coupling over training, and correlations with accuracy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

from tracker.figures.drawing import FEWEST_POINTS, PAIR_WORDS, panels, shades, training_axis
from tracker.figures.model_comparisons import correlation_heatmap
from tracker.figures.palette import BLUE, GREY, ORANGE


def accuracy_against_coupling(grid: xr.Dataset, table: pd.DataFrame, at: dict[str, Any]) -> Figure:
    """Draw accuracy against coupling, one panel per stochastic depth rate (Fig. 6a).

    Args:
        table: the rows of `vit.statistics.correlations`.
        at: the measure, k and pairs to show.
    """
    rates = sorted(set(grid["drop_path"].values))
    figure, axes = panels(len(rates), sharey=True)
    decays = sorted(set(grid["weight_decay"].values))
    fits = table[(table.measure == at["measure"]) & (table.k == at["k"]) & (table.pairs == at["pairs"])]
    for panel, rate in zip(axes, rates, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["drop_path"] == rate))
        x, y = -cells["miscoupling"].isel(step=-1).sel(at).values, cells["accuracy"].values
        error = np.sqrt(y * (1 - y) / grid.attrs["images"])
        panel.errorbar(x, y, error, fmt="none", ecolor=GREY, alpha=0.5, lw=0.8)
        colour = [decays.index(decay) / max(len(decays) - 1, 1) for decay in cells["weight_decay"].values]
        points = panel.scatter(x, y, c=colour, cmap="viridis", vmin=0, vmax=1, s=22, zorder=3)
        fit = fits.loc[fits["drop_path"] == f"{rate:g}"].iloc[0]
        title = f"stochastic depth {rate:g}"
        if fit.n >= FEWEST_POINTS and np.isfinite(fit.r2):
            ends = np.array([x.min(), x.max()])
            panel.plot(ends, y.mean() + fit.slope * (ends - x.mean()), color=ORANGE, lw=1.2)
            sign = "+" if fit.r > 0 else "−"
            title += f"\nR² = {fit.r2:.2f} [{fit.r2_low:.2f}, {fit.r2_high:.2f}] ({sign}), p = {fit.p:.2g}"
            if np.isfinite(fit.get("cluster_p", np.nan)):
                title += f"\nseeds averaged: R² = {fit.cluster_r2:.2f}, p = {fit.cluster_p:.2g}"
        else:
            title += f"\nno line: fewer than {FEWEST_POINTS} cells, or no spread"
        panel.set_title(title, fontsize=8)
    figure.supxlabel(coupling_label(at), fontsize=9)
    figure.supylabel("test accuracy", fontsize=9)
    bar = figure.colorbar(points, ax=list(axes), ticks=np.linspace(0, 1, len(decays)), label="weight decay")
    bar.ax.set_yticklabels([f"{decay:g}" for decay in decays])
    return figure


def coupling_against_rate(grid: xr.Dataset, at: dict[str, Any], decays: Sequence[float]) -> Figure:
    """Draw coupling against stochastic depth, one panel per weight decay (Fig. 6b with one, Fig. 10 with all)."""
    figure, axes = panels(len(decays), sharey=True)
    for panel, decay in zip(axes, decays, strict=True):
        cells = grid.isel(cell=np.flatnonzero(grid["weight_decay"] == decay)).sortby("drop_path")
        x, y = cells["drop_path"].values, -cells["miscoupling"].isel(step=-1).sel(at).values
        null = -cells["null"].isel(step=-1).sel(at).values
        rates = sorted(set(x))
        y_mean, null_mean = ([values[x == rate].mean() for rate in rates] for values in (y, null))
        panel.plot(x, y, "o", color=BLUE, ms=4)
        panel.plot(rates, y_mean, color=BLUE, label="coupling")
        panel.plot(rates, null_mean, color=GREY, ls=":", label="null level")
        panel.set_title(f"weight decay {decay:g}", fontsize=9)
    figure.supxlabel("stochastic depth", fontsize=9)
    figure.supylabel(coupling_label(at), fontsize=9)
    axes[0].legend(fontsize=7)
    return figure


def coupling_over_training(grid: xr.Dataset, at: dict[str, Any]) -> Figure:
    """Draw the mean and range over weight decays and seeds for each stochastic depth rate."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    rates = sorted(set(grid["drop_path"].values))
    step = grid["step"].values
    for rate, colour in zip(rates, shades(len(rates)), strict=True):
        cells = -grid["miscoupling"].sel(at).isel(cell=np.flatnonzero(grid["drop_path"] == rate))
        axes.fill_between(step, cells.min("cell"), cells.max("cell"), color=colour, alpha=0.12, lw=0)
        axes.plot(step, cells.mean("cell"), color=colour, marker="o", ms=3, label=f"stochastic depth {rate:g}")
    axes.plot(step, -grid["null"].sel(at).mean("cell"), color=GREY, ls=":", label="null level")
    training_axis(axes, step)
    axes.set_ylabel(coupling_label(at), fontsize=9)
    axes.legend(fontsize=7)
    return figure


def correlations_with_accuracy(table: pd.DataFrame) -> Figure:
    """Draw r by mis-coupling, K and layer pairs; with several rates, r within rates (`drop_path` "fixed")."""
    which = "fixed" if (table.drop_path == "fixed").any() else table.drop_path.iloc[0]
    return correlation_heatmap(table.loc[table["drop_path"] == which], "accuracy")


def coupling_label(at: dict[str, Any]) -> str:
    """Return the label of an axis of coupling."""
    return f"−{at['measure']}, K = {at['k']}, {PAIR_WORDS[at['pairs']]}"
