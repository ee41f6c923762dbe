"""Read the mis-couplings of a store without its other variables: a grid of trainings has a thousand units.

`tracker.open_results` reads and labels every variable of a unit; here each file is opened as HDF5, and only what is averaged
is read.
"""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
import xarray as xr

from tracker.analysis.statistics import PAIRS
from tracker.measures.coupling import depth_means
from tracker.measures.registry import MISCOUPLINGS
from tracker.results import Store, require_steps


def read_miscouplings(directory: str | Path, measures: Sequence[str] = MISCOUPLINGS) -> xr.Dataset:
    """Return the curve points of each mis-coupling, for each token by itself.

    Args:
        measures: those that the store lacks are left out.

    Returns:
        `miscoupling` and its `null` level (step, token, measure, k, pairs): means over layer pairs and samples, as in
        `tracker.analysis.statistics.curves`.

    Raises:
        FileNotFoundError: if there are no units.
        ValueError: if a unit is damaged, or units differ in tokens, layers, K or measures.
    """
    store = Store(directory)
    steps = require_steps(store)
    units = [_read_unit(store.file(step), measures) for step in steps]
    if len({(values.shape, names, tuple(ks)) for values, names, ks in units}) > 1:
        raise ValueError(f"{directory} holds units that differ in their tokens, measures or K; they make no curve")
    _, names, ks = units[0]
    if not names:
        raise ValueError(f"{directory} holds no mis-coupling; measure `coupling`")
    values = np.stack([values for values, _, _ in units], 1)
    dims = ("step", "token", "measure", "k", "pairs")
    return xr.Dataset(
        {"miscoupling": (dims, values[0]), "null": (dims, values[1])},
        coords={"step": steps, "measure": list(names), "k": ks, "pairs": list(PAIRS)},
    )


def _read_unit(file: Path, measures: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...], list[int]]:
    """Return means (2, token, measure, k, pairs) of the values and of their null levels, the measures, and the K."""
    try:
        with h5py.File(file) as opened:
            names = tuple(name for name in measures if name in opened)
            if not names:
                return np.zeros((2, 0)), (), []
            values = np.stack([_array(opened, name) for name in names], 2).astype(np.float64)
            null = np.stack([_array(opened, f"{name}_null") for name in names], 2).astype(np.float64)
            ks = [int(k) for k in _array(opened, "k")]
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} can't be read ({error}); the file is damaged") from error
    # Prompt, token, measure, k, layer, layer_other.
    return np.nanmean(_means_over_pairs(values, null), 1), names, ks


def _array(opened: h5py.File, name: str) -> np.ndarray:
    """Read a variable by HDF5's own functions, in half of the time of `opened[name][()]`."""
    stored = h5py.h5d.open(opened.id, name.encode())
    out = np.empty(stored.shape, stored.dtype)
    stored.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    return out


def _means_over_pairs(values: np.ndarray, null: np.ndarray) -> np.ndarray:
    """Return the means over the layer pairs of `PAIRS` (2, ..., pairs) of values (..., L, L) and of the null level of each.

    The null level (..., L) of a pair is that of its block l, 0 on the diagonal. Where all pairs are defined, the means are
    products with the weights of the pairs.
    """
    L = values.shape[-1]
    off_diagonal = ~np.eye(L, dtype=bool)
    if np.isfinite(values).all() and np.isfinite(null).all():
        weights = _stacked(torch.eye(L * L, dtype=torch.float64).unflatten(1, (L, L))).reshape(L, L, len(PAIRS))
        of_block = (weights * off_diagonal[..., None]).sum(1)
        return np.stack([values.reshape(*values.shape[:-2], -1) @ weights.reshape(L * L, -1), null @ of_block])
    of_pairs = np.where(np.isfinite(values), null[..., None] * off_diagonal, np.nan)
    return _stacked(torch.from_numpy(np.stack([values, of_pairs])))


def _stacked(matrices: torch.Tensor) -> np.ndarray:
    means = depth_means(matrices)
    return torch.stack([means[name] for name in PAIRS], -1).numpy()
