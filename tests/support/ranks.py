"""Training on two ranks on this machine."""

import os
import socket
from pathlib import Path

import tracker
from tests.support import processes
from tracker.report import write_report


def start_two_ranks(module: str, *arguments: object) -> list[processes.Forked]:
    """Start `python -m MODULE ARGUMENTS` as two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = []
    for number in ("0", "1"):
        # Lightning reads LOCAL_RANK, others read RANK
        own = {"RANK": number, "LOCAL_RANK": number, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(processes.start(module, *arguments, env={**os.environ, **common, **own}))
    return ranks


def run_on_two_ranks(module: str, *arguments: object, seconds: float = 400):
    """Run a module as two ranks, which must succeed; a rank that waits for another one is killed."""
    ranks = start_two_ranks(module, *arguments)
    try:
        for process in ranks:
            _, err = process.communicate(timeout=seconds)
            assert process.returncode == 0, err
    finally:
        for process in ranks:
            process.kill()


def assert_store_is_like_any_other(directory: Path, steps: list[int]):
    """Assert that a store opens, has a page with its steps, and is drawn."""
    results = tracker.open_results(directory)
    assert results.step.values.tolist() == steps
    page = write_report(directory, directory / "page.html").read_text()
    assert "miscoupling" in page and f"{steps[-1]}" in page
    assert tracker.plot(directory).axes and tracker.plot(results, "heatmap").axes
