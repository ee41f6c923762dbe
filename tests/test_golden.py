"""Comparison of golden results: each kind of difference is found, and what differs between two runs is accepted."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.golden.__main__ import main
from tracker.report.contents import pack

CURVE = "0,0.25,2026-11-25\n1,0.5,2026-11-25\n"


def dataset() -> xr.Dataset:
    values = np.linspace(0.1, 1, 6, dtype=np.float32).reshape(2, 3)
    variables = {"miscoupling": (("prompt", "layer"), values), "lss": ("prompt", [1.0, np.nan])}
    coordinates = {"layer": [1, 2, 3], "prompt_text": ("prompt", ["one", "two"])}
    return xr.Dataset(variables, coordinates, {"created": "2026", "k": 4})


def write(
    directory: Path, ds: xr.Dataset, curve: str = CURVE, page: np.ndarray | None = None, **entries
) -> Path:
    directory.mkdir()
    ds.to_netcdf(directory / "dataset.nc")
    (directory / "curve.csv").write_text(f",lss,created\n{curve}")
    packed = pack(dataset().miscoupling.values if page is None else page, bits=16)
    (directory / "page.json").write_text(
        json.dumps({"seconds": 1.5, "steps": [0, 1], "matrix": packed} | entries)
    )
    (directory / "dry_run.txt").write_text("blocks  3\n")
    return directory


@pytest.fixture
def compared(tmp_path, capsys) -> Callable[..., list[str]]:
    """Compare the results above with others; return the lines of the differences."""
    before = write(tmp_path / "before", dataset())

    def compare(ds: xr.Dataset | None = None, tolerance: float = 0.0, **others) -> list[str]:
        after = write(tmp_path / "after", dataset() if ds is None else ds, **others)
        status = main(["compare", str(before), str(after), "--tolerance", str(tolerance)])
        *lines, last = capsys.readouterr().out.splitlines()
        assert status == bool(lines) and last == f"{len(lines)} differences"
        return lines

    return compare


def scaled(factor: float) -> xr.Dataset:
    ds = dataset()
    ds.miscoupling[1, 2] *= factor
    return ds


def test_a_changed_value(compared):
    (line,) = compared(scaled(1.25))
    assert line == "dataset.nc: miscoupling: 1 of 6 differ, at most by 0.25 (0.2 of the largest)"


def test_a_tolerated_rounding_difference(compared):
    page = dataset().miscoupling.values * np.float32(1 + 1e-6)  # some codes differ by one
    assert not compared(
        scaled(1 + 1e-6), tolerance=1e-5, curve=CURVE.replace("0.5", "0.500001"), page=page
    )


def test_a_difference_above_the_tolerance(compared):
    page = dataset().miscoupling.values * np.float32(1 + 1e-3)
    lines = compared(
        scaled(1 + 1e-4), tolerance=1e-5, curve=CURVE.replace("0.5", "0.501"), page=page
    )
    assert [line.split(": ")[1] for line in lines] == ["column.lss", "miscoupling", "entry.matrix"]


def test_a_value_that_becomes_undefined_is_never_tolerated(compared):
    (line,) = compared(dataset().assign(lss=("prompt", [np.nan, np.nan])), tolerance=0.5)
    assert line.startswith("dataset.nc: lss: 1 of 2 differ") and line.endswith(
        "1 in being defined or finite"
    )


@pytest.mark.parametrize(
    "changed, expected",
    [
        (dataset().drop_vars("lss"), "lss: missing"),
        (dataset().assign(norm=1.0), "norm: extra"),
        (
            dataset().transpose("layer", "prompt"),
            "miscoupling: variable (prompt, layer) float32 (2, 3) -> ",
        ),
        (
            dataset().assign(lss=dataset().lss.astype("float32")),
            "lss: variable (prompt) float64 (2,) -> variable (prompt) float32 (2,)",
        ),
        (
            dataset().reset_coords("prompt_text"),
            "prompt_text: coordinate (prompt) text (2,) -> variable",
        ),
        (
            dataset().assign_coords(prompt_text=("prompt", ["one", "three"])),
            "prompt_text: 1 of 2 differ, the first",
        ),
        (dataset().assign_attrs(k=5), "attribute.k: 1 of 1 differ, at most by 1"),
    ],
)
def test_other_differences_of_a_dataset(compared, changed, expected):
    lines = compared(changed)
    assert lines[0].startswith(f"dataset.nc: {expected}") and len(lines) == 1


def test_a_number_that_is_spelled_differently(compared):
    (line,) = compared(curve=CURVE.replace("0.5", "0.50"))
    assert line == "curve.csv: column.lss: 1 of 2 differ, at most by 0 (0 of the largest)"


def test_changed_entries_of_a_page(compared):
    assert compared(steps=[0, 2], texts={"lss": "line shape"}) == [
        "page.json: entry.texts.lss: extra",
        "page.json: entry.steps: 1 of 2 differ, at most by 1 (0.5 of the largest)",
    ]


def test_times_and_versions_are_accepted(compared):
    ds = dataset().assign_attrs(created="2027", tracker_version="9").assign_coords(seconds=3.0)
    assert not compared(ds, curve=CURVE.replace("2026", "2027"), seconds=9.0)


def test_a_missing_file(compared, tmp_path):
    (tmp_path / "before" / "more.csv").write_text("a\n1\n")
    assert compared() == ["more.csv: missing"]
