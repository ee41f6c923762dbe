"""Figures of the products of blocks: singular values by depth, and Lyapunov exponents."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracker.analysis.across_models import Results
from tracker.figures.drawing import at_step, panels, shades
from tracker.figures.jacobians import RANKS
from tracker.figures.palette import BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

SAMPLES = ("prompt", "token")


def spectra(results: Results, _: int, given: "Axes | None" = None) -> "Plotted":
    """Draw singular values of the product of blocks 1 to l against l, and the exponents of all blocks.

    At the first and the last step. Lines are medians over prompts and tokens. Exponents are drawn against k / d, with quartiles.
    """
    shown = [(name, ds, i) for name, ds in results.items() for i in sorted({0, ds.sizes["step"] - 1})]
    figure, axes = panels(2 * len(shown), given)
    rows = []
    for values, exponents, (name, ds, i) in zip(axes[::2], axes[1::2], shown, strict=True):
        step = ds["step"].values[i]
        at = ds["from_first_singular_value"].isel(step=i).median(SAMPLES).dropna("layer", how="all")
        ranks = [rank for rank in RANKS if rank <= at.sizes["rank"]]
        for rank, colour in zip(ranks, shades(len(ranks)), strict=True):
            s = at.sel(rank=rank)
            values.plot(s["layer"], s, color=colour, marker="o", ms=3, label=f"rank {rank}")
            rows.append(pd.DataFrame({"result": name, "step": step, "rank": rank, "layer": s["layer"], "value": s}))
        of_all = ds["lyapunov_exponent"].isel(step=i).stack(sample=SAMPLES).transpose("sample", "exponent").values
        share = np.arange(1, of_all.shape[-1] + 1) / of_all.shape[-1]
        low, middle, high = np.nanquantile(of_all, [0.25, 0.5, 0.75], axis=0)
        exponents.fill_between(share, low, high, color=BLUE, alpha=0.2, lw=0)
        exponents.plot(share, middle, color=BLUE)
        exponents.axhline(0, color="grey", lw=0.8, ls=":")
        rows.append(
            pd.DataFrame({"result": name, "step": step, "exponent": np.arange(1, len(share) + 1), "value": middle})
        )
        values.set_yscale("log")
        values.tick_params(which="minor", labelsize=7)
        values.set_title(at_step(name, ds, i), fontsize=8)
        exponents.set_title(at_step(name, ds, i), fontsize=8)
        values.set_xlabel("Block l", fontsize=8)
        values.set_ylabel("Singular value of\n(I + Jˡ) … (I + J¹)", fontsize=8)
        exponents.set_xlabel("k / d", fontsize=8)
        exponents.set_ylabel("Lyapunov exponent, ln(sₖ) / L", fontsize=8)
        values.legend(fontsize=6)
    return figure, pd.concat(rows, ignore_index=True)
