"""One training at a time writes a store."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import tracker
from tests import processes
from tests.models import neox, tokens
from tracker.common.errors import UsageError
from tracker.store import Store
from tracker.training.claim import hold, release

HOLD = """
import os, sys
from tracker.store import Store
from tracker.training.claim import hold
hold(Store(sys.argv[2]))
worker = os.fork() if "fork" in sys.argv else None
if worker != 0:
    print(os.getpid(), worker, flush=True)
sys.stdin.read()  # until the test ends
"""
TRAIN = """
import sys
import tracker
from tests.models import neox, tokens
with tracker.Watch(1, probe=tokens(2), save_dir=sys.argv[2], measures="trajectory") as watch:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(3):
        watch(step, neox())
"""


def start(code: str, *arguments: object):
    return processes.start("tests.statements", code, *arguments, stdin=subprocess.PIPE)


def watched(directory: Path) -> tracker.Watch:
    return tracker.Watch(1, probe=tokens(2), save_dir=str(directory), measures="trajectory")


@pytest.mark.slow
def test_a_store_of_a_running_training_is_refused_until_that_is_killed(tmp_path):
    other = start(HOLD, tmp_path)
    assert other.stdout and other.stdout.readline() == f"{other.pid} None\n"
    with pytest.raises(
        UsageError, match=f"is written by another training .*process {other.pid}.*another save_dir"
    ):
        watched(tmp_path)(0, neox())
    other.kill()
    other.wait()
    with watched(tmp_path) as watch:
        watch(0, neox())
    assert Store(tmp_path).steps() == [0] and not (tmp_path / ".training").exists()


@pytest.mark.slow
def test_a_worker_that_outlives_a_training_does_not_keep_the_store(tmp_path):
    other = start(HOLD, tmp_path, "fork")
    assert other.stdout
    worker = int(other.stdout.readline().split()[1])
    other.kill()
    other.wait()
    os.kill(worker, 0)  # it is alive
    hold(Store(tmp_path))
    release(Store(tmp_path))
    os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_a_training_that_ended_in_an_error_is_continued_in_the_same_process(tmp_path):
    with pytest.raises(KeyError), watched(tmp_path) as watch:
        watch(0, neox())
        raise KeyError
    with watched(tmp_path) as again:
        again(1, neox())
    assert Store(tmp_path).steps() == [0, 1]
    assert not (tmp_path / ".training").exists()


@pytest.mark.slow
def test_of_two_trainings_that_start_together_one_has_the_store(tmp_path):
    both = [start(TRAIN, tmp_path) for _ in range(2)]
    for process in both:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    (refused,) = (err for process, err in zip(both, said, strict=True) if process.returncode)
    assert "another training" in refused or "holds the units of another run" in refused
    assert tracker.open_results(tmp_path).step.values.tolist() == [0, 1, 2]
