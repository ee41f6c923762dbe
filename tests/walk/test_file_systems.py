"""Walks on file systems without locks and without synced directories, and units that other processes have locked.

A library that is loaded before the C library answers `flock`, and `fsync` of a directory, with a chosen error.
"""

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest

import tracker
from tests.support import processes
from tracker import pythia
from tracker.common.files import Lock
from tracker.store import Store

pytestmark = pytest.mark.slow

REFUSING = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

int flock(int file, int operation) { errno = atoi(getenv("FLOCK_ERROR")); return -1; }

int fsync(int file) {
    struct stat status;
    if (fstat(file, &status) == 0 && S_ISDIR(status.st_mode)) { errno = EINVAL; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(file);
}
"""


@pytest.fixture(scope="session")
def refusing(tmp_path_factory) -> str:
    """Compile the library; return its path."""
    compiler = (
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    )
    if compiler is None:
        pytest.skip("no C compiler is found (cc, gcc, clang or $CC)")
    source = tmp_path_factory.mktemp("refusing") / "refusing.c"
    source.write_text(REFUSING)
    library = str(source.with_suffix(".so"))
    subprocess.run(
        [compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", str(source), "-o", library, "-ldl"],
        check=True,
    )
    return library


def contents(store: Store) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(store.units.glob("step*.nc"))}


WALKS = """
import errno, os
from tracker.pythia import main

for refusal, arguments in {walks}:
    os.environ["FLOCK_ERROR"] = str(getattr(errno, refusal))
    assert main(arguments) == 0, refusal
    print("walked", flush=True)
    input()
"""


@pytest.mark.slow(60)
def test_walks_without_locks_keep_the_units_of_a_store(walker, refusing):
    """Each error of a file system without locks; two walks over other steps of one store."""
    refusals = ("ENOLCK", "ENOTSUP", "EINVAL")
    stores = {refusal: Store(walker.directory / refusal) for refusal in refusals}
    walks = [
        (refusal, walker.arguments("--out", str(stores[refusal].path), "--steps", steps))
        for refusal in refusals
        for steps in ("1,2,4", "2,4,8")
    ]
    process = processes.start(
        "tests.support.statements",
        WALKS.format(walks=walks),
        env={**walker.environment, "LD_PRELOAD": refusing},
        cold=True,
        stdin=subprocess.PIPE,
    )
    for refusal in refusals:
        store = stores[refusal]
        processes.wait_for_line(process, "walked")
        measured = contents(store)
        assert len(measured) == 3
        print(file=process.stdin, flush=True)
        processes.wait_for_line(process, "walked")
        assert store.steps() == [1, 2, 4, 8]
        assert contents(store).items() > measured.items()
        assert tracker.open_results(store).step.values.tolist() == [1, 2, 4, 8]
        print(file=process.stdin, flush=True)
    _, err = process.communicate()
    assert process.returncode == 0 and "damaged" not in err, err


def test_units_that_another_process_has_locked_are_read(walker, capsys):
    assert walker.main("--steps", "1,2") == 0
    store = walker.store
    measured = contents(store)
    with Lock.wait(store.file(1)), Lock.wait(store.file(2)):
        assert tracker.open_results(store).step.values.tolist() == [1, 2]
        assert walker.main("--steps", "2,4") == 0
    assert "damaged" not in capsys.readouterr().err
    assert contents(store).items() > measured.items() and store.steps() == [1, 2, 4]


def test_a_unit_that_cannot_be_read_at_this_moment_ends_the_walk(walker, monkeypatch, capsys):
    """Nothing is said to be damaged, and nothing is moved."""
    assert walker.main("--steps", "1,2") == 0
    store = walker.store
    measured, read = contents(store), type(store.path).read_bytes

    def fails(file):
        if file == store.file(1):
            raise OSError(errno.EIO, "Input/output error")
        return read(file)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", fails)
        assert walker.main("--steps", "1,2") == 2
    err = capsys.readouterr().err
    assert "Input/output error" in err and str(store.file(1)) in err and "damaged" not in err
    assert contents(store) == measured and not (store.path / "damaged").exists()


def test_damaged_units_are_kept_and_those_of_selected_steps_measured_again(
    walker, monkeypatch, capsys
):
    assert walker.main("--steps", "1,2,4") == 0
    store = walker.store
    whole = contents(store)
    halves = {store.file(step): store.file(step).read_bytes()[:5000] for step in (1, 2)}
    for file, half in halves.items():
        file.write_bytes(half)
    capsys.readouterr()
    assert walker.main("--steps", "2,4") == 0
    err = capsys.readouterr().err
    for step in (1, 2):
        assert (
            f"{store.file(step)} is damaged and left out; a walk that selects step {step} measures it again"
            in err
        )
    assert f"and moves the file to {store.path / 'damaged'}" in err
    assert store.file(1).read_bytes() == halves[store.file(1)]
    assert (store.path / "damaged" / "step00000002.nc").read_bytes() == halves[store.file(2)]
    assert (store.path / "report.html").stat().st_size and int(store.read(2)["step"]) == 2
    # A disk that fills before the successor is written leaves the damaged file where it is.
    sync = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert walker.main("--steps", "1") == 1
    assert f"can't write to {store.file(1)} (No space left on device)" in capsys.readouterr().err
    assert store.file(1).read_bytes() == halves[store.file(1)]
    assert walker.main("--steps", "1") == 0
    assert (store.path / "damaged" / "step00000001.nc").read_bytes() == halves[store.file(1)]
    assert contents(store).keys() == whole.keys() and tracker.open_results(
        store
    ).step.values.tolist() == [1, 2, 4]


@pytest.mark.parametrize("selected", ["1,2,4", "1,2,8"])
def test_a_damaged_last_unit_stops_no_measurement(walker, selected):
    """A walk reads from the last unit how it is continued."""
    assert walker.main("--steps", "1,2,4") == 0
    store = walker.store
    whole = tracker.open_results(store).miscoupling
    store.file(4).write_bytes(store.file(4).read_bytes()[:5000])
    assert walker.main("--steps", selected) == 0
    if "4" in selected:
        np.testing.assert_array_equal(tracker.open_results(store).miscoupling, whole)
    else:
        assert int(store.read(8)["step"]) == 8 and store.file(4).stat().st_size == 5000


@pytest.mark.parametrize("when", ["before its scores are added", "before the page is written"])
def test_units_that_become_damaged_during_a_walk_are_named(walker, monkeypatch, capsys, when):
    assert walker.main("--steps", "1,2") == 0
    store = walker.store
    halves = {name: content[:5000] for name, content in contents(store).items()}

    def damaging(part):
        def damaged(*arguments):
            for name, half in halves.items():
                (store.units / name).write_bytes(half)
            return part(*arguments)

        return damaged

    scores = walker.directory / "scores.csv"
    scores.write_text("step,arc\n1,0.1\n2,0.2\n")
    given = ("--scores", str(scores)) if "scores" in when else ()
    part = "_rescore" if "scores" in when else "_write_page"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(pythia, part, damaging(getattr(pythia, part)))
        assert walker.main("--steps", "1,2", *given) == 1
    assert f"{store.file(1)} is damaged" in capsys.readouterr().err and contents(store) == halves
    assert walker.main("--steps", "1,2", *given) == 0
    assert tracker.open_results(store).step.values.tolist() == [1, 2]
    assert {file.name: file.read_bytes() for file in (store.path / "damaged").iterdir()} == halves
