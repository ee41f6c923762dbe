"""The content of the NetCDF file that holds one measured Dataset."""

from collections.abc import Hashable
from typing import Any

import xarray as xr

from tracker.measures.labels import labelled
from tracker.netcdf import to_bytes


def file_content(dataset: xr.Dataset) -> bytes:
    """Return the bytes of a file that holds a Dataset.

    Raises:
        ValueError: if it has a text that no file can hold, such as half of a surrogate pair.
    """
    dataset = labelled(dataset)
    # Checksums detect bytes that have changed on the disk.
    numbers = [name for name, v in dataset.variables.items() if v.dtype.kind in "biuf" and v.size and v.ndim]
    encoding: dict[Hashable, dict[str, Any]] = {name: {"fletcher32": True} for name in numbers}
    if "token_text" in dataset.coords:  # as characters a twentieth of the size of single strings
        encoding["token_text"] = {"dtype": "S1", "zlib": True}
    return to_bytes(dataset, encoding)
