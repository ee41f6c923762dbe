"""Walks on file systems that fail, and over units that are damaged: nothing is lost, and the next walk measures the rest."""

import errno
import re
import shutil

import pytest

import tracker
from tests.support.failing_files import FULL, Failure, failures, numbered, unreadable
from tests.support.files import contents
from tests.support.suite import copied
from tracker import pythia

pytestmark = pytest.mark.slow


def test_walks_without_locks_keep_the_units_of_a_store(walker, capsys):
    """Two walks over other steps of one store."""
    store = walker.store
    with Failure(walker.directory, numbered(errno.ENOLCK), only=["fcntl.flock"]):
        assert walker.main("--steps", "1,2,4") == 0
        measured = contents(store.units)
        assert walker.main("--steps", "2,4,8") == 0
    assert "damaged" not in capsys.readouterr().err
    assert contents(store.units).items() > measured.items() and len(measured) >= 3
    assert tracker.open_results(store).step.values.tolist() == [1, 2, 4, 8]


@pytest.mark.slow(20)
def test_a_walk_whose_writing_fails_at_any_operation_is_completed_by_the_next(
    walker, suite, capsys
):
    """The message says what could not be written, and what was measured before is not measured again."""
    runs, statuses = copied(suite, 8, walker.directory / "runs" / "step8").parent, []

    def walk():
        statuses.append(walker.main("--measures", "entropy", model=str(runs)))

    for _ in failures(walk, walker.out, FULL, reading=False):
        status, err, before = statuses[-1], capsys.readouterr().err, contents(walker.store.units)
        lines = r"error: .*No space left on device.*\n" if status else ""
        assert re.fullmatch(lines, err) and (str(walker.out) in err or not status)
        measured = {name: unit for name, unit in before.items() if name.endswith(".nc")}
        walk()
        assert statuses[-1] == 0
        assert [*contents(walker.store.units)] == ["step00000008.nc"]
        assert contents(walker.store.units).items() >= measured.items()
        shutil.rmtree(walker.out)


def test_a_unit_that_cannot_be_read_at_this_moment_ends_the_walk(walker, capsys):
    """Nothing is said to be damaged, and nothing is moved."""
    assert walker.main("--steps", "1,2") == 0
    file = unreadable(walker.store.file(1))
    assert walker.main("--steps", "1,2") == 2
    err = capsys.readouterr().err
    assert "Input/output error" in err and str(file) in err and "damaged" not in err
    assert file.is_symlink() and not (walker.out / "damaged").exists()


def test_damaged_units_are_kept_and_those_of_selected_steps_measured_again(walker, capsys):
    assert walker.main("--steps", "1,2,4") == 0
    store, damaged = walker.store, walker.out / "damaged"
    halves = {store.file(step).name: store.file(step).read_bytes()[:5000] for step in (1, 2)}
    for name, half in halves.items():
        (store.units / name).write_bytes(half)
    capsys.readouterr()
    assert walker.main("--steps", "2,4") == 0
    err = capsys.readouterr().err
    for step in (1, 2):
        said = f"{store.file(step)} is damaged and left out; a walk that selects step {step} measures it again"
        assert said in err
    assert f"and moves the file to {damaged}" in err
    assert (walker.out / "report.html").stat().st_size
    assert int(store.read(2)["step"]) == 2 and [*contents(damaged)] == [store.file(2).name]
    assert walker.main("--steps", "1") == 0
    assert contents(damaged) == halves
    assert tracker.open_results(store).step.values.tolist() == [1, 2, 4]


@pytest.mark.parametrize("part", ["print_overview", "print_notes"])
def test_units_that_become_damaged_during_a_walk_are_named(walker, monkeypatch, capsys, part):
    """Before scores are added to them, or before the page is written."""
    assert walker.main("--steps", "1,2") == 0
    store, work, given = walker.store, getattr(pythia, part), ("--steps", "1,2")
    halves = {name: content[:5000] for name, content in contents(store.units).items()}
    if part == "print_overview":
        (scores := walker.directory / "scores.csv").write_text("step,arc\n1,0.1\n2,0.2\n")
        given += ("--scores", str(scores))

    def damage(*arguments):
        for name, half in halves.items():
            (store.units / name).write_bytes(half)
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pythia, part, damage)
        assert walker.main(*given) == 1
    assert f"{store.file(1)} is damaged" in capsys.readouterr().err
    assert contents(store.units) == halves
    assert walker.main(*given) == 0
    assert tracker.open_results(store).step.values.tolist() == [1, 2]
    assert contents(store.path / "damaged") == halves
