"""One training at a time writes a store."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

import tracker
from tests.support import processes
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tracker.common.errors import UsageError
from tracker.store import Store

HOLD = """
import os, sys
from pathlib import Path
from tracker.common.files import Lock
from tracker.store import Store
place = Path(sys.argv[2])
Store(place).units.mkdir()
claims = Store(place).claim(3), Lock.take(place / ".training")
claims[1].sign()
if worker := os.fork():
    print(worker, flush=True)
sys.stdin.read()  # until the test ends
"""


def start(code: str, *arguments: object):
    return processes.start("tests.support.statements", code, *arguments)


def watched(directory: Path) -> tracker.Watch:
    return tracker.Watch(1, probe=tokens(2), save_dir=str(directory), measures="trajectory")


@pytest.mark.slow
def test_a_store_of_a_running_training_is_refused_until_that_is_killed(tmp_path):
    """A worker that outlives it has neither its claim nor one on a step."""
    other = start(HOLD, tmp_path)
    worker = int(other.stdout.readline())
    with refused(f"belongs to another training .*process {other.pid}.*another save_dir"):
        watched(tmp_path)(0, neox())
    other.kill()
    other.wait()
    os.kill(worker, 0)  # it is alive
    with watched(tmp_path) as watch:  # a claim on a step would be refused, too
        watch(0, neox())
    assert Store(tmp_path).steps() == [0] and not (tmp_path / ".training").exists()
    os.kill(worker, signal.SIGKILL)


def test_of_two_threads_that_begin_together_one_has_the_store(tmp_path):
    refused, begin = [], threading.Barrier(2)

    def train():
        watch, model = watched(tmp_path), neox()
        begin.wait()
        try:
            for step in range(3):
                watch(step, model)
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and "another" in refused[0]
    assert Store(tmp_path).steps() == [0, 1, 2]


@pytest.mark.parametrize("case", ["resumed", "without results", "directory removed"])
def test_a_run_that_goes_on_after_another_took_its_store_is_refused(tmp_path, case):
    directory, model = tmp_path / "run", neox()
    first, second = watched(directory), watched(directory)
    if case == "without results":
        with refused("vocabulary has 1 entries"):
            first(0, neox(vocab_size=1))
    else:
        first(0, model)
    if case == "directory removed":
        shutil.rmtree(directory)
    began = int(case == "resumed")
    second(began, model)
    taken = rf"belongs to another training \(.*process {os.getpid()}, {threading.current_thread().name}, since .*step: {began}\)"
    with refused(taken):
        first(2, model)
    first.close()
    with refused(taken):
        watched(directory)(0, model)
    second(3, model)
    assert Store(directory).steps()[-2:] == [began, 3]
