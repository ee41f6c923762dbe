"""Training on two ranks on this machine."""

import os
import socket
import subprocess
from pathlib import Path

import tracker
from tests.support import processes
from tracker.report import write_report


def run_on_two_ranks(module: str, *arguments: object, rank: str = "RANK") -> None:
    """Run `python -m MODULE ARGUMENTS` as two ranks, which must succeed.

    Args:
        rank: the variable that a rank reads its number from. Lightning's is LOCAL_RANK, without which it starts the second rank
            itself, as a fresh interpreter.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    ranks = [
        processes.start(
            module, *arguments, env={**common, rank: str(number)}, stdout=subprocess.DEVNULL
        )
        for number in range(2)
    ]
    try:
        for process in ranks:
            _, err = process.communicate(timeout=600)
            assert process.returncode == 0, err
    finally:
        for process in ranks:
            process.kill()


def assert_store_is_like_any_other(directory: Path, steps: list[int]) -> None:
    """Assert that a store opens, has a page with its steps, and is drawn."""
    results = tracker.open_results(directory)
    assert results.step.values.tolist() == steps
    page = write_report(directory, directory / "page.html").read_text()
    assert "miscoupling" in page and f"{steps[-1]}" in page
    assert tracker.plot(directory).axes and tracker.plot(results, "heatmap").axes


def run_process(*arguments: object, cold: bool = False) -> subprocess.CompletedProcess:
    return processes.run("tests.support.lightning_runs", *arguments, cold=cold)
