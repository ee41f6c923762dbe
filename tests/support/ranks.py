"""Training on two ranks on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

import tracker
from tests.support import processes
from tracker.report import write_report


@contextmanager
def two_ranks(module: str, *arguments: object) -> Iterator[list[processes.Forked]]:
    """Start `python -m MODULE ARGUMENTS` as two ranks, which are killed at the end."""
    # this process serves the ranks' store, as torchrun does: no other one can take its port
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": server.host,
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    try:
        for number in ("0", "1"):
            # Lightning reads LOCAL_RANK, others read RANK
            own = {"RANK": number, "LOCAL_RANK": number}
            ranks.append(processes.start(module, *arguments, env={**os.environ, **common, **own}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_on_two_ranks(module: str, *arguments: object, seconds: float = 400):
    """Run a module as two ranks, which must succeed; a rank that waits for another one is killed."""
    with two_ranks(module, *arguments) as ranks:
        for process in ranks:
            _, err = process.communicate(timeout=seconds)
            assert process.returncode == 0, err


def assert_store_is_like_any_other(directory: Path, steps: list[int]):
    """Assert that a store opens, has a page with its steps, and is drawn."""
    results = tracker.open_results(directory)
    assert results.step.values.tolist() == steps
    page = write_report(directory, directory / "page.html").read_text()
    assert "miscoupling" in page and f"{steps[-1]}" in page
    assert tracker.plot(directory).axes and tracker.plot(results, "heatmap").axes
