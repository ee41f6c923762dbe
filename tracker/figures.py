"""Matplotlib figures from labelled results: `python -m tracker.figures curves RESULTS --out DIR`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tracker.results import open_results
from tracker.statistics import curves

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
    growth.yaxis.set_major_formatter("{x:g}")
    growth.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
    for axes in (coupling, lss, growth):
        axes.set_xscale("symlog", linthresh=1)  # linear up to 1, so that step 0 has a place
        axes.set_xlim(-0.2, 1.3 * step[-1])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return figure


NAMES = ("curves", "heatmap")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.figures", description="Draw a figure from a walk's or a run's results."
    )
    parser.add_argument("name", choices=NAMES, help="curves over training, or the heat map of the last step")
    parser.add_argument("results", type=Path, help="the directory that a walk wrote (--out)")
    parser.add_argument("--out", type=Path, default=Path("."), help="directory for NAME.png")
    parser.add_argument("--k", type=int, help="number of singular vectors; default: the smallest measured")
    parsed = parser.parse_args(arguments)
    try:
        dataset = open_results(parsed.results)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ks = [int(k) for k in dataset["k"].values]
    k = parsed.k or ks[0]
    if k not in ks:
        print(f"error: --k {k} was not measured; there are {', '.join(map(str, ks))}", file=sys.stderr)
        return 2
    if parsed.name == "curves":
        figure = training_curves(curves(dataset), k, dataset.attrs.get("suite", ""))
    else:
        figure = coupling_heatmap(dataset.isel(step=-1), k)
    parsed.out.mkdir(parents=True, exist_ok=True)
    file = parsed.out / f"{parsed.name}.png"
    figure.savefig(file, dpi=150)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
