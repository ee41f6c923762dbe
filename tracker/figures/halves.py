"""Residual alignment of attention and MLP (Li and Papyan, 2023): their Jacobians in the singular bases of the block."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracker.analysis.across_models import Results
from tracker.errors import UsageError
from tracker.figures.drawing import at_step, colour_map, evenly_spaced, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

HALVES = {"attention": "attention", "mlp": "MLP"}
TICKS = 10  # at most, along an axis


def residual_alignment(results: Results, _: int, given: "Axes | None" = None) -> "Plotted":
    """Draw |U^T J V| of both halves of an early, a middle and a late block, of the first prompt, at the last step.

    U and V are the block's singular vectors. Colours are relative to the largest singular value of the block.

    Raises:
        UsageError: for a result whose blocks do not show their halves.
    """
    shown = []
    for name, ds in results.items():
        at = ds.isel(step=-1, prompt=0, token=0)
        layers = at["layer"].values[at["attention_gain"].notnull().values]
        if not len(layers):
            raise UsageError(f"the blocks of {name} do not show attention and MLP as modules; choose another figure")
        shown += [(name, ds, at.sel(layer=layers[i]), half) for half in HALVES for i in evenly_spaced(len(layers), 3)]
    figure, axes = panels(
        len(shown), given, per_row=len({int(at["layer"]) for _, ds, at, _ in shown if ds is shown[0][1]})
    )
    tables = []
    for panel, (name, ds, at, half) in zip(axes, shown, strict=True):
        A, layer = abs(at[f"{half}_matrix"].values), int(at["layer"])
        s = at["singular_value"]
        panel.imshow(A / max(float(s.sel(rank=1)), np.finfo(A.dtype).tiny), cmap=colour_map(), vmin=0, vmax=1)
        panel.grid(False)
        ticks = np.arange(0, len(A), -(-len(A) // TICKS))
        panel.set_xticks(ticks, ticks + 1)
        panel.set_yticks(ticks, ticks + 1)
        panel.set_title(f"{at_step(name, ds, -1)}\n{HALVES[half]} of block {layer}", fontsize=8)
        panel.set_xlabel("vₖ of the block", fontsize=8)
        panel.set_ylabel("uₖ of the block", fontsize=8)
        row, column = np.indices(A.shape).reshape(2, -1) + 1
        columns = {"half": half, "layer": layer, "row": row, "column": column, "value": A.ravel()}
        tables.append(pd.DataFrame({"result": name, "step": ds["step"].values[-1], **columns}))
    label = "|Uᵀ J V|, J of the half, relative to the\nlargest singular value of the block"
    bar = figure.colorbar(axes[0].images[0], ax=axes, fraction=0.05, label=label)
    bar.ax.tick_params(labelsize=7)
    bar.ax.yaxis.label.set_fontsize(8)
    return figure, pd.concat(tables, ignore_index=True)
