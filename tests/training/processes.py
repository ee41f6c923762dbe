"""Training on two ranks on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def run_on_two_ranks(module: str, directory: Path) -> None:
    """Run `python -m MODULE DIRECTORY` as two ranks, which must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, str(directory)]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
