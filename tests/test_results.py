"""Tests of the store: atomic units, refusal of other settings, detection of damage, claims."""

import os
import shutil
import threading

import numpy as np
import pytest
import xarray as xr

import tracker
from tests.support import processes
from tests.support.failing_files import FULL, failures
from tests.support.files import contents
from tests.support.refused import refused
from tests.support.stores import generated
from tracker.analysis.reduction import read_reduced
from tracker.common.files import Lock
from tracker.measures.options import settings_from
from tracker.netcdf import SEALED
from tracker.store import Store
from tracker.version import SCHEMA

SHARED = {"suite": "toy", "schema": SCHEMA}


def unit(step, positions=3, **attributes):
    values = np.arange(2 * positions, dtype=np.float32).reshape(2, positions) + step
    coords = {"step": step, "commit": f"c{step}", "position": range(positions)}
    return xr.Dataset({"lss": (("prompt", "position"), values)}, coords, {**SHARED, **attributes})


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "out")
    store.check_settings({"k": [4], "dtype": "float32"})
    return store


def test_units_are_joined_in_ascending_steps_with_ragged_positions(store, tmp_path):
    """Also one that another machine has written into a directory of its own. An attribute that some lack is a coordinate."""
    other = Store(tmp_path / "other")
    other.check_settings({})
    store.write(100, unit(100, seconds=100.0))
    store.write(3, unit(3, positions=2, seconds=3.0))
    other.write(20, unit(20, seconds=20.0, remote_code="ab"))
    shutil.copy(other.file(20), store.file(20))
    ds = tracker.open_results(store.path)
    assert list(ds.step.values) == [3, 20, 100] and list(ds.commit.values) == ["c3", "c20", "c100"]
    np.testing.assert_array_equal(ds.lss.sel(step=100).values, unit(100).lss.values)
    assert np.isnan(ds.lss.sel(step=3).values[:, 2]).all()
    assert ds.attrs == SHARED and ds["remote_code"].values.tolist() == ["", "ab", ""]


def test_other_settings_are_refused_once_results_exist(store):
    store.check_settings({"k": [5], "dtype": "float32"})  # nothing measured yet
    store.write(3, unit(3))
    store.check_settings({"k": [5], "dtype": "float32"})
    # A setting that earlier versions of the package did not have
    with pytest.raises(
        ValueError, match=r"k was \[5\], now \[6\]; new was None, now 1.*never mixed"
    ):
        store.check_settings({"k": [6], "dtype": "float32", "new": 1})
    with pytest.raises(ValueError, match="holds results of a walk; results are never mixed"):
        store.check_settings({"weights": "raw"})


def test_other_settings_are_refused_while_a_walk_holds_the_store(store):
    """It has measured nothing yet."""
    held = store.check_settings({"k": [5]}, hold=True)
    with pytest.raises(ValueError, match=r"k was \[5\], now \[6\].*never mixed"):
        store.check_settings({"k": [6]})
    held.release(remove=True)
    store.check_settings({"k": [6]})


def test_settings_are_checked_by_one_process_at_a_time(store):
    other = threading.Thread(target=store.check_settings, args=[{"k": [5]}])
    with store.alone():
        other.start()
        other.join(0.3)
        assert other.is_alive() and store.read_settings()["k"] == [4]
    other.join(60)
    assert store.read_settings()["k"] == [5]


@pytest.mark.parametrize("opening", [tracker.open_results, Store])
@pytest.mark.parametrize("several", [["a", "b"], ("a",), {"a": "b"}])
def test_several_directories_name_what_takes_them(opening, several):
    with refused(r"give one directory\. For several, \{name: tracker\.open_results.*write_report"):
        opening(several)


def test_units_with_other_layer_pairs_across_tokens_are_not_joined(store):
    for step, others in ((3, [1.0, 2.0]), (4, [2.0, np.nan])):
        pairs = xr.Dataset(
            {"pair_position": (("prompt", "pair_token"), np.zeros((2, 1)))},
            {"layer": [1, 2]},
            SHARED,
        )
        store.write(step, pairs.assign_coords(pair_layer_other=("layer", others), step=step))
    with pytest.raises(
        ValueError, match=r"differ in their layers compared across tokens .*\[1.0, 2.0\]"
    ):
        tracker.open_results(store.path)


def test_temporary_files_of_killed_writers_are_not_units(store):
    store.write(3, unit(3))
    left = store.units / ".step00000004.nc.1-1-0123456789abcdef.tmp"
    left.write_bytes(b"half")
    assert store.steps() == [3] and not store.has(4)
    assert not store.remove_abandoned() and not list(store.units.glob(".*"))


def test_files_that_are_set_aside_replace_none_that_were_before(store):
    """A run may be resumed twice from one checkpoint, and one step be damaged twice."""
    for content in (b"first", b"second", b"third"):
        store.file(3).write_bytes(content)
        store.write(3, unit(3))
        store.set_aside([3])
    kept = {file.name: file.read_bytes() for file in (store.path / "damaged").iterdir()}
    assert kept == {
        "step00000003.nc": b"first",
        "step00000003-1.nc": b"second",
        "step00000003-2.nc": b"third",
    }
    superseded = sorted(file.name for file in (store.path / "superseded").iterdir())
    assert superseded == ["step00000003-1.nc", "step00000003-2.nc", "step00000003.nc"]


def test_foreign_file_is_reported(store):
    xr.Dataset({"temperature": ("time", [1.0])}).to_netcdf(store.file(4), engine="netcdf4")
    with pytest.raises(ValueError, match=r"step00000004.nc is not a unit of results"):
        tracker.open_results(store.path)


def test_a_store_is_continued_as_its_last_whole_unit_was_measured(store):
    settings = settings_from({}, "walk")
    for step in (3, 4):
        store.write(step, unit(step, final_norm="exclude"))
    store.file(4).write_bytes(b"damaged")
    assert store.continued(settings).final_norm == "exclude"
    store.file(3).write_bytes(b"damaged")
    assert store.continued(settings).final_norm == "auto"
    store.write(4, unit(4, final_norm="include"))
    assert store.continued(settings).final_norm == "include"


def test_units_of_another_version_are_refused(store):
    store.write(3, unit(3, schema=SCHEMA - 1))
    with refused(r"step00000003\.nc was measured by another version of this package"):
        tracker.open_results(store.path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[3]", "holds a list, not a dict"),
        (b'{"three": "why"}', "'three' is no step"),
        (b"{", "damaged"),
        (b"\xff", "damaged"),
        (b"[" * 100_000, "damaged"),
    ],
    ids=["list", "name", "half", "bytes", "nested"],
)
def test_damaged_records_are_named(store, content, said):
    (store.path / "skipped.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"skipped\.json.*{said}.*remove it"):
        store.skipped()
    store.write(3, unit(3))
    store.settings.write_bytes(content)
    if said != "'three' is no step":
        with pytest.raises(ValueError, match=rf"no readable settings\.json.*{said}"):
            store.check_settings({"k": [4]})


def test_what_stands_in_place_of_a_record_is_named(store):
    os.mkfifo(store.path / "skipped.json")
    with pytest.raises(ValueError, match=r"skipped\.json is no file; remove it"):
        store.skipped()


@pytest.mark.parametrize("found", ["nothing", "half", "whole"])
def test_a_unit_whose_writing_fails_at_any_operation_is_as_before_or_whole(store, found):
    """What was damaged is kept, in its place or in DIR/damaged."""
    file, damaged = store.write(3, unit(3)), store.path / "damaged"
    whole = file.read_bytes()
    before = {"nothing": [], "half": [whole[:500]], "whole": [whole]}[found]

    def begin():
        shutil.rmtree(damaged, ignore_errors=True)
        file.unlink()
        for content in before:
            file.write_bytes(content)

    def write():
        store.write_content(3, whole[:-SEALED])

    begin()
    for operation, raised in failures(write, store.path, FULL):
        assert isinstance(raised, OSError) and str(store.path) in str(raised)
        written = list(contents(store.units).values())
        assert written in (before, [whole], [] if operation == "os.rename" else before)
        assert found != "half" or before[0] in [*written, *contents(damaged).values()]
        write()
        assert contents(store.units) == {file.name: whole}
        assert list(contents(damaged).values()) == (before if found == "half" else [])
        begin()


CLAIM = """
import sys, time
from tracker.store import Store

claim = Store(sys.argv[2]).claim(3)
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_claim_is_exclusive_and_ends_with_its_process(store):
    other = processes.start("tests.support.statements", CLAIM, store.path)
    assert other.stdout.readline() == "claimed\n"
    assert store.claim(3) is None and f"process {other.pid}," in store.claimant(3)
    free = store.claim(4)
    assert free is not None and store.claim(4) is None
    with pytest.raises(ValueError, match="never mixed"):
        # Another walk is running, without results so far
        store.check_settings({"k": [5], "dtype": "float32"})
    free.release()  # its file remains, like that of a killed walk
    assert store.remove_abandoned() and [file.name for file in store.units.glob(".*")] == [
        ".step00000003.claim"
    ]
    other.kill()
    other.wait()
    taken = store.claim(3)
    assert taken is not None
    taken.release()
    assert not store.remove_abandoned() and not list(store.units.glob(".*"))


def test_locks_are_exclusive_while_their_files_are_removed(tmp_path):
    inside, overlaps = [], []

    def work():
        for _ in range(200):
            with Lock.wait(tmp_path / "lock") as lock:
                inside.append(1)
                overlaps.append(len(inside))
                inside.pop()
                lock.file.unlink()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(overlaps) == {1}


def test_identical_weights_are_flagged(store):
    fingerprints = {0: "a", 1: "a", 2: "b", 4: "a", 8: "", 16: ""}
    for step, fingerprint in fingerprints.items():
        store.write(step, unit(step).assign_coords(fingerprint=fingerprint))
    assert list(tracker.open_results(store.path).repeats.values) == [-1, 0, -1, 0, -1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("without", [{0}, {1, 2}])
def test_steps_without_scores_have_none(tmp_path, without):
    store = Store(generated(tmp_path / "store", [0, 1, 2]))
    for step in without:
        store.write(step, store.read(step).drop_dims("task"))
    opened = tracker.open_results(store.path)
    assert set(opened.step.values[opened.score.isnull().any("task")]) == without
    assert opened.miscoupling.notnull().all()
    for read in (read_reduced(store.path), opened):
        assert set(read.task.values) == {"lambada", "piqa"}
