"""Figures of matrices: mis-couplings of pairs of blocks, and coupling matrices |A|.

- the matrix of mis-couplings at a step, which loggers also draw;
- grids of coupling matrices A (Figs 3, 4, 17 to 23): a tile is the (K, K) matrix A of a pair of blocks, or of a pair of tokens in
  two blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import SAMPLES, middle_layers
from tracker.analysis.null_levels import null_level
from tracker.analysis.pairs import where_counted
from tracker.analysis.selections import require_labels
from tracker.common.errors import UsageError
from tracker.figures.choices import Choices
from tracker.figures.drawing import at_step, colour_map, first_and_last_steps, panels
from tracker.measures.registry import BY_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted

PER_ROW = 3  # matrices of mis-couplings
SIZE = 4.8, 4.0  # inches, of one of them
MAX_TILES = 8  # along a side of a grid


def heatmaps(results: Results, choices: Choices) -> "Plotted":
    """Draw the matrix of pairs of blocks of each result, in the same colours: mis-coupling m_K, unless another is chosen."""
    k, measure = choices.k, choices.measure or choices.variable("miscoupling")
    figure, axes = panels(len(results), choices.ax, min(len(results), PER_ROW), SIZE)
    matrices, nulls, tables = [], [], []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        i = -1 if choices.step is None else list(ds["step"].values).index(choices.step)
        at = ds.isel(step=i).sel(k=k)
        matrix, level = (values.mean(SAMPLES) for values in (at[measure], null_level(at, measure)))
        matrices.append(matrix)
        nulls.append(float(where_counted(level, ds).mean()))
        tables.append(matrix.to_dataframe().reset_index().assign(result=name))
        panel.set_title(f"{at_step(name, ds, i)}\n{_title(matrix, k)}")
    ends = _ends([_where_defined(matrix) for matrix in matrices], nulls)
    for panel, matrix, null in zip(axes, matrices, nulls, strict=True):
        _draw_pairs(panel, matrix, null, ends)
    return figure, tables


def coupling_pictures(matrices: xr.DataArray, nulls: Mapping[int, float]) -> dict[int, np.ndarray]:
    """Render the (L, L) matrix of each K as an RGBA image, (height, width, 4).

    Rows are blocks l, columns the blocks l' in whose basis they are expressed. A diagonal that is 0 by definition is grey; the
    colours span the other entries and their null level.

    Args:
        matrices: mis-couplings (k, layer, layer_other), means over prompts and tokens, by the name of their measure.
        nulls: the mean of their null levels over l != l', by K.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = {}
    for k, null in nulls.items():
        matrix = matrices.sel(k=k)
        canvas = FigureCanvasAgg(Figure(figsize=SIZE))
        # A layout found by matplotlib would take half of the time. This one leaves room for longer numbers.
        panel = canvas.figure.add_axes((0.1, 0.12, 0.86, 0.77))
        panel.set_title(_title(matrix, k))
        _draw_pairs(panel, matrix, null, _ends([_where_defined(matrix)], [null]))
        canvas.draw()
        pictures[k] = np.array(canvas.buffer_rgba())
    return pictures


def _title(matrix: xr.DataArray, k: int) -> str:
    return f"{BY_NAME[str(matrix.name)].label}, K = {k}"


def _where_defined(matrix: xr.DataArray) -> np.ndarray:
    """Return the entries, NaN in place of those that are 0 by definition: none, if the sides of the basis are swapped."""
    values = matrix.astype(float)
    if BY_NAME[str(matrix.name)].variant != "vju":
        values = values.where(values["layer"] != values["layer_other"])
    return values.values


def _ends(matrices: Sequence[np.ndarray], nulls: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest of all entries and null levels."""
    values = np.concatenate([*(matrix.ravel() for matrix in matrices), nulls])
    if np.isnan(values).all():
        return 0.0, 1.0
    return float(np.nanmin(values)), float(np.nanmax(values))


def _draw_pairs(
    panel: "Axes", matrix: xr.DataArray, null: float, ends: tuple[float, float]
) -> None:
    """Draw a matrix of mis-couplings with a bar of its colours, on which the null level is marked."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    values, L = _where_defined(matrix), len(matrix)
    image = panel.imshow(
        values,
        cmap=colour_map().reversed().with_extremes(bad="lightgrey"),
        extent=(0.5, L + 0.5, L + 0.5, 0.5),
        clim=ends,
    )
    panel.grid(False)
    panel.set(xlabel="Block l' (basis)", ylabel="Block l (Jacobian)")
    panel.set_title(panel.get_title(), fontsize=8, pad=20)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    bar = panel.figure.colorbar(image, ax=panel)
    bar.set_label("Mis-coupling (0: coupled)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.axhline(null, color="black", lw=1)
    explained: list[Any] = [Line2D([], [], color="black", lw=1, label=f"null level {null:.2f}")]
    if np.isnan(values).any():
        explained.insert(0, Patch(color="lightgrey", label="l = l': 0 by definition"))
    # Above the axes, and the title above it: below them is the label of x, at a distance that depends on the layout.
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "borderaxespad": 0}
    panel.legend(handles=explained, ncols=2, frameon=False, fontsize=8, **place)


@dataclass(frozen=True)
class Grid:
    """Coupling matrices of one panel, and its labels.

    Attributes:
        A: absolute values (T, T, K, K).
        largest: what the colours of each row of tiles are relative to, (T,).
        index: the name of what a row or column of tiles is.
        tiles: its values, (T,).
        columns: of the table, the same for all entries.
    """

    A: np.ndarray
    largest: np.ndarray
    title: str
    xlabel: str
    ylabel: str
    index: str
    tiles: Sequence[int]
    columns: Mapping[str, int] = field(default_factory=dict)


def matrix_grid(results: Results, choices: Choices, *, variable: str) -> "Plotted":
    """Draw |A| of the first prompt at the first and the last step.

    Tiles are pairs of layers at the first token measured, those chosen or eight about the middle one; or pairs of at most eight
    tokens, in the layer chosen or in the middle of those compared, and its l'. A column is the basis in which the Jacobian of a
    row is expressed. Colours are relative to the largest singular value of the row's Jacobian; the table holds |A| itself.
    """
    shown = first_and_last_steps(results)
    figure, axes = panels(len(shown), choices.ax)
    tables = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        grid_of = _grid_of_layers if "token" in ds[variable].dims else _grid_of_tokens
        grid = grid_of(ds.isel(step=i, prompt=0), variable, choices)
        T, _, K, _ = grid.A.shape
        # All grids have the same colours, from 0 to 1.
        picture = np.full((T * (K + 1) - 1, T * (K + 1) - 1), np.nan)
        for a, b in np.ndindex(T, T):
            # The Jacobian of a block that adds nothing is 0.
            top = max(grid.largest[a], np.finfo(grid.A.dtype).tiny)
            row, column = a * (K + 1), b * (K + 1)
            picture[row : row + K, column : column + K] = grid.A[a, b] / top
        panel.imshow(picture, cmap=colour_map(), vmin=0, vmax=1)
        panel.grid(False)
        title = f"{at_step(name, ds, i)}\n{grid.title}"
        panel.set(title=title, xlabel=grid.xlabel, ylabel=grid.ylabel)
        ticks = np.arange(T) * (K + 1) + (K - 1) / 2
        labels = list(map(str, grid.tiles))
        panel.set_xticks(ticks, labels)
        panel.set_yticks(ticks, labels)
        row, column, a, b = np.indices(grid.A.shape).reshape(4, -1)
        columns: dict[str, Any] = {"result": name, "step": ds["step"].values[i]}
        columns[grid.index] = np.take(grid.tiles, row)
        columns[f"{grid.index}_other"] = np.take(grid.tiles, column)
        columns |= {**grid.columns, "row": a + 1, "column": b + 1, "value": grid.A.ravel()}
        tables.append(pd.DataFrame(columns))
    label = "|A| relative to the largest\nsingular value of the row's Jacobian"
    figure.colorbar(axes[0].images[0], ax=axes, fraction=0.05, label=label)
    return figure, tables


def _grid_of_layers(at: xr.Dataset, variable: str, choices: Choices) -> Grid:
    start = max(0, (at.sizes["layer"] - MAX_TILES) // 2)
    shown = list(choices.layers or at["layer"].values[start : start + MAX_TILES])
    tiles = at[variable].isel(token=0).sel(layer=shown, layer_other=shown)
    A = abs(tiles).transpose("layer", "layer_other", "row", "column").values
    return Grid(
        A=A,
        largest=np.diagonal(A[:, :, 0, 0]),  # in its own basis, A is diag(s)
        title=f"J of token {int(at['token_position'].isel(token=0))}, blocks l and l'",
        xlabel="Block l' (basis)",
        ylabel="Block l (Jacobian)",
        index="block",
        tiles=shown,
    )


def _grid_of_tokens(at: xr.Dataset, variable: str, choices: Choices) -> Grid:
    variant = variable.removesuffix("_matrix")
    l, other = _compared_block(at, choices.layers) if choices.layers else middle_layers(at)
    positions = at["pair_position"].dropna("pair_token").values.astype(int).tolist()
    shown = range(len(positions[:MAX_TILES]))
    require_labels(at, "rank", (1,), "a matrix in units of the largest singular value")
    tiles = abs(at[variable].sel(layer=l).isel(pair_token=shown, pair_token_other=shown))
    jacobian = {
        "self": "J of token {} to itself",
        "fixed_input": f"J of token {positions[0]} to {{}}",
        "fixed_output": f"J of {{}} to token {positions[-1]}",
    }[variant]
    return Grid(
        A=tiles.transpose("pair_token", "pair_token_other", "row", "column").values,
        largest=at[f"{variant}_singular_value"].sel(rank=1, layer=l).values,
        title=f"l = {l}, l' = {other}",
        xlabel=f"basis: {jacobian}, in block {other}".format("t'"),
        ylabel=f"{jacobian}, in block {l}".format("t"),
        index="token",
        tiles=positions[:MAX_TILES],
        columns={"block": l, "block_other": other},
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
