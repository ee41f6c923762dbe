"""Figures of the blocks' Jacobians.

- grids of coupling matrices A (Figs 3, 4, 17 to 23): a tile is the (K, K) matrix A of a pair of layers, or of a pair of tokens in
  two layers;
- singular values (Figs 33, 34), singular values of the products of blocks by depth, and Lyapunov exponents;
- residual alignment of attention and MLP (Li and Papyan, 2023): their Jacobians in the singular bases of the block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import SAMPLES, inverse_fit, middle_layers
from tracker.analysis.regression import FEWEST_POINTS
from tracker.analysis.selections import require_labels
from tracker.analysis.variables import evenly_spaced
from tracker.common.errors import UsageError
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    ORANGE,
    at_step,
    colour_map,
    legend_below,
    logarithmic_y,
    panels,
    shades,
)
from tracker.measures.declaration import NORMED, WITH_NORM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted


MAX_TILES = 8  # along a side of a grid
RANKS = (1, 2, 5, 10, 30, 50)  # of the singular values drawn


@dataclass(frozen=True)
class MatrixGrid:
    """A grid of coupling matrices and its labels."""

    A: np.ndarray  # (T, T, K, K), absolute values
    largest: np.ndarray  # (T,), largest singular value of the Jacobian of each row
    index: Literal["block", "token"]
    labels: np.ndarray  # (T,)
    title: str
    rows: str
    columns: str
    common: Mapping[str, int]  # what all tiles share


def matrix_grid(
    results: Results, choices: Choices, target: "Axes | None", *, variable: str
) -> "Plotted":
    """Draw |A| of the first prompt at the first and the last step.

    Tiles are pairs of layers at the first token measured, those chosen or eight about the middle one; or pairs of at most eight
    tokens, in the layer chosen or in the middle of those compared, and its l'. A column is the basis in which the Jacobian of a
    row is expressed. Colours are relative to the largest singular value of the row's Jacobian; the table holds |A| itself.
    """
    shown = [
        (name, ds, i) for name, ds in results.items() for i in sorted({0, ds.sizes["step"] - 1})
    ]
    figure, axes = panels(len(shown), target)
    tables = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        make = _layer_grid if "token" in ds[variable].dims else _token_grid
        grid = make(ds.isel(step=i, prompt=0), variable, choices.layers)
        _draw_grid(panel, grid)
        panel.set_title(f"{at_step(name, ds, i)}\n{grid.title}")
        row, column, a, b = np.indices(grid.A.shape).reshape(4, -1)
        columns = {
            grid.index: grid.labels[row],
            f"{grid.index}_other": grid.labels[column],
            **grid.common,
        }
        columns |= {"row": a + 1, "column": b + 1, "value": grid.A.ravel()}
        tables.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **columns}))
    label = "|A| relative to the largest\nsingular value of the row's Jacobian"
    figure.colorbar(axes[0].images[0], ax=axes, fraction=0.05, label=label)
    return figure, pd.concat(tables, ignore_index=True)


def _layer_grid(at: xr.Dataset, variable: str, layers: Sequence[int] | None) -> MatrixGrid:
    start = max(0, (at.sizes["layer"] - MAX_TILES) // 2)
    shown = list(layers) if layers else at["layer"].values[start : start + MAX_TILES]
    tiles = at[variable].isel(token=0).sel(layer=shown, layer_other=shown)
    A = abs(tiles).transpose("layer", "layer_other", "row", "column").values
    largest = A[np.arange(len(A)), np.arange(len(A)), 0, 0]  # in its own basis, A is diag(s)
    title = f"J of token {int(at['token_position'].isel(token=0))}, blocks l and l'"
    return MatrixGrid(
        A, largest, "block", np.asarray(shown), title, "Block l (Jacobian)", "Block l' (basis)", {}
    )


def _token_grid(at: xr.Dataset, variable: str, layers: Sequence[int] | None) -> MatrixGrid:
    variant = variable.removesuffix("_matrix")
    l, other = _compared_block(at, layers) if layers else middle_layers(at)
    positions = at["pair_position"].dropna("pair_token").values.astype(int)
    labels = positions[:MAX_TILES]
    part = slice(len(labels))
    require_labels(at, "rank", (1,), "a matrix in units of the largest singular value")
    A = (
        abs(at[variable].sel(layer=l))
        .transpose("pair_token", "pair_token_other", "row", "column")
        .values
    )
    largest = at[f"{variant}_singular_value"].sel(rank=1).sel(layer=l).values[part]
    jacobian = {
        "self": "J of token {} to itself",
        "fixed_input": f"J of token {positions[0]} to {{}}",
        "fixed_output": f"J of {{}} to token {positions[-1]}",
    }[variant]
    rows = jacobian.format("t") + f", in block {l}"
    columns = f"basis: {jacobian}, in block {other}".format("t'")
    common = {"block": l, "block_other": other}
    return MatrixGrid(
        A[part, part], largest, "token", labels, f"l = {l}, l' = {other}", rows, columns, common
    )


def _compared_block(at: xr.Dataset, layers: Sequence[int]) -> tuple[int, int]:
    """Return the one block chosen and the block that it is compared with across tokens."""
    others = at["pair_layer_other"].dropna("layer")
    compared = others["layer"].values.tolist()
    if len(layers) != 1 or layers[0] not in compared:
        raise UsageError(
            f"layers {','.join(map(str, layers))}: this figure shows one block that is compared with another; choose from "
            f"{', '.join(map(str, compared)) or 'none'}"
        )
    return layers[0], int(others.sel(layer=layers[0]))


def _draw_grid(panel: "Axes", grid: MatrixGrid) -> None:
    T, _, K, _ = grid.A.shape
    picture = np.full((T * (K + 1) - 1, T * (K + 1) - 1), np.nan)
    for a, b in np.ndindex(T, T):
        # The Jacobian of a block that adds nothing is 0.
        top = max(grid.largest[a], np.finfo(grid.A.dtype).tiny)
        picture[a * (K + 1) : a * (K + 1) + K, b * (K + 1) : b * (K + 1) + K] = grid.A[a, b] / top
    _show(panel, picture, np.arange(T) * (K + 1) + (K - 1) / 2, grid.labels)
    panel.set(xlabel=grid.columns, ylabel=grid.rows)


def _show(panel: "Axes", picture: np.ndarray, ticks: np.ndarray, labels: np.ndarray) -> None:
    """Draw values from 0 to 1 in the same colours in all panels."""
    panel.imshow(picture, cmap=colour_map(), vmin=0, vmax=1)
    panel.set_xticks(ticks, labels)
    panel.set_yticks(ticks, labels)
    panel.grid(False)


def singular_values(
    results: Results,
    choices: Choices,
    target: "Axes | None",
    *,
    step: Literal["first", "last"],
) -> "Plotted":
    """Draw top singular values by layer, medians over prompts and tokens, and 1 / s_1 with its straight line over depth."""
    figure, axes = panels(2 * len(results), target)
    variable = choices.variable("singular_value")
    rows = []
    for values, inverse, (name, ds) in zip(axes[::2], axes[1::2], results.items(), strict=True):
        i = 0 if step == "first" else -1
        at = ds[variable].isel(step=i).median(("prompt", "token"))
        layers = at["layer"].values
        require_labels(at, "rank", (1,), "a fit of 1 / s over depth")
        fit = inverse_fit(layers, at.sel(rank=1).values)
        for rank, s in _draw_ranks(values, at).items():
            columns = {"rank": rank, "layer": layers, "value": s, **(fit if rank == 1 else {})}
            rows.append(pd.DataFrame({"result": name, **columns}))
        inverse.plot(layers, fit["inverse"], color=BLUE, marker="o", ms=3, ls="", label="1 / s₁")
        text = f"no line: fewer than {FEWEST_POINTS} blocks, or no spread"
        if fit["n"] >= FEWEST_POINTS and np.isfinite(fit["r2"]):
            inverse.plot(layers, fit["fitted"], color=ORANGE, lw=1.2, label="straight line")
            text = f"R² = {fit['r2']:.2f}, n = {fit['n']} blocks"
        norm = ", " + WITH_NORM if variable.endswith(NORMED) else ""
        values.set(title=at_step(name, ds, i) + norm, ylabel="Singular value of J")
        inverse.set(title=text, xlabel="Block l", ylabel="1 / s₁ (s₁: largest singular value)")
        legend_below(inverse)
    return figure, pd.concat(rows, ignore_index=True)


def _draw_ranks(panel: "Axes", by_layer: xr.DataArray) -> dict[int, np.ndarray]:
    """Draw singular values (rank, layer) at some ranks against the layer, and return them by rank."""
    drawn = {
        rank: by_layer.sel(rank=rank).values for rank in RANKS if rank <= by_layer.sizes["rank"]
    }
    for (rank, s), colour in zip(drawn.items(), shades(len(drawn)), strict=True):
        panel.plot(by_layer["layer"], s, color=colour, marker="o", ms=3, label=f"rank {rank}")
    logarithmic_y(panel)
    panel.set_xlabel("Block l")
    legend_below(panel)
    return drawn


def spectra(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
    """Draw singular values of the product of blocks 1 to l against l, and the exponents of all blocks.

    At the first and the last step. Lines are medians over prompts and tokens. Exponents are drawn against k / d, with quartiles.
    """
    shown = [
        (name, ds, i) for name, ds in results.items() for i in sorted({0, ds.sizes["step"] - 1})
    ]
    figure, axes = panels(2 * len(shown), target)
    rows = []
    for values, exponents, (name, ds, i) in zip(axes[::2], axes[1::2], shown, strict=True):
        step = ds["step"].values[i]
        at = ds["from_first_singular_value"].isel(step=i).median(SAMPLES).dropna("layer", how="all")
        for rank, s in _draw_ranks(values, at).items():
            rows.append(
                pd.DataFrame(
                    {"result": name, "step": step, "rank": rank, "layer": at["layer"], "value": s}
                )
            )
        of_all = (
            ds["lyapunov_exponent"]
            .isel(step=i)
            .stack(sample=SAMPLES)
            .transpose("sample", "exponent")
            .values
        )
        share = np.arange(1, of_all.shape[-1] + 1) / of_all.shape[-1]
        low, middle, high = np.nanquantile(of_all, [0.25, 0.5, 0.75], axis=0)
        exponents.fill_between(share, low, high, color=BLUE, alpha=0.2, lw=0)
        exponents.plot(share, middle, color=BLUE)
        exponents.axhline(0, color="grey", lw=0.8, ls=":")
        rows.append(
            pd.DataFrame(
                {
                    "result": name,
                    "step": step,
                    "exponent": np.arange(1, len(share) + 1),
                    "value": middle,
                }
            )
        )
        title = at_step(name, ds, i)
        values.set(title=title, ylabel="Singular value of\n(I + Jˡ) … (I + J¹)")
        exponents.set(title=title, xlabel="k / d", ylabel="Lyapunov exponent, ln(sₖ) / L")
    return figure, pd.concat(rows, ignore_index=True)


HALVES = {"attention": "attention", "mlp": "MLP"}
TICKS = 10  # at most, along an axis


def residual_alignment(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
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
            raise UsageError(
                f"the blocks of {name} do not show attention and MLP as modules; choose another figure"
            )
        shown += [
            (name, ds, at.sel(layer=layers[i]), half)
            for half in HALVES
            for i in evenly_spaced(len(layers), 3)
        ]
    figure, axes = panels(
        len(shown),
        target,
        per_row=len({int(at["layer"]) for _, ds, at, _ in shown if ds is shown[0][1]}),
    )
    tables = []
    for panel, (name, ds, at, half) in zip(axes, shown, strict=True):
        A, layer = abs(at[f"{half}_matrix"].values), int(at["layer"])
        s = at["singular_value"]
        ticks = np.arange(0, len(A), -(-len(A) // TICKS))
        _show(panel, A / max(float(s.sel(rank=1)), np.finfo(A.dtype).tiny), ticks, ticks + 1)
        title = f"{at_step(name, ds, -1)}\n{HALVES[half]} of block {layer}"
        panel.set(title=title, xlabel="vₖ of the block", ylabel="uₖ of the block")
        row, column = np.indices(A.shape).reshape(2, -1) + 1
        columns = {"half": half, "layer": layer, "row": row, "column": column, "value": A.ravel()}
        tables.append(pd.DataFrame({"result": name, "step": ds["step"].values[-1], **columns}))
    label = "|Uᵀ J V|, J of the half, relative to the\nlargest singular value of the block"
    figure.colorbar(axes[0].images[0], ax=axes, fraction=0.05, label=label)
    return figure, pd.concat(tables, ignore_index=True)
