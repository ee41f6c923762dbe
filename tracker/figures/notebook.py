"""Figures in a notebook: `tracker.plot(results)` draws those of `python -m tracker.figures`, by the same names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from checkpoints.extras import require
from tracker.errors import UsageError
from tracker.figures.selection import draw, resolve
from tracker.figures.wording import PYTHON
from tracker.measures.names import require_version
from tracker.results import open_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(
    results: xr.Dataset | str | Path | Mapping[str, xr.Dataset],
    name: str | int | None = None,
    *,
    k: int | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw one figure of a measurement, a walk or a training run, or of several of them.

    Under `%matplotlib inline`, a notebook shows the figure that the last line of a cell returns; `.savefig("figure.pdf")` saves
    it.

    Args:
        results: a Dataset of `tracker.measure` or `tracker.open_results`; a directory of results; or a mapping from names, which
            the figure shows, to Datasets. A Dataset without training steps allows the figures that need one step.
        name: "curves", "heatmap", or a figure of the paper such as "1b" (`python -m tracker.figures list` lists them). None
            draws "curves" if there are several training steps, else "heatmap".
        k: the number of singular vectors; None for the smallest measured.
        ax: the axes to draw into, for a figure of one panel; the figure returned is theirs.

    Raises:
        UsageError: for an unknown figure, for one for which the results do not suffice (the message states what they lack, and
            which figures they allow), and for results that were measured by different conventions.
        ImportError: without the extra `report`.
    """
    require("matplotlib", "tracker.plot")
    if isinstance(results, (str, Path)):
        results = open_results(results)
    several = {_name(results): results} if isinstance(results, xr.Dataset) else results
    if not isinstance(several, Mapping) or not several or not all(map(_measured, several.values())):
        raise UsageError(
            f"can't plot {type(results).__name__}; give a Dataset as from tracker.measure or tracker.open_results, a directory "
            "of results, or a mapping from names to Datasets"
        )
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes | None):
        raise UsageError(f"ax is a {type(ax).__name__}; give matplotlib axes, as from plt.subplots()")
    if name is None:
        name = "curves" if all(ds.sizes.get("step", 1) > 1 for ds in several.values()) else "heatmap"
    with_steps = {label: _with_steps(require_version(ds, label)) for label, ds in several.items()}
    figure, _ = draw(resolve(name, PYTHON), with_steps, k, ax, PYTHON)
    return figure


def _measured(ds: object) -> bool:
    return isinstance(ds, xr.Dataset) and "model_class" in ds.attrs and "prompt" in ds.dims


def _name(ds: xr.Dataset) -> str:
    """Return the name of a result in a figure: its suite or repository, or its class where the name is a long path."""
    name = ds.attrs.get("suite") or ds.attrs.get("model_name", "")
    return name if name and not Path(name).is_absolute() else ds.attrs.get("model_class", "").rpartition(".")[2]


def _with_steps(ds: xr.Dataset) -> xr.Dataset:
    """Return a result with a `step` dimension; a measurement that does not state its training step has NaN there."""
    if "k" in ds.coords and "k" not in ds.dims:
        k = int(ds["k"])
        raise UsageError(f"this result is the selection K = {k}; give the whole Dataset, and k={k}")
    if "step" in ds.dims:
        return ds
    return ds.expand_dims("step" if "step" in ds.coords else {"step": [float("nan")]})
