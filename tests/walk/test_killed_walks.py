"""Walks over a directory of checkpoints that are killed or hung up: the next leaves no copy, no claim and the same store."""

import signal
import time
from pathlib import Path

import pytest

from checkpoints.copies import PREFIX
from tests.conftest import Walker
from tests.support.stores import assert_same_results
from tests.support.suite import copied

pytestmark = pytest.mark.slow

NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


class DisturbedWalks:
    """Walks over a directory, with a `TMPDIR` of their own."""

    def __init__(self, walker: Walker, runs: Path):
        self.walker, self.runs = walker, runs
        self.temporary, self.store = walker.directory / "temporary", walker.directory / "disturbed"
        self.temporary.mkdir()

    def start(self, out: Path, before: str = ""):
        flags = {"model": str(self.runs), "before": before, "TMPDIR": str(self.temporary)}
        return self.walker.start("--out", str(out), **flags)

    def finish(self, out: Path) -> None:
        process = self.start(out)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err

    def disturb(self, number: int, before: str = "") -> tuple[int, bool]:
        """Send a signal as soon as there is a new copy; return the status, and whether a copy was left."""
        left, ends = set(self.copies()), time.monotonic() + 60
        process = self.start(self.store, before)
        while process.poll() is None and time.monotonic() < ends and not {*self.copies()} - left:
            time.sleep(0.001)
        process.send_signal(number)
        _, err = process.communicate(timeout=600)
        assert "Traceback" not in err, err
        return process.returncode, bool(self.copies())

    def copies(self) -> list[Path]:
        return [*self.temporary.glob(f"{PREFIX}*"), *self.runs.glob(f"{PREFIX}*")]

    def assert_clean(self) -> None:
        assert not self.copies()
        assert not [*self.store.rglob("*.claim"), *self.store.rglob("*.tmp")]


@pytest.fixture
def disturbed(walker, suite, tmp_path) -> DisturbedWalks:
    for step in (1, 2, 4):
        copied(suite, step, tmp_path / "runs" / f"step{step}")
    return DisturbedWalks(walker, tmp_path / "runs")


@pytest.mark.slow(20)
def test_killed_walks_leave_no_copy_and_no_claim_to_the_next(disturbed, tmp_path):
    left = [disturbed.disturb(signal.SIGKILL)[1] for _ in range(2)]
    assert any(left), "no walk was killed while it had a copy"
    assert disturbed.disturb(signal.SIGHUP) == (130, False)
    disturbed.finish(disturbed.store)
    disturbed.assert_clean()
    disturbed.finish(tmp_path / "undisturbed")
    assert_same_results(disturbed.store, tmp_path / "undisturbed")


def test_a_walk_that_ignores_hang_ups_goes_on(disturbed):
    assert disturbed.disturb(signal.SIGHUP, before=NOHUP)[0] == 0
    disturbed.assert_clean()
