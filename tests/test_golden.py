"""Comparison of golden results: each kind of difference is found, what varies or is named is accepted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.golden import __main__ as golden
from tests.golden.__main__ import unnamed
from tests.golden.comparison import compare

CURVE = "0,0.25,2026-11-25\n1,0.5,2026-11-25\n"


def dataset() -> xr.Dataset:
    values = np.linspace(0.1, 1, 6, dtype=np.float32).reshape(2, 3)
    variables = {"miscoupling": (("prompt", "layer"), values), "lss": ("prompt", [1.0, np.nan])}
    coordinates = {"layer": [1, 2, 3], "prompt_text": ("prompt", ["one", "two"])}
    return xr.Dataset(variables, coordinates, {"created": "2026", "k": 4})


def write(directory: Path, ds: xr.Dataset, curve: str = CURVE, **entries) -> Path:
    directory.mkdir()
    ds.to_netcdf(directory / "dataset.nc")
    (directory / "curve.csv").write_text(f",lss,created\n{curve}")
    page = {"seconds": 1.5, "steps": [0, 1], "arrays": ["AAA", "AAB"]} | entries
    (directory / "page.json").write_text(json.dumps(page))
    (directory / "dry_run.txt").write_text("blocks  3\n")
    return directory


@pytest.fixture
def compared(tmp_path) -> Callable[..., list[str]]:
    """Compare the results above with others; return the lines of the differences."""
    before = write(tmp_path / "before", dataset())

    def compare_with(ds: xr.Dataset | None = None, tolerance: float = 0.0, **others) -> list[str]:
        after = write(tmp_path / "after", dataset() if ds is None else ds, **others)
        return compare(before, after, tolerance)

    return compare_with


def scaled(factor: float) -> xr.Dataset:
    ds = dataset()
    ds.miscoupling[1, 2] *= factor
    return ds


@pytest.mark.parametrize(
    "factor, curve, differ",
    [(1e-6, "0.500001", []), (1e-4, "0.501", ["column.lss", "miscoupling"])],
)
def test_a_tolerance(compared, factor, curve, differ):
    lines = compared(scaled(1 + factor), 1e-5, curve=CURVE.replace("0.5", curve))
    assert [line.split(": ")[1] for line in lines] == differ


def test_a_value_that_becomes_undefined_is_never_tolerated(compared):
    (line,) = compared(dataset().assign(lss=("prompt", [np.nan, np.nan])), tolerance=0.5)
    assert line.startswith("dataset.nc: lss: 1 of 2 differ") and line.endswith(
        "1 in being defined or finite"
    )


OF_DATASETS = [
    (dataset().drop_vars("lss"), "lss: missing"),
    (dataset().assign(norm=1.0), "norm: extra"),
    (
        dataset().transpose("layer", "prompt"),
        "miscoupling: variable (prompt, layer) float32 (2, 3) -> ",
    ),
    (
        dataset().assign(lss=dataset().lss.astype("float32")),
        "lss: variable (prompt) float64 (2,) -> ",
    ),
    (
        dataset().reset_coords("prompt_text"),
        "prompt_text: coordinate (prompt) text (2,) -> variable",
    ),
    (
        dataset().assign_coords(prompt_text=("prompt", ["one", "three"])),
        "prompt_text: 1 of 2 differ, ",
    ),
    (dataset().assign_attrs(k=5), "attribute.k: 1 of 1 differ, at most by 1"),
    (scaled(1.25), "miscoupling: 1 of 6 differ, at most by 0.25 (0.2 of the largest)"),
]
# Times and versions
VARYING = dataset().assign_attrs(created="2027", tracker_version="9").assign_coords(seconds=3.0)
DIFFERENCES = [({"ds": changed}, [f"dataset.nc: {line}"]) for changed, line in OF_DATASETS] + [
    (
        {"curve": CURVE.replace("0.5", "0.50")},
        ["curve.csv: column.lss: 1 of 2 differ, at most by 0 (0 of the largest)"],
    ),
    (
        {"steps": [0, 2], "texts": {"lss": "line shape"}, "arrays": ["AAA", "AAC"]},
        [
            "page.json: entry.texts.lss: extra",
            "page.json: entry.steps: 1 of 2 differ, at most by 1 (0.5 of the largest)",
            "page.json: entry.arrays: 1 of 2 differ, the first 'AAB' -> 'AAC'",
        ],
    ),
    ({"ds": VARYING, "curve": CURVE.replace("2026", "2027"), "seconds": 9.0}, []),
]


@pytest.mark.parametrize(("changed", "expected"), DIFFERENCES)
def test_differences(compared, changed, expected):
    for line, start in zip(compared(**changed), expected, strict=True):
        assert line.startswith(start)


def test_a_missing_file(compared, tmp_path):
    (tmp_path / "before" / "more.csv").write_text("a\n1\n")
    assert compared() == ["more.csv: missing"]


def test_differences_that_are_named():
    lines = ["walk/a.nc: attribute.norm: 1 of 1 differ", "walk/page.json: entry.x[0]: extra"]
    named = {"*.nc: attribute.norm": "a reason", "walk/page.json: entry.x[0]": "a reason"}
    assert unnamed(lines, named) == [] and unnamed(lines, {}) == lines
    (unused,) = unnamed(lines[1:], named)
    assert "no difference is '*.nc: attribute.norm'" in unused


@pytest.mark.parametrize(
    "commit, code, said",
    [("0" * 40, "", "git can't read: fetch"), ("HEAD", "import x", "commit HEAD gives no results")],
)
def test_a_reference_that_cannot_be_run(commit, code, said, tmp_path, monkeypatch):
    (tmp_path / "reference.toml").write_text(f"commit = '{commit}'\ntolerance = 0\n[differences]")
    monkeypatch.setattr(golden, "REFERENCE", tmp_path / "reference.toml")
    monkeypatch.setattr(golden, "BUILD", tmp_path / "build")
    monkeypatch.setattr(golden, "start", lambda *_: subprocess.Popen([sys.executable, "-c", code]))
    with pytest.raises(SystemExit, match=said):
        golden.check()
    assert (commit == "HEAD") == (tmp_path / "build" / "packages" / "vit").exists()
