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

    def __init__(self, walker: Walker, runs: Path, *options: str):
        self.walker, self.runs, self.options = walker, runs, options
        self.temporary, self.store = walker.directory / "temporary", walker.directory / "disturbed"
        self.temporary.mkdir()

    def start(self, out: Path, before: str = ""):
        flags = ("--out", str(out), *self.options)
        return self.walker.start(
            *flags, model=str(self.runs), before=before, TMPDIR=str(self.temporary)
        )

    def finish(self, out: Path) -> None:
        process = self.start(out)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err

    def disturb(
        self, number: int, seconds: float, while_copying: bool, before: str = ""
    ) -> tuple[int, bool]:
        """Send a signal after some seconds, or as soon as there is a new copy; return the status, and whether a copy was left."""
        left = set(self.copies())
        process = self.start(self.store, before)
        ends = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < ends:
            if while_copying and {*self.copies()} - left:
                break
            time.sleep(0.001)
        process.send_signal(number)
        _, err = process.communicate(timeout=600)
        assert "Traceback" not in err, err
        return process.returncode, bool(self.copies())

    def copies(self) -> list[Path]:
        return [*self.temporary.glob(f"{PREFIX}*"), *self.runs.glob(f"{PREFIX}*")]

    def assert_clean(self) -> None:
        assert not self.copies()
        assert not any(self.store.rglob("*.claim"))
        assert not any(self.store.rglob("*.tmp"))


@pytest.fixture
def disturbed(walker, suite, tmp_path) -> DisturbedWalks:
    for step in (1, 2, 4):
        copied(suite, step, tmp_path / "runs" / f"step{step}")
    return DisturbedWalks(walker, tmp_path / "runs")


@pytest.mark.slow(60)
def test_killed_walks_leave_no_copy_and_no_claim_to_the_next(disturbed, tmp_path):
    disturbed.finish(tmp_path / "undisturbed")
    left = [disturbed.disturb(signal.SIGKILL, 60, True)[1] for _ in range(2)]
    assert any(left), "no walk was killed while it had a copy"
    status, copy_left = disturbed.disturb(signal.SIGHUP, 60, True)
    assert status == 130 and not copy_left
    disturbed.finish(disturbed.store)
    disturbed.assert_clean()
    assert_same_results(disturbed.store, tmp_path / "undisturbed")


def test_a_walk_that_ignores_hang_ups_goes_on(disturbed):
    status, _ = disturbed.disturb(signal.SIGHUP, 60, True, before=NOHUP)
    assert status == 0
    disturbed.assert_clean()
