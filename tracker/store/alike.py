"""Whether Datasets of several steps were measured alike, so that they make one curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

ATTRIBUTES = {
    "settings_sha256": "settings",
    "final_norm": "final norm",
    "tokens": "tokens",
}  # and how messages call them


def attribute_values(ds: xr.Dataset, name: str) -> list[str]:
    """Return the values of an attribute, or of the coordinate along `step` where units differ in it."""
    held: Any = ds.coords[name].values if name in ds.coords else ds.attrs.get(name, [])
    return list(dict.fromkeys(str(value) for value in np.atleast_1d(np.asarray(held, dtype=object))))


def likeness(ds: xr.Dataset) -> dict[str, set[str]]:
    """Return what all steps of a curve have in common, each with the values found: one, where they make a curve."""
    found = {words: set(attribute_values(ds, name)) or {""} for name, words in ATTRIBUTES.items()}
    found["number of blocks"] = {str(ds.sizes.get("layer"))}
    pairs = ds["pair_layer_other"] if "pair_position" in ds else None
    found["layers compared across tokens"] = set() if pairs is None else set(map(str, np.atleast_2d(pairs).tolist()))
    return found


def require_one_curve(likenesses: Sequence[Mapping[str, set[str]]], path: Path) -> None:
    """Check that Datasets, given by their `likeness`, can be joined.

    Raises:
        ValueError: if the units of `path` were measured differently.
    """
    for name in likenesses[0]:
        values = set().union(*(likeness[name] for likeness in likenesses))
        if len(values) > 1:
            raise ValueError(
                f"{path} holds units that differ in their {name} ({', '.join(sorted(values))}); they make no curve: remove the "
                "units of one kind"
            )
