"""Units carry a hash of their content: what has changed on the disk, or has the name of another step, is damaged."""

import random
import shutil

import pytest
import xarray as xr

import tracker
from tests.support.stores import generated, unit
from tracker.netcdf import SEALED, DamagedFile
from tracker.store import Store

STEPS = (0, 1, 2, 8)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(generated(tmp_path / "run", STEPS, layers=3, ks=(4,)))


def remove_seal(store: Store, step: int):
    """Make a unit one of an earlier version of the package, which wrote HDF5."""
    unit = xr.load_dataset(store.file(step), engine="netcdf4")
    unit.drop_encoding().to_netcdf(store.file(step), engine="netcdf4")


def test_a_changed_bit_is_refused(store):
    content = store.file(8).read_bytes()
    draw = random.Random(0)
    anywhere = [draw.randrange(8 * len(content)) for _ in range(100)]
    in_the_seal = range(8 * (len(content) - SEALED), 8 * len(content), 5)
    for bit in (*anywhere, *in_the_seal):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        store.file(8).write_bytes(changed)
        with pytest.raises(DamagedFile, match="is damaged .*; move it away, or"):
            store.read(8)


def test_part_of_a_seal_is_damage(store):
    content = store.file(8).read_bytes()
    cut = [content[:-lost] for lost in (1, 40, SEALED - 8, SEALED, len(content))]
    without_beginning = content[:-SEALED] + bytes(8) + content[8 - SEALED :]
    for changed in (*cut, without_beginning, content + b"\n"):
        store.file(8).write_bytes(changed)
        with pytest.raises(DamagedFile, match="is damaged"):
            store.read(8)


def test_a_unit_of_another_step_is_damaged(store):
    shutil.copyfile(store.file(8), store.file(16))
    remove_seal(store, 2)
    shutil.copyfile(store.file(2), store.file(32))
    for step, held in ((16, 8), (32, 2)):
        message = rf"step000000{step}\.nc is damaged \(it holds step {held}\); move it away, or"
        for read in (store.attributes, lambda step: store.curve([0, step], ["lss"])):
            with pytest.raises(DamagedFile, match=message):
                read(step)
    left_out = {}
    (curve,) = store.curves(store.steps(), left_out.__setitem__)
    assert curve.step.values.tolist() == [*STEPS] and [*left_out] == [16, 32]
    damaged = store.file(16).read_bytes()
    store.write(16, unit(16, layers=3, ks=(4,), prompts=3, matrices=False, seed=0))
    assert store.read(16).step == 16
    assert (store.path / "damaged" / "step00000016.nc").read_bytes() == damaged


def test_units_without_a_hash_are_read_and_marked(store):
    checked = tracker.open_results(store)
    assert "integrity" not in checked.attrs and "integrity" not in checked.coords
    for step in (0, 2):
        remove_seal(store, step)
    mixed = tracker.open_results(store)
    assert mixed["integrity"].values.tolist() == ["unchecked", "", "unchecked", ""]
    xr.testing.assert_identical(mixed.drop_vars("integrity"), checked)
    store.write(2, store.read(2))  # as a walk that adds scores does
    assert "integrity" not in store.read(2).attrs
    for step in (1, 2, 8):
        remove_seal(store, step)
    unchecked = tracker.open_results(store)
    assert unchecked.attrs["integrity"] == "unchecked"
    xr.testing.assert_identical(unchecked.drop_attrs(deep=False), checked.drop_attrs(deep=False))
