"""Datasets as NetCDF files: made in memory, and read from memory as one Dataset along `step`.

Files are read and written by Python, so that an error of the disk is an `OSError` and no HDF5 lock is taken, which some file
systems refuse. What the C library then finds wrong is wrong with the content of the file.

The C library of netCDF is used by one thread at a time, under xarray's own lock: a training may write a unit while another
thread of its process reads the store.

A file ends with a `seal`, the SHA-256 of what comes before it, which the libraries of NetCDF and HDF5 do not read.

Files have the classic format with 64 bit data, CDF-5. Those of earlier versions of the package are in HDF5, which takes three
times as long to read, and twice the space.

xarray opens and decodes each variable of each file by itself, which takes ten times as long as reading the numbers. Here the
variables of files that differ in nothing but values are stacked, and decoded once.
"""

import hashlib
import re
import stat
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import xarray as xr
from xarray.backends import NetCDF4DataStore
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK

from tracker.common.errors import UsageError
from tracker.common.files import naming
from tracker.common.text import first_line

# xarray's two locks of the C library, in xarray's order. Taken by xarray's own Python code, they stay locked for ever if Ctrl-C
# interrupts that; `with` takes these without that danger.
FIRST, SECOND = (held.lock for held in NETCDF4_PYTHON_LOCK.locks)  # type: ignore[attr-defined]

# What the libraries raise for bytes in memory that are no NetCDF file, or not all of it.
ERRORS = (OSError, RuntimeError, KeyError, IndexError, AttributeError, TypeError, ValueError)

# Damage leaves the beginning of a seal or its end, which no file without a seal has.
PART_OF_SEAL = re.compile(rb"\nsha256 |[0-9a-f]{64}\n\Z")
SEALED = 73  # bytes of a seal


class DamagedFile(ValueError):
    """A file whose content is not what was written."""


@dataclass(frozen=True)
class Content:
    """What a file holds, as it is stored.

    Attributes:
        form: names, dimensions, types and sizes of the variables, and the values of indexes, as text.
        values: values by name.
        dims: dimensions by name.
        attributes: attributes by name.
        coordinates: names of variables that are coordinates, with spaces between them.
        attrs: attributes of the file.
        checked: whether the file has a seal.
    """

    form: str
    values: dict[str, np.ndarray]
    dims: dict[str, tuple[str, ...]]
    attributes: dict[str, dict[str, Any]]
    coordinates: str
    attrs: dict[str, Any]
    checked: bool


def seal(content: bytes | memoryview) -> bytes:
    """Return what is written after the content of a file, so that reading finds every change of it."""
    return f"\nsha256 {hashlib.sha256(content).hexdigest()}\n".encode()


def file_content(dataset: xr.Dataset) -> memoryview:
    """Return the bytes of a file that holds a Dataset.

    Raises:
        ValueError: if it has a text that no file can hold, such as half of a surrogate pair.
    """
    variables = dataset.variables
    texts = {name: {"dtype": "S1"} for name in variables if variables[name].dtype.kind in "OU"}
    # In the classic format a dimension of size 0 would be one that grows.
    form = "NETCDF4" if 0 in dataset.sizes.values() else "NETCDF3_64BIT_DATA"
    # `Dataset.to_netcdf` takes the lock for the values alone, and not for names, dimensions and attributes.
    with FIRST, SECOND:
        file = netCDF4.Dataset("in memory", "w", memory=dataset.nbytes, format=form)
        try:
            store = NetCDF4DataStore(file, lock=threading.Lock())
            store.format = "NETCDF4"  # xarray would write whole numbers of 64 bits as 32 in others
            dataset.dump_to_store(store, encoding=texts)
        except BaseException:  # Ctrl-C among others: the library keeps the file until it is closed
            file.close()
            raise
        return file.close()


def read_content(
    file: Path, names: Collection[str] | None = None, like: Content | None = None
) -> Content:
    """Read a file, or those of the named variables that it has.

    Args:
        like: another file, read in the same way: if it has the same form, its attributes of variables are not read again.

    Raises:
        OSError: if it can't be read at this moment.
        UsageError: if it is a directory or a pipe.
        DamagedFile: if it holds something else than a whole NetCDF file.
    """
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for ever
        raise UsageError(f"{file} is no file; remove it")
    with naming(file):
        content = file.read_bytes()
    checked = _is_sealed(file, content)
    try:
        with FIRST, SECOND, netCDF4.Dataset("in memory", memory=content) as opened:
            # xarray decodes all steps at once, in `_decoded`.
            opened.set_auto_maskandscale(False)
            opened.set_auto_chartostring(False)
            stored = {
                name: held
                for name, held in opened.variables.items()
                if names is None or name in names
            }
            values = {name: _array(held) for name, held in stored.items()}
            dims = {name: held.dimensions[: values[name].ndim] for name, held in stored.items()}
            attrs = dict(opened.__dict__)
            coordinates = attrs.pop("coordinates", "")
            form = repr(
                (
                    coordinates,
                    [(name, dims[name], *_form(name, dims[name], v)) for name, v in values.items()],
                )
            )
            if like is not None and like.form == form:
                attributes = like.attributes
            else:
                attributes = {name: dict(held.__dict__) for name, held in stored.items()}
            return Content(form, values, dims, attributes, coordinates, attrs, checked)
    except ERRORS as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise DamagedFile(f"{file} is damaged ({why})") from error


def _is_sealed(file: Path, content: bytes) -> bool:
    """Return whether a file's content ends with a seal, which files of an earlier version of the package lack.

    Raises:
        DamagedFile: if the seal, or what it is of, has changed.
    """
    if content[-SEALED:] == seal(memoryview(content)[:-SEALED]):
        return True
    # Also before a few bytes that were added. Files without a seal are in HDF5.
    if PART_OF_SEAL.search(content[-2 * SEALED :]) or content.startswith(b"CDF"):
        raise DamagedFile(f"{file} is damaged (its content is not what was written)")
    return False


def stacked(contents: Sequence[Content]) -> xr.Dataset:
    """Join files of one form along `step`, and empty `contents`, so that no value is in memory twice.

    Coordinates with one value in all files have no `step`. Attributes of the files that differ become coordinates along it.
    """
    first = contents[0]
    # Along `step` even where all steps are one
    coordinates = {*_decoded(first, first.values, first.dims).coords} - {"step"}
    values, dims = {}, dict(first.dims)
    for name in first.dims:
        several = [content.values.pop(name) for content in contents]
        if name in coordinates and all(_same(several[0], other) for other in several):
            values[name] = several[0]
        else:
            values[name], dims[name] = np.stack(several), ("step", *dims[name])
    attrs, differing = common([content.attrs for content in contents])
    return _decoded(first, values, dims).assign_attrs(attrs).assign_coords(differing)


def decoded(content: Content) -> xr.Dataset:
    """Return the Dataset that a file holds."""
    return _decoded(content, content.values, content.dims).assign_attrs(content.attrs)


def common(
    attrs: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, tuple[str, np.ndarray]]]:
    """Return the attributes that are equal in all steps, and the others as coordinates along `step`, "" where there is none."""
    equal, differing = {}, {}
    for name in {name: None for of_step in attrs for name in of_step}:
        values = [of_step.get(name, "") for of_step in attrs]
        if all(_same(np.asarray(values[0]), np.asarray(value)) for value in values):
            equal[name] = values[0]
        else:
            # numpy would turn numbers beside "" into texts.
            alike = len({type(value) for value in values}) == 1
            differing[name] = (
                "step",
                np.asarray(values) if alike else np.array(values, dtype=object),
            )
    return equal, differing


def _array(stored: netCDF4.Variable) -> np.ndarray:
    # As objects, texts of different lengths have one type.
    values = np.asarray(stored[...], object if stored.dtype is str else None)
    if values.dtype != "S1":
        return values
    return values.view(f"S{values.shape[-1]}")[..., 0]


def _form(name: str, dims: tuple[str, ...], values: np.ndarray) -> tuple[Any, ...]:
    # The texts of a file are as long as its longest.
    kind = "S" if values.dtype.kind == "S" else values.dtype.str
    return kind, values.shape, values.tolist() if dims == (name,) else None


def _decoded(
    content: Content, values: Mapping[str, np.ndarray], dims: Mapping[str, tuple[str, ...]]
) -> xr.Dataset:
    variables = {
        name: (dims[name], held, content.attributes[name]) for name, held in values.items()
    }
    stored = xr.Dataset(variables, attrs={"coordinates": content.coordinates})
    return xr.decode_cf(stored, decode_times=False).load().drop_encoding()


def _same(values: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(values, other, equal_nan=values.dtype.kind == other.dtype.kind == "f")
