"""Processes for tests: `python -m MODULE`, forked from a server that has imported torch, transformers and Lightning.

A start takes a tenth of a second in place of ten. `cold=True` starts a fresh interpreter; so do systems other than Linux.
"""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.support.fork_server import MESSAGE, PRELOADED

ROOT = Path(__file__).parents[2]
# Variables that the server's modules have read for good; those that a child reads anew are in `fork_server.become`.
READ_ON_IMPORT = tuple(
    "OMP_ MKL_ PYTHON LC_ LANG TORCH PYTORCH MPL HF_HOME HF_MODULES_CACHE".split()
)


def start(
    module: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Any:  # subprocess.Popen[str] or Forked
    """Start `python -m MODULE ARGUMENTS` in the root of the repository, with one thread and pipes."""
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    given = [*map(str, arguments)]
    if not cold and sys.platform == "linux":
        return Forked(module, given, environment)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", module, *given]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def run(
    module: str, *arguments: object, timeout: float = 300, **options
) -> subprocess.CompletedProcess:
    """Run a process to its end, as `subprocess.run` does; `options` are those of `start`."""
    process = start(module, *arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess([module, *arguments], process.returncode, out, err)


def wait_for_line(process: Any, line: str):
    """Read what a process prints until it prints a line; if it ends without it, raise with what it wrote of its errors."""
    # A process with PYTHONUNBUFFERED writes a line and its end apart, so two processes may mix theirs: let one of them print.
    if f"{line}\n" not in process.stdout:
        _, err = process.communicate()
        raise AssertionError(
            f"the process ended with {process.returncode} before it printed {line!r}: {err}"
        )


def wait_until(happens: Callable[[], object], seconds: float = 300):
    """Wait until a function returns something true, which only a fault delays for so many seconds."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files of this process and of those that it starts, as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def children_seconds() -> float:
    """Return the CPU time of this process's ended children: unlike a clock's, it does not depend on what else runs."""
    spent = os.times()
    return spent.children_user + spent.children_system


def read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}
    # Read when used; Ray, Lightning and `two_ranks` set them
    for name in (
        "PYTHONBREAKPOINT",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        found.pop(name, None)
    return found


@cache
def server() -> tuple[socket.socket, subprocess.Popen[str], dict[str, str]]:
    """Start this test process's server, which ends when the socket is closed; return socket, process and its environment."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Without the second variable pyarrow would start a thread.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *PRELOADED],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            # As most children's: Python asks once whether its streams can be sought in
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
    return requests, process, environment


class Forked:
    """A process that the server forked, with what tests use of `subprocess.Popen`."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str]):
        requests, process, theirs = server()
        if (given := read_on_import(environment)) != (had := read_on_import(theirs)):
            names = sorted(name for name, _ in given.items() ^ had.items())
            raise ValueError(
                f"{', '.join(names)}: read when modules are imported; set them for all tests or use cold=True"
            )
        self.args, self.returncode = [module, *arguments], None
        self._readers, self._read = {}, {}
        its_input, our_end = os.pipe()
        (our_out, its_out), (our_err, its_err) = os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = open(our_end, "w"), open(our_out), open(our_err)
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"module": module, "arguments": arguments, "environment": environment}
        files = [status.detach(), its_input, its_out, its_err]
        socket.send_fds(requests, [json.dumps(request).encode()], files)
        for file in files:
            os.close(file)
        started = self._status.recv(MESSAGE)
        if not started:
            raise RuntimeError(
                f"the fork server ended before it could start {module}: {process.communicate()[0]}"
            )
        self.pid = int(started)

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal ended the process, or None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.recv(MESSAGE))
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float = 3600) -> tuple[str, str]:
        """Read the pipes to their ends and wait; after a TimeoutExpired it can be called again and nothing is lost."""
        ends = time.monotonic() + timeout
        self.stdin.close()
        for stream in (self.stdout, self.stderr):
            if stream not in self._readers:
                reader = threading.Thread(target=self._read_all, args=[stream], daemon=True)
                self._readers[stream] = reader
                reader.start()
        for reader in self._readers.values():
            reader.join(max(0, ends - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(max(0, ends - time.monotonic()))
        return self._read[self.stdout], self._read[self.stderr]

    def _read_all(self, stream: IO):
        with stream:
            self._read[stream] = stream.read()

    def send_signal(self, number: int):
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
