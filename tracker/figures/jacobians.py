"""Figures of singular values of the blocks' Jacobians by depth (Figs 33, 34), and of the products of blocks."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import SAMPLES, inverse_fit
from tracker.analysis.regression import FEWEST_POINTS
from tracker.analysis.selections import require_labels
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    ORANGE,
    at_step,
    banded_line,
    first_and_last_steps,
    legend_below,
    logarithmic_y,
    of_quartiles,
    panels,
    shades,
)
from tracker.measures.declaration import NORMED, WITH_NORM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

RANKS = (1, 2, 5, 10, 30, 50)  # of the singular values drawn


def singular_values(
    results: Results, choices: Choices, *, step: Literal["first", "last"]
) -> "Plotted":
    """Draw top singular values by layer, medians over prompts and tokens, and 1 / s_1 with its straight line over depth."""
    figure, axes = panels(2 * len(results), choices.ax)
    variable = choices.variable("singular_value")
    norm = ", " + WITH_NORM if variable.endswith(NORMED) else ""
    tables = []
    for values, inverse, (name, ds) in zip(axes[::2], axes[1::2], results.items(), strict=True):
        i = 0 if step == "first" else -1
        at = ds[variable].isel(step=i).median(SAMPLES)
        require_labels(at, "rank", (1,), "a fit of 1 / s over depth")
        layers = at["layer"].values
        fit = inverse_fit(layers, at.sel(rank=1).values)
        table = pd.DataFrame({"result": name, **_draw_ranks(values, at)})
        of_first = table["rank"] == 1
        for column, numbers in fit.items():
            table.loc[of_first, column] = numbers
        tables.append(table)
        inverse.plot(layers, fit["inverse"], color=BLUE, marker="o", ms=3, ls="", label="1 / s₁")
        text = f"no line: fewer than {FEWEST_POINTS} blocks, or no spread"
        if fit["n"] >= FEWEST_POINTS and np.isfinite(fit["r2"]):
            inverse.plot(layers, fit["fitted"], color=ORANGE, lw=1.2, label="straight line")
            text = f"R² = {fit['r2']:.2f}, n = {fit['n']} blocks"
        values.set(title=at_step(name, ds, i) + norm, ylabel="Singular value of J")
        inverse.set(title=text, xlabel="Block l", ylabel="1 / s₁ (s₁: largest singular value)")
        legend_below(inverse)
    return figure, tables


def _draw_ranks(panel: "Axes", by_layer: xr.DataArray) -> pd.DataFrame:
    """Draw singular values (rank, layer) at some ranks against the layer, and return them."""
    ranks = [rank for rank in RANKS if rank <= by_layer.sizes["rank"]]
    tables = []
    for rank, colour in zip(ranks, shades(len(ranks)), strict=True):
        columns: dict[str, Any] = {"rank": rank, "layer": by_layer["layer"].values}
        columns["value"] = by_layer.sel(rank=rank).values
        style = {"color": colour, "marker": "o", "ms": 3}
        panel.plot(columns["layer"], columns["value"], label=f"rank {rank}", **style)
        tables.append(pd.DataFrame(columns))
    logarithmic_y(panel)
    panel.set_xlabel("Block l")
    legend_below(panel)
    return pd.concat(tables, ignore_index=True)


def spectra(results: Results, choices: Choices) -> "Plotted":
    """Draw singular values of the product of blocks 1 to l against l, and the exponents of all blocks.

    At the first and the last step. Lines are medians over prompts and tokens. Exponents are drawn against k / d, with quartiles.
    """
    shown = first_and_last_steps(results)
    figure, axes = panels(2 * len(shown), choices.ax)
    tables = []
    for values, exponents, (name, ds, i) in zip(axes[::2], axes[1::2], shown, strict=True):
        at = ds.isel(step=i)
        products = at["from_first_singular_value"].median(SAMPLES).dropna("layer", how="all")
        spread = of_quartiles(at["lyapunov_exponent"], "exponent")
        d = at.sizes["exponent"]
        banded_line(exponents, {**spread, "exponent": np.arange(1, d + 1) / d}, BLUE)
        exponents.axhline(0, color="grey", lw=0.8, ls=":")
        of_exponents = {"exponent": np.arange(1, d + 1), "value": spread["median"]}
        of_step = pd.concat(
            [_draw_ranks(values, products), pd.DataFrame(of_exponents)], ignore_index=True
        )
        tables.append(pd.DataFrame({"result": name, "step": at["step"].item(), **of_step}))
        title = at_step(name, ds, i)
        values.set(title=title, ylabel="Singular value of\n(I + Jˡ) … (I + J¹)")
        exponents.set(title=title, xlabel="k / d", ylabel="Lyapunov exponent, ln(sₖ) / L")
    return figure, tables
