"""Figures in a notebook: `tracker.plot(results)`. They are those of `python -m tracker.figures`, by the same names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from tracker.figures.write import draw, known
from tracker.results import open_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    results: xr.Dataset | str | Path | Mapping[str, xr.Dataset], name: str | None = None, *, k: int | None = None
) -> "Figure":
    """Draw one figure of a measurement, a walk or a run, or of several.

    Under `%matplotlib inline` a notebook shows what the last line of a cell returns; `.savefig("figure.pdf")` keeps it.

    Args:
        results: a Dataset as from `tracker.measure` or `tracker.open_results`, a directory of results, or several Datasets by
            what they are to be called.
        name: "curves", "heatmap", or a figure of the paper such as "1b" (`python -m tracker.figures list` says what each
            shows). None: "curves" where there are several training steps, else "heatmap".
        k: the number of singular vectors; None: the smallest measured.

    Raises:
        ValueError: for a figure that is not there, or that these results can't make; says what they lack.
    """
    if isinstance(results, (str, Path)):
        results = open_results(results)
    several = {_name(results): results} if isinstance(results, xr.Dataset) else results
    if not isinstance(several, Mapping) or not several or not all(map(_measured, several.values())):
        raise ValueError(
            "a figure of what? give a Dataset as from tracker.measure or tracker.open_results, a directory of results, or "
            "several Datasets by name"
        )
    if name is None:
        name = "curves" if all(ds.sizes.get("step", 1) > 1 for ds in several.values()) else "heatmap"
    figure, _ = draw(known(name), {label: _by_step(ds, name) for label, ds in several.items()}, k)
    return figure


def _measured(ds: object) -> bool:
    return isinstance(ds, xr.Dataset) and "model_class" in ds.attrs and "prompt" in ds.dims


def _name(ds: xr.Dataset) -> str:
    """What to call a result in a figure: its suite or repository; a path would fill the figure."""
    name = ds.attrs.get("suite") or ds.attrs.get("model_name", "")
    return name if name and not Path(name).is_absolute() else ds.attrs.get("model_class", "").rpartition(".")[2]


def _by_step(ds: xr.Dataset, name: str) -> xr.Dataset:
    """A result with a `step` dimension; a heat map alone does not say of which step it is."""
    if "k" in ds.coords and "k" not in ds.dims:
        raise ValueError(f"this result is of K = {int(ds['k'])} alone; give it whole, and say which: k={int(ds['k'])}")
    if "step" in ds.dims:
        return ds
    if "step" in ds.coords or name == "heatmap":
        return ds.expand_dims("step")
    raise ValueError(f"figure {name} says at which training step; this result has none: ds.assign_coords(step=512)")
