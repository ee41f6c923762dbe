"""Figures in a notebook: `tracker.plot(results)` draws those of `python -m tracker.figures`, by the same names."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from tracker.common.errors import UsageError
from tracker.common.extras import require
from tracker.figures.selection import PYTHON, draw, resolve
from tracker.store.results import distinct_names, open_results, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GIVE = (
    "give a Dataset as from tracker.measure or tracker.open_results, a directory of results, or several of these in a list or in "
    "a mapping from names"
)
Result = xr.Dataset | PathLike[str] | str  # a Dataset, or a store or its directory


def plot(
    results: Result | Sequence[Result] | Mapping[str, Result],
    name: str | int | None = None,
    *,
    measure: str | None = None,
    k: int | None = None,
    step: int | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw one figure of a measurement, a walk or a training run, or of several of them.

    Under `%matplotlib inline`, a notebook shows the figure that the last line of a cell returns; `.savefig("figure.pdf")` saves
    it.

    Args:
        results: a Dataset of `tracker.measure` or `tracker.open_results`; a store or its directory; or several of them, as a list
            or as a mapping from names, which the figure shows. A Dataset without training steps allows the figures that need
            one step. Of several results that were measured by different conventions, "curves", "heatmap" and "1b" are drawn
            with a warning.
        name: "curves", "heatmap", or a figure of the paper such as "1b" (`python -m tracker.figures list` lists them). None
            draws "curves" if there are several training steps, else "heatmap".
        measure: the measure of pairs of blocks that "curves", "heatmap" and "1b" show, such as "offdiag" or
            "miscoupling_normed"; None for that of the figure, of the blocks alone.
        k: the number of singular vectors; None for the smallest measured.
        step: the training step of a "heatmap", or the one that "curves" and "1b" mark; None for the last.
        ax: the axes to draw into, for a figure of one panel; the figure returned is theirs.

    Raises:
        UsageError: for an unknown figure, for one for which the results do not suffice (the message states what they lack, and
            which figures they allow), for a measure, K or step that was not measured, and for results that were measured by
            different conventions, in other figures.
        ImportError: without the extra `report`.
    """
    require("matplotlib", "tracker.plot")
    several = _by_name(results)
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes | None):
        raise UsageError(f"ax is a {type(ax).__name__}; give matplotlib axes, as from plt.subplots()")
    if name is None:
        name = "curves" if all(ds.sizes.get("step", 1) > 1 for ds in several.values()) else "heatmap"
    with_steps = {label: _with_steps(ds) for label, ds in several.items()}
    figure, _ = draw(resolve(name, PYTHON), with_steps, k, ax, PYTHON, measure, step)
    return figure


def _by_name(results: Any) -> dict[str, xr.Dataset]:
    """Return the results opened, by the names that a figure shows: those given, or the results' own."""
    if isinstance(results, Mapping) and not isinstance(results, xr.Dataset):
        listed, names = list(results.values()), [str(name) for name in results]
        opened = [_opened(of) for of in listed]
    else:
        listed = list(results) if isinstance(results, (list, tuple)) else [results]
        opened = [_opened(of) for of in listed]
        names = [short_name(ds) for ds in opened]
    if not opened:
        raise UsageError(f"an empty {type(results).__name__} can't be plotted; {GIVE}")
    if len(set(names)) < len(names):
        places = [Path(of) for of in listed if not isinstance(of, xr.Dataset)]
        if len(places) == len(listed):
            names = distinct_names(places)
        else:
            names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    return dict(zip(names, opened, strict=True))


def _opened(result: Any) -> xr.Dataset:
    ds = open_results(result) if isinstance(result, str | PathLike) else result
    if isinstance(ds, xr.Dataset) and "model_class" in ds.attrs and "prompt" in ds.dims:
        return ds
    raise UsageError(f"can't plot {type(result).__name__}; {GIVE}")


def _with_steps(ds: xr.Dataset) -> xr.Dataset:
    """Return a result with a `step` dimension; a measurement that does not state its training step has NaN there."""
    if "k" in ds.coords and "k" not in ds.dims:
        k = int(ds["k"])
        raise UsageError(f"this result is the selection K = {k}; give the whole Dataset, and k={k}")
    if "step" in ds.dims:
        return ds
    return ds.expand_dims("step" if "step" in ds.coords else {"step": [float("nan")]})
