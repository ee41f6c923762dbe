"""Read the mis-couplings of a store without its other variables: a grid of trainings has a thousand units.

`tracker.open_results` reads and labels every variable of a unit; here each file is opened as HDF5, and only what is averaged
is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from tracker.analysis.null_levels import READ, null_level
from tracker.analysis.statistics import over_pairs
from tracker.analysis.variables import PAIRS
from tracker.measures.registry import DIMS, MISCOUPLINGS
from tracker.results import Store, require_steps

COORDINATES = ("k", "layer", "layer_other")


def read_miscouplings(directory: str | Path, measures: Sequence[str] = MISCOUPLINGS) -> xr.Dataset:
    """Return the curve points of each mis-coupling, for each token by itself.

    Args:
        measures: those of the blocks alone; those that the store lacks are left out.

    Returns:
        `miscoupling` and its `null` level (step, token, measure, k, pairs): means over layer pairs and samples, as in
        `tracker.analysis.statistics.curves`.

    Raises:
        FileNotFoundError: if there are no units.
        ValueError: if a unit is damaged, or units differ in prompts, tokens, blocks, K or measures.
    """
    store = Store(directory)
    steps = require_steps(store)
    units = [_read_unit(store.file(step), measures) for step in steps]
    if any(_axes(unit) != _axes(units[0]) for unit in units):
        raise ValueError(
            f"{directory} holds units that differ in their prompts, tokens, blocks, measures or K; they make no curve"
        )
    names = [name for name in measures if name in units[0]]
    if not names:
        raise ValueError(f"{directory} holds no mis-coupling; measure `coupling`")
    # One Dataset of all steps: the levels of each by itself take four times as long.
    read = xr.concat(units, "step", coords="minimal", compat="override", join="override").assign_coords(step=steps)
    parts = {
        "miscoupling": [over_pairs(read[name].astype(np.float64)) for name in names],
        "null": [over_pairs(null_level(read, name)) for name in names],
    }
    means = {part: xr.concat(values, "measure").mean("prompt") for part, values in parts.items()}
    dims = ("step", "token", "measure", "k", "pairs")
    return xr.Dataset(means).assign_coords(measure=names, pairs=list(PAIRS)).transpose(*dims)


def _read_unit(file: Path, measures: Sequence[str]) -> xr.Dataset:
    """Return the mis-couplings of one unit and what their null levels are computed from."""
    try:
        with h5py.File(file) as opened:
            names = [name for name in measures if name in opened]
            needed = {name: (("prompt", *DIMS[name]), _array(opened, name)) for name in (*names, *READ) if names}
            coordinates = {name: _array(opened, name) for name in COORDINATES if names}
            return xr.Dataset(needed, coordinates, {"width": np.asarray(opened.attrs["width"]).item()})
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} can't be read ({error}); the file is damaged") from error


def _axes(unit: xr.Dataset) -> tuple[Any, ...]:
    return dict(unit.sizes), {*unit.data_vars}, unit.coords["k"].values.tolist() if "k" in unit.coords else []


def _array(opened: h5py.File, name: str) -> np.ndarray:
    """Read a variable by HDF5's own functions, in half of the time of `opened[name][()]`."""
    stored = h5py.h5d.open(opened.id, name.encode())
    out = np.empty(stored.shape, stored.dtype)
    stored.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    return out
