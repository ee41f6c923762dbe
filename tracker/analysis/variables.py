"""Reductions of arrays that have named dimensions and no coordinates, `xr.Variable`.

xarray spends milliseconds on the coordinates of each `xr.DataArray` that it computes, and microseconds on the numbers of a
unit. Curve points and summaries are therefore computed from variables, and `gathered` adds the coordinates once.
Missing values (NaN) are left out of every reduction.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch
import xarray as xr

from tracker.measures.coupling import depth_means

PAIRS = ("mean", "mean_offdiag", "mean_adjacent")  # in the order of `depth_means`
QUANTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}
LABELS = {"pairs": PAIRS, "statistic": tuple(QUANTILES)}  # of the dimensions that reductions add

Labelled = xr.Dataset | xr.DataArray


def in_float64(results: xr.Dataset, name: str) -> xr.Variable:
    """Return a variable in float64, so that one step alone and the same step among others give the same sum."""
    stored = results.variables[name]
    return xr.Variable(stored.dims, stored.values.astype(np.float64), stored.attrs)


def mean(values: xr.Variable, over: Iterable[str]) -> xr.Variable:
    """Return the mean over dimensions."""
    over = tuple(over)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        means = np.nanmean(values.values, axis=tuple(map(values.dims.index, over)))
    return xr.Variable([dim for dim in values.dims if dim not in over], means, values.attrs)


def median(values: xr.Variable, over: Iterable[str]) -> xr.Variable:
    """Return the median over dimensions."""
    rest, ordered, count = _ordered(values, tuple(over))
    middle = np.stack([(count - 1) // 2, count // 2], -1)
    # Without values the index is -1; what stands at 0 is NaN, as all are.
    return xr.Variable(rest, np.take_along_axis(ordered, middle.clip(0), -1).mean(-1), values.attrs)


def quartiles(values: xr.Variable, over: Iterable[str]) -> xr.Variable:
    """Return quartiles over dimensions, along `statistic`, by linear interpolation as in `np.quantile`."""
    return quantiles(values, over, list(QUANTILES.values()), "statistic")


def quantiles(
    values: xr.Variable, over: Iterable[str], levels: Sequence[float], dim: str
) -> xr.Variable:
    """Return quantiles over dimensions, along a new one, as `quartiles`."""
    rest, ordered, count = _ordered(values, tuple(over))
    at = ((count - 1)[..., None] * np.array(levels)).clip(0)
    below = at.astype(int)
    above = np.minimum(below + 1, (count - 1)[..., None].clip(0))
    low, high = (np.take_along_axis(ordered, index, -1) for index in (below, above))
    share, between = at - below, high - low
    # From the nearer end, as numpy: rounding then never takes a quantile beyond the values around it.
    spread = np.where(share < 0.5, low + between * share, high - between * (1 - share))
    return xr.Variable((dim, *rest), np.moveaxis(spread, -1, 0), values.attrs)


def over_pairs(matrices: xr.Variable, counted: xr.Variable) -> xr.Variable:
    """Average over layer pairs: dimensions (layer, layer_other) become `pairs`.

    Args:
        counted: the distances of pairs that count where l = l' does not (`tracker.analysis.pairs`).
    """
    matrices, counted = (
        values.transpose(..., "layer", "layer_other") for values in (matrices, counted)
    )
    means = depth_means(torch.from_numpy(matrices.values), torch.from_numpy(counted.values))
    return xr.Variable((*matrices.dims[:-2], "pairs"), means.numpy(), matrices.attrs)


def gathered(values: Mapping[str, xr.Variable], results: Labelled) -> xr.Dataset:
    """Return variables as a Dataset, with the coordinates of the results that they were computed from."""
    return xr.Dataset(values, coordinates(values.values(), results))


def coordinates(several: Iterable[xr.Variable], results: Labelled) -> dict[str, xr.Variable]:
    """Return the coordinates of results that fit the dimensions of variables, and the `LABELS` of those dimensions."""
    sizes = {dim: size for values in several for dim, size in values.sizes.items()}
    # Those of a dimension that was reduced are left out.
    fitting = {
        str(name): values
        for name, values in results.coords.variables.items()
        if all(sizes.get(dim) == size for dim, size in values.sizes.items())
    }
    return fitting | {
        dim: xr.Variable(dim, list(labels)) for dim, labels in LABELS.items() if dim in sizes
    }


def labelled(values: xr.Variable, results: Labelled) -> xr.DataArray:
    """Return a variable with the coordinates of what it was computed from."""
    return xr.DataArray(values, coordinates([values], results))


def evenly_spaced(size: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced indices below `size`, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, size - 1, min(count, size))})


def _ordered(
    values: xr.Variable, over: tuple[str, ...]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the remaining dimensions, the values along the others in ascending order, NaN last, and the number of values."""
    rest = [str(dim) for dim in values.dims if dim not in over]
    values = values.transpose(*rest, *over)
    # Not -1: a window that is defined nowhere leaves no depth.
    flat = values.values.reshape(*values.shape[: len(rest)], prod(values.shape[len(rest) :]))
    return rest, np.sort(flat, -1), (~np.isnan(flat)).sum(-1)
