"""Matplotlib figures from labelled results."""

from typing import TYPE_CHECKING

import xarray as xr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe-Ito: told apart by colour-blind readers and in grey print.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6E6E6E"


def coupling_heatmap(unit: xr.Dataset, k: int, measure: str = "miscoupling") -> "Figure":
    """The (L, L) matrix of one step: rows the block described, columns the block that lends its basis."""
    from matplotlib.figure import Figure

    matrix = unit[measure].sel(k=k).mean(("prompt", "token"))
    L = matrix.sizes["layer"]
    figure = Figure(figsize=(4.6, 4), layout="constrained")
    axes = figure.subplots()
    top = max(1.0, float(matrix.max()))
    image = axes.imshow(matrix, cmap="viridis_r", vmin=0, vmax=top, extent=(0.5, L + 0.5, L + 0.5, 0.5))
    axes.set(xlabel="basis of block l'", ylabel="block l", title=f"{measure}, K = {k}")
    figure.colorbar(image, label="0 = perfectly coupled")
    return figure


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
        coupling.fill_between(
            step, points[f"{measure}_q25"].sel(at), points[f"{measure}_q75"].sel(at), color=colour, alpha=0.2, lw=0
        )
        coupling.plot(step, points[measure].sel(at), color=colour, marker="o", ms=3, label=label)
        coupling.plot(step, points[f"{measure}_null"].sel(at), color=colour, ls=":", label="its null level")
    coupling.set(title=f"Mis-coupling, l ≠ l', K = {k}", ylim=(0, None))
    coupling.legend(fontsize=7)
    for axes, name, heading in (
        (lss, "lss", "Line-shape score"),
        (growth, "expodistance_raw", "Expodistance, before final norm"),
    ):
        low, middle, high = (points[name].sel(statistic=s) for s in ("q25", "median", "q75"))
        axes.fill_between(step, low, high, color=GREEN, alpha=0.2, lw=0)
        axes.plot(step, middle, color=GREEN, marker="o", ms=3)
        axes.set(title=heading)
    growth.set_yscale("log")
    for axes in (coupling, lss, growth):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return figure
