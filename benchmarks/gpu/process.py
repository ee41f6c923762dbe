"""One step in a process group with a time limit: whatever ends it, its result so far and the end of its output are kept."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds between the request for a traceback and the end
TAIL = 4000  # characters of the output that are kept


def environment(wheels: Path | None, root: Path, small: bool) -> dict[str, str]:
    """Return the environment variables of all steps: packages from `wheels`, no network, tracebacks of fatal errors."""
    inherited = {**os.environ}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # every step imports the same packages
    paths = [str(root), *([str(wheels)] if wheels else []), os.environ.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        **({"OMP_NUM_THREADS": "1"} if small else {}),  # small products do not share cores well
    }


def run(arguments: Sequence[str], limit: float, directory: Path, result: Path | None, **options: Any) -> dict[str, Any]:
    """Run `python ARGUMENTS`, for `limit` seconds at most; return its status, seconds, result and the end of its output.

    Args:
        arguments: the command line after `python`.
        limit: seconds.
        directory: for the output.
        result: the JSON file that the command writes, if it does.
        **options: of `subprocess.Popen`.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    started, log = time.perf_counter(), directory / "output"
    outcome: dict[str, Any] = {"command": ["python", *arguments], "limit": round(limit)}
    outcome["started"] = datetime.now(UTC).isoformat(timespec="seconds")
    with open(log, "wb") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0, **options)
        try:
            status = describe(process.wait(limit))
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            stop(process)
    outcome |= {"status": status, "seconds": round(time.perf_counter() - started, 2)}
    outcome["output"] = log.read_bytes()[-TAIL:].decode(errors="replace")
    if result is not None:
        with suppress(OSError, json.JSONDecodeError):
            outcome["result"] = json.loads(result.read_text())
        if status == "ok" and "result" not in outcome:
            outcome["status"] = "failed"
    return outcome


def describe(code: int) -> str:
    """Return the status of a process that ended with this exit code."""
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    return "failed" if code else "ok"


def stop(process: subprocess.Popen) -> None:
    """End a process and its group; one that still runs writes its Python stack first (faulthandler)."""
    end(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen) -> None:
    """End a process; if it still runs, it writes its Python stack first."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a process that waits in the GPU's driver may not end at once
        process.wait(GRACE)
