"""Compare two sets of results, read with xarray, csv and json alone: nothing of the package is imported."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

# Attributes, coordinates, columns, metrics and JSON entries that differ between two runs with equal numbers, or between two
# versions of the package.
VARYING = {"created", "seconds", "witness", "cost/seconds", "cost/share", "tracker_version"}


class Part(NamedTuple):
    """A variable, an attribute, a column, an entry, or the lines of a text.

    Attributes:
        values: numbers of a NetCDF file as they are; those of other files as text, to the digit.
        form: dimensions and type.
    """

    values: np.ndarray
    form: str = ""


def compare(before: Path, after: Path, tolerance: float = 0.0) -> list[str]:
    """Return a line for each difference of two directories.

    Args:
        tolerance: the difference of numbers that is allowed, relative to the largest absolute value of the same variable.
    """
    files = [
        {str(path.relative_to(root)): path for path in root.rglob("*")} for root in (before, after)
    ]
    first, second = (
        {name: path for name, path in found.items() if path.suffix in READERS} for found in files
    )
    if not first:
        raise FileNotFoundError(f"{before} holds no results")
    lines = _apart(first, second)
    for name in sorted(first.keys() & second.keys()):
        a, b = read(first[name]), read(second[name])
        lines += [f"{name}: {line}" for line in (*_apart(a, b), *_different(a, b, tolerance))]
    return lines


def _apart(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    missing, extra = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    return [*(f"{name}: missing" for name in missing), *(f"{name}: extra" for name in extra)]


def _different(
    before: Mapping[str, Part], after: Mapping[str, Part], tolerance: float
) -> Iterator[str]:
    for name in before:
        if name in after and (text := difference(name, before[name], after[name], tolerance)):
            yield f"{name}: {text}"


def difference(name: str, before: Part, after: Part, tolerance: float) -> str:
    """Return how two parts of one name differ, "" if they do not."""
    a, b = before.values, after.values
    if before.form != after.form or a.shape != b.shape:
        return f"{before.form} {a.shape} -> {after.form} {b.shape}".strip()
    other = (a != b) & ((a == a) | (b == b))
    if not other.any():
        return ""
    text = f"{other.sum()} of {a.size} differ"
    try:
        x, y = a.astype(float), b.astype(float)
    except ValueError:
        return f"{text}, the first {a[other][0]!r:.60} -> {b[other][0]!r:.60}"
    known = np.isfinite(x) & np.isfinite(y)
    apart = np.abs(x[known] - y[known]).max(initial=0.0)
    scale = np.maximum(np.abs(x[known]), np.abs(y[known])).max(initial=0.0)
    # Residuals and errors are themselves relative, of size 1 where nothing is right: their own digits mean nothing.
    allowed = max(scale, 1.0) if "error" in name or "residual" in name else scale
    unknown = (other & ~known).sum()
    if tolerance and not unknown and apart <= tolerance * allowed:
        return ""
    text += f", at most by {apart:.3g} ({apart / scale if scale else 0:.3g} of the largest)"
    return text + (f", {unknown} in being defined or finite" if unknown else "")


def read(file: Path) -> dict[str, Part]:
    """Read the parts of a file but for those whose last name is of one that varies, such as attribute.created."""
    return {
        name: part
        for name, part in READERS[file.suffix](file)
        if name.rpartition(".")[2] not in VARYING
    }


def read_netcdf(file: Path) -> Iterator[tuple[str, Part]]:
    with xr.open_dataset(file, engine="netcdf4", decode_times=False) as dataset:
        for name, variable in dataset.variables.items():
            kind = "coordinate" if name in dataset.coords else "variable"
            type = variable.dtype if variable.dtype.kind in "biuf" else "text"
            yield (
                str(name),
                Part(variable.values, f"{kind} ({', '.join(map(str, variable.dims))}) {type}"),
            )
            for key, value in variable.attrs.items():
                yield f"{name}.attribute.{key}", Part(np.asarray(value))
        for key, value in dataset.attrs.items():
            yield f"attribute.{key}", Part(np.asarray(value))


def read_csv(file: Path) -> Iterator[tuple[str, Part]]:
    with file.open(newline="") as opened:
        header, *rows = csv.reader(opened)
    yield "columns", _texts([name for name in header if name not in VARYING])
    for i, name in enumerate(header):
        yield f"column.{name}", _texts([row[i] or "nan" for row in rows])


def read_json(file: Path) -> Iterator[tuple[str, Part]]:
    yield from _entries("entry", json.loads(file.read_text()))


def read_text(file: Path) -> Iterator[tuple[str, Part]]:
    yield "lines", _texts(file.read_text().splitlines())


READERS = {".nc": read_netcdf, ".csv": read_csv, ".json": read_json, ".txt": read_text}


def _texts(values: list) -> Part:
    return Part(np.array(["nan" if value is None else str(value) for value in values], object))


def _entries(name: str, value: Any) -> Iterator[tuple[str, Part]]:
    """Yield the entries of a JSON value, lists of numbers or texts as one."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _entries(f"{name}.{key}", entry)
    elif isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        for i, entry in enumerate(value):
            yield from _entries(f"{name}[{i}]", entry)
    else:
        yield name, _texts(value if isinstance(value, list) else [value])
