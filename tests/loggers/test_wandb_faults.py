"""Walks whose W&B server fails in mid-run: units, page and W&B's file are complete, and the walk ends soon and says so."""

import subprocess
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.conftest import Walker
from tests.support.wandb_runs import of, records
from tests.support.wandb_server import KEY, serve
from tracker.loggers import opened
from tracker.loggers.protocol import LoggedRun, Opener, Row
from tracker.store import Store

STEPS = [0, 2, 8]
SECONDS = 400  # some twenty are used; a walk that waits for W&B would wait until then
# Where the server answers no more
PATIENCE = "import tracker.loggers.wandb; tracker.loggers.wandb.FINISH = 2.0"
LEFT, SENT = "W&B did not take the run within 2 s", "W&B online: http"
FAULTS = {
    None: SENT,
    "hang": LEFT,
    "refuse": SENT,  # W&B does not tell that the key is refused
}  # what is said last


@pytest.fixture(scope="module")
def walks(suite, tmp_path_factory):
    """Walks side by side, each with a server that fails once the first unit is there."""
    walks = {}
    with ExitStack() as stack:
        for fault in FAULTS:
            directory, server = tmp_path_factory.mktemp(str(fault)), stack.enter_context(serve())
            walker = Walker(suite, directory)
            key = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address, "WANDB_MODE": "online"}
            before = PATIENCE if FAULTS[fault] == LEFT else ""
            store = Store(directory / "out")
            server.fault = lambda fault=fault, store=store: (
                fault if store.path.exists() and store.steps() else None
            )
            flags = "--steps 0,2,8 --measures coupling --k 4".split()
            process = walker.start(*flags, wandb="online", before=before, **key)
            walks[fault] = SimpleNamespace(store=store, server=server, process=process, ended=True)
        until = time.monotonic() + SECONDS
        for walk in walks.values():
            try:
                walk.out, walk.err = walk.process.communicate(
                    timeout=max(0, until - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                walk.ended = False
                walk.process.kill()
                walk.out, walk.err = walk.process.communicate()
        yield walks


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_walk_is_complete_whatever_the_server_does(walks, fault):
    walk = walks[fault]
    assert walk.ended, "it waits for W&B"
    assert walk.process.returncode == 0 and "Traceback" not in walk.err, walk.err
    assert walk.store.steps() == STEPS
    assert "3 checkpoints" in (walk.store.path / "report.html").read_text()
    (file,) = (walk.store.path / "wandb").glob("run-*/*.wandb")
    assert [row["item"]["training/step"] for row in of("history", records(file))] == STEPS
    last = walk.out.strip().splitlines()[-1]
    assert last.startswith(FAULTS[fault])
    assert fault is not None or walk.server.rows == len(STEPS)
    assert FAULTS[fault] == SENT or f"wandb sync {file.parent}" in last
    assert (walk.store.path / "wandb-run.json").exists() == (FAULTS[fault] == SENT), (
        "else the next walk sends all again"
    )


class Failing:
    """A logger whose service is gone."""

    def __init__(self, failing: str):
        self.failing, self.calls = failing, []

    def images(self, row):
        self.call("images")

    def log(self, row):
        self.call("log")

    def finish(self) -> str:
        self.call("finish")
        return "closed"

    def call(self, name: str):
        self.calls.append(name)
        if name == self.failing:
            raise ConnectionResetError("Connection lost")


@pytest.mark.parametrize(
    "failing, calls", [("log", ["images", "log"]), ("finish", ["images", "log"] * 2 + ["finish"])]
)
def test_a_logger_that_fails_does_not_end_a_walk(tmp_path, capsys, failing, calls):
    broken, sound = Failing(failing), Failing("")
    run = LoggedRun(Store(tmp_path), "p", "n", {})
    with opened(
        [Opener(lambda _, one=one: one, lambda _: "") for one in (broken, sound)], run
    ) as send:
        for step in range(2):
            send(Row(step, {}))
    assert broken.calls == calls and sound.calls == ["images", "log"] * 2 + ["finish"]
    said = capsys.readouterr()
    assert (
        said.err
        == "Failing failed and gets no more steps (ConnectionResetError: Connection lost)\n"
    )
    assert said.out == "closed\n"
