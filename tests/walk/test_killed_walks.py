"""Walks over a directory of checkpoints that are killed or hung up: the next leaves no copy, no claim and the same store.

`python -m tests.walk.test_killed_walks KILLS HANG_UPS` does so as often with larger checkpoints.
"""

import random
import shutil
import signal
import sys
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
        assert (
            not self.copies()
            and not any(self.store.rglob("*.claim"))
            and not any(self.store.rglob("*.tmp"))
        )


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


def main(kills: int, hang_ups: int) -> None:
    """Disturb walks over four checkpoints of 25 MB, at random moments and while they copy; print what each left."""
    import tempfile

    import torch

    from checkpoints import nano
    from checkpoints.load import load_own_tokenizer

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        cache = nano.train()
        runs = Path(directory, "runs")
        for step in (1, 2, 3, 4):
            torch.manual_seed(step)
            model = nano.build(nano.NanoRecipe(layers=6, width=256, heads=4, vocabulary=2048))
            model.save_pretrained(runs / f"step{step}")
            load_own_tokenizer(
                next((next(cache.glob("models--*")) / "snapshots").iterdir())
            ).save_pretrained(runs / f"step{step}")
        size = sum(file.stat().st_size for file in (runs / "step1").iterdir())
        walks = DisturbedWalks(Walker(cache, Path(directory)), runs)
        walks.finish(Path(directory, "undisturbed"))
        started = time.monotonic()
        walks.finish(Path(directory, "again"))
        whole = time.monotonic() - started
        print(
            f"checkpoints of {size / 1e6:.0f} MB; an undisturbed walk takes {whole:.1f} s",
            flush=True,
        )
        coming = [signal.SIGKILL] * kills + [signal.SIGHUP] * hang_ups
        while coming:
            number, while_copying = coming[0], len(coming) % 2 == 0
            status, left = walks.disturb(
                number, 60 if while_copying else draw.uniform(0, whole), while_copying
            )
            if status != 0:  # the walk had not ended before
                coming.pop(0)
            measured = len([*walks.store.glob("units/step*.nc")])
            print(
                f"{number.name}: status {status}, copy left: {left}, units: {measured}", flush=True
            )
            if measured == 4:
                walks.finish(walks.store)
                walks.assert_clean()
                assert_same_results(walks.store, Path(directory, "undisturbed"))
                shutil.rmtree(walks.store)
        walks.finish(walks.store)
        walks.assert_clean()
        assert_same_results(walks.store, Path(directory, "undisturbed"))
        print("nothing left, and stores equal")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
