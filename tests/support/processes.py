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
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from tests.support.fork_server import MESSAGE, PRELOADED

ROOT = Path(__file__).parents[2]
# Variables that the server's modules have read for good; those that a child reads anew are in `fork_server.become`.
READ_ON_IMPORT = tuple(
    "OMP_ MKL_ PYTHON LC_ LANG TORCH PYTORCH MPL HF_HOME HF_MODULES_CACHE".split()
)
STREAMS = ("stdin", "stdout", "stderr")


def start(
    module: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    stdin: int | IO | None = None,
    stdout: int | IO | None = subprocess.PIPE,
    stderr: int | IO | None = subprocess.PIPE,
    start_new_session: bool = False,
    cold: bool = False,
) -> "subprocess.Popen[str] | Forked":
    """Start `python -m MODULE ARGUMENTS` in the root of the repository, with one thread."""
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if not cold and sys.platform == "linux":
        return Forked(module, [*map(str, arguments)], environment, streams, start_new_session)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        start_new_session=start_new_session,
        **streams,
    )


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


def wait_for_line(process: "subprocess.Popen[str] | Forked", line: str):
    """Read what a process prints until it prints a line; if it ends without it, raise with what it wrote of its errors."""
    assert process.stdout
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

    def __init__(
        self,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        streams: dict,
        start_new_session: bool,
    ):
        requests, process, theirs = server()
        if (given := read_on_import(environment)) != (had := read_on_import(theirs)):
            names = sorted(name for name, _ in given.items() ^ had.items())
            raise ValueError(
                f"{', '.join(names)}: read when modules are imported; set them for all tests or use cold=True"
            )
        self.args, self.returncode = [module, *arguments], None
        self.stdin = self.stdout = self.stderr = None
        self._readers = {}
        self._read = {}
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "module": module,
            "arguments": arguments,
            "environment": environment,
            "start_new_session": start_new_session,
        }
        with ExitStack() as stack:
            stack.enter_context(status)
            files = [self._open(name, streams[name], stack) for name in STREAMS]
            socket.send_fds(requests, [json.dumps(request).encode()], [status.fileno(), *files])
        started = self._status.recv(MESSAGE)
        if not started:
            raise RuntimeError(
                f"the fork server ended before it could start {module}: {process.communicate()[0]}"
            )
        self.pid = int(started)

    def _open(self, name: str, given: int | IO | None, stack: ExitStack) -> int:
        """Return the child's end of a stream."""
        standard = STREAMS.index(name)
        if given == subprocess.PIPE:
            read, write = os.pipe()
            ours, its = (write, read) if name == "stdin" else (read, write)
            setattr(self, name, open(ours, "w" if name == "stdin" else "r"))
        elif given == subprocess.DEVNULL:
            its = os.open(os.devnull, os.O_RDWR)
        else:
            its = os.dup(
                standard if given is None else given if isinstance(given, int) else given.fileno()
            )
        stack.callback(os.close, its)
        return its

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal ended the process, or None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = self._status.recv(MESSAGE)
            if not status:
                raise RuntimeError(
                    f"process {self.pid}: its keeper was killed, so its exit status is unknown"
                )
            self.returncode = int(status)
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read the pipes to their ends and wait; after a TimeoutExpired it can be called again and nothing is lost."""
        ends = None if timeout is None else time.monotonic() + timeout
        if self.stdin:
            self.stdin.close()
        for name in ("stdout", "stderr"):
            if getattr(self, name) and name not in self._readers:
                self._readers[name] = threading.Thread(
                    target=self._reader, args=[name], daemon=True
                )
                self._readers[name].start()
        for thread in self._readers.values():
            thread.join(None if ends is None else max(0, ends - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if ends is None else max(0, ends - time.monotonic()))
        return self._read.get("stdout"), self._read.get("stderr")

    def _reader(self, name: str):
        with getattr(self, name) as stream:
            self._read[name] = stream.read()

    def send_signal(self, number: int):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
