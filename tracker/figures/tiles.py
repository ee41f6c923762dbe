"""Grids of coupling matrices (Figs 3, 4, 17 to 23): a tile for each pair of layers, or of tokens in two layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.statistics import largest_singular_values, middle_layers
from tracker.figures.drawing import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILES = 8  # matrices along a side of a grid of them
COLOURS: dict[str, Any] = {"cmap": "magma", "vmin": 0, "vmax": 1}  # the same in all panels: one colour bar serves


@dataclass(frozen=True)
class Tiles:
    """What a grid of coupling matrices shows, and how it is labelled."""

    A: np.ndarray  # (T, T, K, K), absolute values
    largest: np.ndarray  # (T,): singular value of each Jacobian described
    of: Literal["block", "token"]
    labels: np.ndarray
    title: str
    described: tuple[str, str]  # of the rows and of the columns
    fixed: Mapping[str, int]  # what all tiles share


def _layer_tiles(at: xr.Dataset, variable: str) -> Tiles:
    A = abs(at[variable].isel(token=0)).transpose("layer", "layer_other", "row", "column").values
    start = max(0, (len(A) - TILES) // 2)
    part = slice(start, start + TILES)
    largest = A[np.arange(len(A)), np.arange(len(A)), 0, 0][part]  # its own basis shows a Jacobian's singular values
    title = f"J of token {int(at['token_position'].isel(token=0))}, blocks l and l'"
    labels = at["layer"].values[part]
    return Tiles(A[part, part], largest, "block", labels, title, ("l: the block described", "l': its basis"), {})


def _token_tiles(at: xr.Dataset, variable: str) -> Tiles:
    kind = variable.removesuffix("_matrix")
    l, other = middle_layers(at)
    positions = at["pair_position"].dropna("pair_token").values.astype(int)
    labels = positions[:TILES]
    A = abs(at[variable].sel(layer=l)).transpose("pair_token", "pair_token_other", "row", "column").values
    largest = largest_singular_values(at, kind).sel(layer=l).values[: len(labels)]
    of = {
        "self": "J of token {} to itself",
        "fixed_input": f"J of token {positions[0]} to {{}}",
        "fixed_output": f"J of {{}} to token {positions[-1]}",
    }[kind]
    said = (f"{of.format('t')}, in block {l}", "basis: " + of.format("t'") + f", in block {other}")
    part, fixed = slice(len(labels)), {"block": l, "block_other": other}
    return Tiles(A[part, part], largest, "token", labels, f"l = {l}, l' = {other}", said, fixed)


def matrix_grid(results: Results, variable: str) -> "tuple[Figure, pd.DataFrame]":
    """|A| of the first prompt, a tile for each pair: of layers at the first token measured, or of tokens in the two layers
    l and l' in the middle of those compared.

    At most eight along a side, about the middle of the layers; columns lend the basis. Colours are relative to the largest
    singular value of the row's Jacobian, the numbers are |A| itself.
    """
    shown = [(name, ds, i) for name, ds in results.items() for i in sorted({0, ds.sizes["step"] - 1})]
    figure, axes = panels(len(shown))
    rows = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        tiles = (_layer_tiles if "token" in ds[variable].dims else _token_tiles)(ds.isel(step=i, prompt=0), variable)
        T, _, K, _ = tiles.A.shape
        picture = np.full((T * (K + 1) - 1, T * (K + 1) - 1), np.nan)
        for a, b in np.ndindex(T, T):
            top = max(tiles.largest[a], np.finfo(tiles.A.dtype).tiny)
            picture[a * (K + 1) : a * (K + 1) + K, b * (K + 1) : b * (K + 1) + K] = tiles.A[a, b] / top
        panel.imshow(picture, **COLOURS)
        middle = np.arange(T) * (K + 1) + (K - 1) / 2
        panel.set_xticks(middle, tiles.labels)
        panel.set_yticks(middle, tiles.labels)
        panel.grid(False)
        panel.set_title(f"{name}, step {int(ds['step'][i]):,}\n{tiles.title}", fontsize=8)
        panel.set_xlabel(tiles.described[1], fontsize=8)
        panel.set_ylabel(tiles.described[0], fontsize=8)
        index, of = np.indices(tiles.A.shape).reshape(4, -1), tiles.of
        columns = {of: tiles.labels[index[0]], f"{of}_other": tiles.labels[index[1]]}
        columns |= {**tiles.fixed, "row": index[2] + 1, "column": index[3] + 1}
        rows.append(pd.DataFrame({"result": name, "step": int(ds["step"][i]), **columns, "value": tiles.A.ravel()}))
    label = "|A| relative to the largest\nsingular value of the row's Jacobian"
    bar = figure.colorbar(axes[0].images[0], ax=axes, fraction=0.05, label=label)
    bar.ax.tick_params(labelsize=7)
    bar.ax.yaxis.label.set_fontsize(8)
    return figure, pd.concat(rows, ignore_index=True)
