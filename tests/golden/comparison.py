"""Compare two sets of results, read with xarray, csv and json alone: nothing of the package is imported."""

import base64
import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

# Attributes, coordinates, columns, metrics and JSON entries that differ between two runs with equal numbers, or between two
# versions of the package.
VARYING = {"created", "seconds", "coupling/seconds", "coupling/share", "tracker_version"}


class Part(NamedTuple):
    """A variable, an attribute, a column, or the text of a file.

    Attributes:
        values: numbers or texts.
        form: dimensions and type.
        resolution: the difference of numbers with neighbouring codes, for arrays that are carried as codes.
    """

    values: np.ndarray
    form: str = ""
    resolution: float = 0.0


def compare(before: Path, after: Path, tolerance: float = 0.0) -> list[str]:
    """Return a line for each difference of two directories.

    Args:
        tolerance: the difference of numbers that is allowed, relative to the largest absolute value of the same variable.
    """
    files = [
        {str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in READERS} for root in (before, after)
    ]
    if not files[0]:
        raise FileNotFoundError(f"{before} holds no results")
    lines = _apart(*files)
    for name in sorted(files[0] & files[1]):
        found = [read(root / name) for root in (before, after)]
        differences = [*_apart(*found), *_differences(*found, tolerance)]
        if not (differences or tolerance) and exact(before / name) != exact(after / name):
            differences = ["the order or the spelling of values differs"]
        lines += [f"{name}: {difference}" for difference in differences]
    return lines


def _apart(before: Any, after: Any) -> list[str]:
    return [f"{name}: missing" for name in sorted({*before} - {*after})] + [
        f"{name}: extra" for name in sorted({*after} - {*before})
    ]


def _differences(before: Mapping[str, Part], after: Mapping[str, Part], tolerance: float) -> Iterator[str]:
    for name in before:
        if name in after and (text := difference(name, before[name], after[name], tolerance)):
            yield f"{name}: {text}"


def difference(name: str, before: Part, after: Part, tolerance: float) -> str:
    """Return how two parts of one name differ, "" if they do not."""
    a, b = before.values, after.values
    if before.form != after.form or a.shape != b.shape:
        return f"{before.form} {a.shape} -> {after.form} {b.shape}".strip()
    if not all(values.dtype.kind in "biuf" for values in (a, b)):
        if not (other := a != b).any():
            return ""
        return f"{other.sum()} of {a.size} differ, the first {a[other][0]!r} -> {b[other][0]!r}"
    other = (a != b) & ~((a != a) & (b != b))
    if not other.any():
        return ""
    a, b = a.astype(float), b.astype(float)
    known = np.isfinite(a) & np.isfinite(b)
    apart = np.abs(np.subtract(a, b, where=known, out=np.zeros(a.shape)))
    scale = np.maximum(np.abs(a), np.abs(b))[known].max(initial=0.0)
    # Residuals and errors are themselves relative, of size 1 where nothing is right: their last digits mean nothing.
    allowed = max(scale, 1.0) if "error" in name or "residual" in name else scale
    if tolerance and not (other & ~known).any() and apart.max() <= tolerance * allowed + before.resolution:
        return ""
    relative = apart.max() / scale if scale else 0.0
    return f"{other.sum()} of {a.size} differ, at most by {apart.max():.3g} ({relative:.3g} of the largest)" + (
        f", {(other & ~known).sum()} in being defined or finite" if (other & ~known).any() else ""
    )


def read(file: Path) -> dict[str, Part]:
    """Read the parts of a file but for those that vary."""
    return {name: part for name, part in READERS[file.suffix](file) if not varies(name)}


def varies(name: str) -> bool:
    """Whether the last part of a name, such as attribute.created, is one that varies."""
    return name.rpartition(".")[2] in VARYING


def exact(file: Path) -> Any:
    """Return what has to be equal to the byte in a JSON or CSV file."""
    if file.suffix == ".json":
        return json.dumps(_without_varying(json.loads(file.read_text())))
    if file.suffix == ".csv":
        columns = zip(*csv.reader(io.StringIO(file.read_text())), strict=True)
        return [column for column in columns if not varies(column[0])]
    return None


def _without_varying(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_varying(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _without_varying(entry) for name, entry in value.items() if not varies(name)}
    return value


def read_netcdf(file: Path) -> Iterator[tuple[str, Part]]:
    with xr.open_dataset(file, engine="netcdf4", decode_times=False) as dataset:
        for name, variable in dataset.variables.items():
            kind = "coordinate" if name in dataset.coords else "variable"
            type = variable.dtype if variable.dtype.kind in "biuf" else "text"
            yield str(name), Part(variable.values, f"{kind} ({', '.join(map(str, variable.dims))}) {type}")
            for key, value in variable.attrs.items():
                yield f"{name}.attribute.{key}", Part(np.asarray(value))
        for key, value in dataset.attrs.items():
            yield f"attribute.{key}", Part(np.asarray(value))


def read_csv(file: Path) -> Iterator[tuple[str, Part]]:
    header, *rows = csv.reader(io.StringIO(file.read_text()))
    for i, name in enumerate(header):
        yield f"column.{name or i}", Part(_numbers_or_texts([row[i] or "nan" for row in rows]))


def read_json(file: Path) -> Iterator[tuple[str, Part]]:
    yield from _entries("entry", json.loads(file.read_text()))


def read_text(file: Path) -> Iterator[tuple[str, Part]]:
    yield "lines", Part(np.array(file.read_text().splitlines(), object))


READERS = {".nc": read_netcdf, ".csv": read_csv, ".json": read_json, ".txt": read_text}


def _entries(name: str, value: Any) -> Iterator[tuple[str, Part]]:
    """Yield the entries of a JSON value: lists of numbers or texts as one, and the page's arrays as numbers."""
    if isinstance(value, dict) and {"codes", "bits"} <= value.keys():
        yield name, _unpacked(**value)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _entries(f"{name}.{key}", entry)
    elif isinstance(value, list) and _holds_dicts(value):
        for i, entry in enumerate(value):
            yield from _entries(f"{name}[{i}]", entry)
    elif isinstance(value, list):
        yield name, Part(_numbers_or_texts(value))
    else:
        yield name, Part(_numbers_or_texts([value]))


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_dicts, value)))


def _numbers_or_texts(values: list) -> np.ndarray:
    """Return numbers, None as NaN, or else each entry as text."""
    try:
        return np.array(values, float)
    except (TypeError, ValueError):
        return np.array([str(entry) for entry in values], object)


def _unpacked(codes: str, bits: int, shape: list[int], low: str = "", span: str = "", **_: Any) -> Part:
    """Return the values of a packed array of the page."""
    data = base64.b64decode(codes)
    if bits == 32:
        return Part(np.frombuffer(data, "<f4").reshape(shape))
    lows, spans = (np.frombuffer(base64.b64decode(text), "<f4").astype(float)[:, None] for text in (low, span))
    whole = np.frombuffer(data, f"<u{bits // 8}").reshape(len(lows), -1)
    values = np.where(whole == 2**bits - 1, np.nan, lows + whole * spans / (2**bits - 2))
    return Part(values.reshape(shape), resolution=float(spans.max(initial=0)) / (2**bits - 2))
