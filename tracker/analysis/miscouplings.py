"""Read the mis-couplings of a store without its other variables: a grid of trainings has a thousand units.

`tracker.open_results` reads and labels every variable of a unit; here each file is opened as HDF5, and only what is averaged
is read.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from tracker.analysis.null_levels import READ, levels_of_several
from tracker.analysis.statistics import over_pairs
from tracker.analysis.variables import PAIRS
from tracker.measures.registry import MISCOUPLINGS
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
    read = store.curve(steps, {*measures, *READ, *COORDINATES})
    names = [name for name in measures if name in read]
    if not names:
        raise ValueError(f"{directory} holds no mis-coupling; measure `coupling`")
    levels = levels_of_several(read, names)
    parts = {
        "miscoupling": [over_pairs(read[name].astype(np.float64)) for name in names],
        "null": [over_pairs(xr.DataArray(levels[name], read[name].coords)) for name in names],
    }
    means = {part: xr.concat(values, "measure").mean("prompt") for part, values in parts.items()}
    dims = ("step", "token", "measure", "k", "pairs")
    return xr.Dataset(means).assign_coords(measure=names, pairs=list(PAIRS)).transpose(*dims)
