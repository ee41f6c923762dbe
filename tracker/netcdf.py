"""NetCDF files of Datasets with many small variables; files of one form are read as one Dataset along `step`.

xarray opens and decodes each variable of each file by itself, which takes ten times as long as reading the numbers. Here the
variables of files that differ in nothing but values are stacked, and decoded once.
"""

import stat
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from tracker.errors import UsageError

# What the libraries raise for bytes that are no NetCDF file, or not all of it.
ERRORS = (OSError, RuntimeError, KeyError, IndexError, AttributeError, TypeError, ValueError)


class DamagedFile(ValueError):
    """A file that can't be read."""


@dataclass(frozen=True)
class Content:
    """What a file holds, as it is stored.

    Attributes:
        form: names, dimensions, types, sizes and attributes of the variables, and the values of indexes, as text.
        coordinates: names of variables that are coordinates, with spaces between them.
        variables: dimensions, values and attributes by name.
        attrs: the attributes of the file.
    """

    form: str
    coordinates: str
    variables: dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, Any]]]
    attrs: dict[str, Any]


def file_content(dataset: xr.Dataset) -> memoryview:
    """Return the bytes of a file that holds a Dataset.

    Raises:
        ValueError: if it has a text that no file can hold, such as half of a surrogate pair.
    """
    # Checksums detect bytes that have changed on the disk.
    numbers = [name for name, v in dataset.variables.items() if v.dtype.kind in "biuf" and v.size and v.ndim]
    encoding: dict[Hashable, dict[str, Any]] = {name: {"fletcher32": True} for name in numbers}
    if "token_text" in dataset.coords:  # as characters a twentieth of the size of single strings
        encoding["token_text"] = {"dtype": "S1", "zlib": True}
    return dataset.to_netcdf(engine="netcdf4", encoding=encoding)


def read_content(file: Path, names: Collection[str] | None = None) -> Content:
    """Read a file, or those of the named variables that it has.

    Raises:
        FileNotFoundError, PermissionError: as `open`.
        UsageError: if it is a directory or a pipe.
        DamagedFile: if it can't be read.
    """
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for ever
        raise UsageError(f"{file} is no file; remove it")
    try:
        with netCDF4.Dataset(file) as opened:
            opened.set_auto_maskandscale(False)
            opened.set_auto_chartostring(False)
            variables = {
                name: (stored.dimensions, _array(stored), dict(stored.__dict__))
                for name, stored in opened.variables.items()
                if names is None or name in names
            }
            attrs = dict(opened.__dict__)
    except PermissionError:
        raise
    except ERRORS as error:
        raise DamagedFile(f"{file} can't be read ({error}); the file is damaged") from error
    coordinates = attrs.pop("coordinates", "")
    form = [
        (name, dims, values.dtype.str, values.shape, attributes, values.tolist() if dims == (name,) else None)
        for name, (dims, values, attributes) in variables.items()
    ]
    return Content(repr((coordinates, form)), coordinates, variables, attrs)


def stacked(contents: Sequence[Content]) -> xr.Dataset:
    """Join files of one form along `step`, and empty `contents`, so that no value is in memory twice.

    Coordinates with one value in all files have no `step`. Attributes of the files that differ become coordinates along it.
    """
    names = {"coordinates": contents[0].coordinates}
    coordinates = {*_decoded(contents[0].variables, names).coords} - {"step"}
    variables = {}
    for name in list(contents[0].variables):
        (dims, first, attributes), *others = [content.variables.pop(name) for content in contents]
        if name in coordinates and all(_same(first, other) for _, other, _ in others):
            variables[name] = dims, first, attributes
        else:
            variables[name] = ("step", *dims), np.stack([first, *(other for _, other, _ in others)]), attributes
    attrs, differing = common([content.attrs for content in contents])
    return _decoded(variables, names).assign_attrs(attrs).assign_coords(differing)


def common(attrs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, tuple[str, np.ndarray]]]:
    """Return the attributes that are equal in all steps, and the others as coordinates along `step`, "" where there is none."""
    equal, differing = {}, {}
    for name in {name: None for of_step in attrs for name in of_step}:
        values = [of_step.get(name, "") for of_step in attrs]
        if all(_same(np.asarray(values[0]), np.asarray(value)) for value in values):
            equal[name] = values[0]
        else:
            alike = len({type(value) for value in values}) == 1
            differing[name] = "step", np.asarray(values) if alike else np.array(values, dtype=object)
    return equal, differing


def _array(stored: netCDF4.Variable) -> np.ndarray:
    return np.asarray(
        stored[...], object if stored.dtype is str else None
    )  # else texts of different lengths differ in type


def _decoded(variables: Mapping[str, tuple[tuple[str, ...], np.ndarray, dict[str, Any]]], attrs: Any) -> xr.Dataset:
    return xr.decode_cf(xr.Dataset(variables, attrs=attrs), decode_times=False).load().drop_encoding()


def _same(values: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(values, other, equal_nan=values.dtype.kind == other.dtype.kind == "f")
