"""`tracker.netcdf` against xarray's own reading and joining; files that can't be read; threads."""

import itertools
import os
import sys
import threading

import numpy as np
import pytest
import xarray as xr
from xarray.backends import locks
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK

from tests.support.refused import refused
from tests.support.stores import unit
from tracker.common.files import Lock
from tracker.netcdf import decoded, file_content, read_content, seal, stacked


def dataset(step: int = 7) -> xr.Dataset:
    """Return a unit with texts, a scalar, NaN, and dimensions without coordinates."""
    found = unit(step, layers=6, ks=(4, 8), prompts=3, matrices=True, seed=0, created=f"at {step}")
    found["lss"][0, 0] = np.nan
    return found.assign(
        flag=(("layer",), np.arange(6) > 2),
        counts=(("odd", "even"), 2**40 * np.eye(3, dtype=int)),
    ).assign_coords(
        token_text=(("prompt", "position"), np.array([["a", "ü", ""] * 4] * 3, dtype=object)),
        difficulty=("prompt", [np.nan, 1.0, 2.0]),
        revision=f"step{step}",
        grown=("layer", np.arange(6) + step),
    )


def written(path, *datasets):
    for i, content in enumerate(map(file_content, datasets)):
        (path / f"{i}.nc").write_bytes(bytes(content) + seal(content))
    return [path / f"{i}.nc" for i in range(len(datasets))]


@pytest.mark.parametrize("size", [0, 3])
def test_one_file_is_read_as_xarray_reads_it(tmp_path, size):
    """Files with an empty variable are in HDF5. Other programs read a file with its hash."""
    (file,) = written(tmp_path, dataset().isel(odd=slice(size)))
    assert file.read_bytes().startswith(b"CDF" if size else b"\x89HDF")
    theirs = xr.load_dataset(file, engine="netcdf4")
    ours = stacked([read_content(file)]).isel(step=0)
    xr.testing.assert_identical(ours, theirs)
    xr.testing.assert_identical(decoded(read_content(file)), theirs)
    for name, variable in theirs.variables.items():
        assert ours[name].dtype == (object if variable.dtype.kind == "U" else variable.dtype)
    np.testing.assert_array_equal(ours["miscoupling"], dataset()["miscoupling"])
    again = written(tmp_path, ours)  # nothing of the file's encoding is left
    xr.testing.assert_identical(xr.load_dataset(*again, engine="netcdf4"), theirs)


def test_files_of_one_form_are_joined_as_xarray_joins_them(tmp_path):
    files = written(tmp_path, *(dataset(step) for step in (3, 7, 20)))
    contents = [read_content(file) for file in files]
    assert len({content.form for content in contents}) == 1
    ours = stacked(contents)
    theirs = xr.concat(
        [xr.load_dataset(file, engine="netcdf4") for file in files],
        "step",
        data_vars="all",
        coords="different",
        compat="equals",
        join="exact",
        combine_attrs="drop_conflicts",
    )
    assert ours["created"].values.tolist() == ["at 3", "at 7", "at 20"]
    xr.testing.assert_identical(ours.drop_vars("created"), theirs)
    assert ours["grown"].dims == ("step", "layer") and ours["difficulty"].dims == ("prompt",)


@pytest.mark.parametrize(
    "other",
    [
        lambda ds: ds.isel(position=slice(1, None)),
        lambda ds: ds.assign_coords(layer=ds["layer"] + 1),
        lambda ds: ds.drop_vars("lss"),
        lambda ds: ds.assign(lss=ds["lss"].astype(float)),
        lambda ds: ds.rename_dims(odd="uneven"),
    ],
    ids=["size", "index", "variable", "type", "dimension"],
)
def test_files_that_differ_in_more_than_values_have_other_forms(tmp_path, other):
    first, second = (
        read_content(file).form for file in written(tmp_path, dataset(), other(dataset()))
    )
    assert first != second


def test_only_named_variables_are_read(tmp_path):
    content = read_content(*written(tmp_path, dataset()), {"lss", "absent"})
    assert list(content.values) == ["lss"] and content.attrs["created"] == "at 7"


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "unit.nc")
    with refused(r"unit\.nc is no file; remove it"):
        read_content(tmp_path / "unit.nc")
    with pytest.raises(FileNotFoundError):
        read_content(tmp_path / "absent.nc")


def test_a_file_that_another_process_has_locked_is_read_whatever_its_name(tmp_path):
    """HDF5 would take a lock of its own, and refuse a name that is no text."""
    file, same = written(tmp_path, dataset(), dataset())
    file = file.rename(tmp_path / os.fsdecode(b"gr\xffid.nc"))
    with Lock.wait(file):
        xr.testing.assert_identical(
            decoded(read_content(file)), xr.load_dataset(same, engine="netcdf4")
        )


def test_ctrl_c_leaves_the_c_library_unlocked(tmp_path):
    """It may come at each line of xarray's locks."""
    (file,) = written(tmp_path, dataset())

    def interrupted(work, at: int) -> bool:
        lines = itertools.count()

        def trace(frame, event, _):
            if frame.f_code.co_filename != locks.__file__:
                return None
            if event == "line" and next(lines) == at:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    assert interrupted(lambda: xr.load_dataset(file, engine="netcdf4"), 0), (
        "the lines are those that take a lock"
    )
    for work in (lambda: read_content(file), lambda: file_content(dataset())):
        at = 0
        while interrupted(work, at):
            assert not NETCDF4_PYTHON_LOCK.locked()
            at += 1
    assert not NETCDF4_PYTHON_LOCK.locked()


def test_files_are_made_and_read_while_xarray_does_nothing(tmp_path):
    """A thread waits while another has xarray's lock."""
    (file,) = written(tmp_path, dataset())
    for work in (lambda: read_content(file), lambda: file_content(dataset())):
        thread = threading.Thread(target=work)
        with NETCDF4_PYTHON_LOCK:
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(60)
        assert not thread.is_alive()
