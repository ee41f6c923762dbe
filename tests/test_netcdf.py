"""`tracker.netcdf` against xarray's own reading and writing with h5netcdf."""

import h5py
import numpy as np
import pytest
import xarray as xr

from tests.stores import unit
from tracker import netcdf

ENCODINGS = [{}, {"miscoupling": {"fletcher32": True}, "token_text": {"dtype": "S1", "zlib": True}}]


def dataset() -> xr.Dataset:
    """Return a unit with texts, a scalar, an empty variable, NaN, and dimensions without coordinates."""
    found = unit(7, layers=6, ks=(4, 8), prompts=3, matrices=True, seed=0)
    found["lss"][0, 0] = np.nan
    return found.assign(
        empty=(("nothing",), np.zeros(0)),
        flag=(("layer",), np.arange(6) > 2),
        counts=(("odd", "even"), np.eye(3, dtype=int)),
    ).assign_coords(token_text=(("prompt", "position"), np.array([["a", "ü", ""] * 4] * 3, dtype=object)))


def contents(file) -> list:
    """Return every object of an HDF5 file in its order, with all that HDF5 knows of it."""
    with h5py.File(file) as opened:

        def plain(value):
            if isinstance(value, h5py.Reference):
                return opened[value].name
            if isinstance(value, np.ndarray) and value.dtype.kind in "OV":
                return [plain(entry) for entry in value.tolist()] if value.dtype.kind == "O" else len(value)
            return plain(list(value)) if isinstance(value, tuple) else np.asarray(value).tolist()

        def described(item):
            attributes = {name: plain(value) for name, value in item.attrs.items()}
            if isinstance(item, h5py.Group):
                return attributes
            layout = (
                item.dtype,
                item.shape,
                item.maxshape,
                item.chunks,
                item.fletcher32,
                item.compression,
                item.fillvalue,
            )
            scales = [[scale.name for scale in axis.values()] for axis in item.dims]
            return attributes, repr(layout), scales, repr(item[()])

        return [described(opened), *((name, described(opened[name])) for name in opened)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_written_is_the_same(encoding, tmp_path):
    given = dataset()
    for name, content in (
        ("ours", netcdf.to_bytes(given, encoding)),
        ("theirs", bytes(given.to_netcdf(engine="h5netcdf", encoding=encoding))),
    ):
        (tmp_path / name).write_bytes(content)
    ours, theirs = (contents(tmp_path / name) for name in ("ours", "theirs"))
    assert len(ours) > 40 and repr(ours) == repr(theirs)  # as text, because NaN is not NaN


def test_what_is_read_is_the_same(tmp_path):
    file = tmp_path / "unit.nc"
    file.write_bytes(netcdf.to_bytes(dataset(), ENCODINGS[1]))
    with netcdf.opened(file) as ours, xr.open_dataset(file, engine="h5netcdf") as theirs:
        xr.testing.assert_identical(ours.load(), theirs.load())
        assert list(ours.variables) == list(theirs.variables)
        for name, variable in ours.variables.items():
            assert variable.dtype == theirs[name].dtype and repr(variable.encoding) == repr(theirs[name].encoding)
        ours = ours.copy()
    np.testing.assert_array_equal(ours["miscoupling"], dataset()["miscoupling"])  # the file is closed
    file.unlink()


def test_objects_are_looked_up_once(tmp_path, monkeypatch):
    name = "_get" if hasattr(h5py.Group, "_get") else "__getitem__"  # before h5py 3.16
    lookups, get = [], getattr(h5py.Group, name)
    monkeypatch.setattr(
        h5py.Group, name, lambda self, *given, **more: (lookups.append(given), get(self, *given, **more))[1]
    )

    def count(function):
        lookups.clear()
        function()
        return len(lookups)

    def load(opened):
        with opened as found:
            found.load()

    file = tmp_path / "unit.nc"
    file.write_bytes(netcdf.to_bytes(dataset(), {}))
    written = [
        count(lambda: netcdf.to_bytes(dataset(), {})), count(lambda: dataset().to_netcdf(engine="h5netcdf", encoding={}))
    ]  # fmt: skip
    read = [count(lambda: load(netcdf.opened(file))), count(lambda: load(xr.open_dataset(file, engine="h5netcdf")))]
    assert 5 * written[0] < written[1] and 5 * read[0] < read[1]


def test_damaged_files_raise_the_errors_that_are_declared(tmp_path):
    content = netcdf.to_bytes(dataset(), ENCODINGS[1])
    for damaged in (b"", content[: len(content) // 2], b"\0" + content[1:]):
        (tmp_path / "unit.nc").write_bytes(damaged)
        with pytest.raises((OSError, KeyError, RuntimeError)), netcdf.opened(tmp_path / "unit.nc") as found:
            found.load()
