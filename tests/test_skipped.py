"""Tests of the record of steps that could not be measured."""

from tests.support.processes import run
from tracker.skipped import Skipped
from tracker.store import Store

ADD = """
import sys
from tracker.skipped import Skipped
from tracker.store import Store
skipped = Skipped(Store(sys.argv[2]), sys.exit)
for step in map(int, sys.argv[3:]):
    skipped.add(step, f"step{step} has no weights")
"""


def test_reasons_that_differ_in_numbers_have_one_cause():
    said = []
    skipped = Skipped(None, said.append)
    assert not skipped.alike(0)
    assert skipped.add(1, "step1 has no weights (0123456789abcdef)") is None
    assert skipped.add(8, "step8 has no weights (fedcba9876543210)") == 1
    assert skipped.alike(2) and not skipped.alike(3)
    assert skipped.add(8, "not logged:\x1b[31m refused") is None
    assert not skipped.alike(2)
    assert skipped.add(8, "not logged:\x1b[31m refused") == 8
    assert (
        skipped.reasons[8]
        == "step8 has no weights (fedcba9876543210); not logged:\\x1b[31m refused"
    )
    assert len(skipped.lines()) == 2 and not said


def test_a_store_keeps_the_steps_of_all_walks_until_they_are_measured(tmp_path):
    store = Store(tmp_path)
    store.check_settings({})
    for steps in ((1, 2), (2, 4)):
        assert run("tests.support.statements", ADD, tmp_path, *steps).returncode == 0
    assert list(store.skipped()) == [1, 2, 4]
    store.file(2).touch()  # a unit
    assert store.skipped() == {step: f"step{step} has no weights" for step in (1, 4)}


def test_a_record_that_cannot_be_kept_is_said_and_stops_nothing(tmp_path):
    said = []
    skipped = Skipped(Store(tmp_path), said.append)
    (tmp_path / "skipped.json").write_text("[]")
    assert skipped.add(3, "no weights") is None and skipped.reasons == {3: "no weights"}
    (line,) = said
    assert "can't record that step 3 was skipped" in line and "holds a list" in line
