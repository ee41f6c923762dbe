"""A job whose n-th operation on files fails, for n = 1, 2, ... until it ends without; and files that can't be read.

Python asks the audit hooks of a process before it opens, renames or removes a file. The hook of this module raises an error at
one of these operations. Syncing is not among them, so `os.fsync` asks, too, while a job runs.
"""

import errno
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

READING = ("os.listdir", "os.scandir")  # and opening a file to read it
WRITING = "fcntl.flock os.fsync os.link os.mkdir os.remove os.rename os.rmdir os.symlink os.truncate".split()


def numbered(number: int) -> Callable[..., OSError]:
    """Return a function that makes the error of this number; it takes the file, where the system's has one."""
    return partial(OSError, number, os.strerror(number))


FULL, FAILING = numbered(errno.ENOSPC), numbered(errno.EIO)


class Failure:
    """An error at operations on the files below a directory: at one of them, or at all.

    Args:
        at: the number of the operation that fails, from 1 on; None: all.
        reading: whether operations that only read fail, too.
        only: the operations that fail.
    """

    def __init__(
        self,
        below: Path,
        error: Callable[..., BaseException],
        at: int | None = None,
        reading: bool = True,
        only: Collection[str] = ("open", *READING, *WRITING),
    ):
        self.below, self.error, self.at, self.only = str(below), error, at, only
        self.reading, self.count, self.operation = reading, 0, ""

    def meet(self, operation: str, arguments: tuple):
        files = [name for name in map(name_of, arguments) if name.startswith(self.below)]
        if operation not in self.only or not files:
            return
        opened = operation == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or operation in READING) and not self.reading:
            return
        self.count += 1
        if self.at in (None, self.count):
            self.operation = operation
            # The system names no file in an error of an open one
            raise self.error(*[] if isinstance(arguments[0], int) else files[:1])

    def __enter__(self) -> "Failure":
        sync = os.fsync

        def synced(descriptor: int):
            _ask("os.fsync", (descriptor,))
            sync(descriptor)

        self.patch = mock.patch("os.fsync", synced)
        self.patch.start()
        _active.append(self)
        return self

    def __exit__(self, *_: object):
        _active.remove(self)
        self.patch.stop()


def name_of(file: object) -> str:
    """Return the path of what an operation is done to, or to what, an open file's too; of flags and modes, none."""
    if isinstance(file, int):
        link = f"/proc/self/fd/{file}"
        return os.readlink(link) if os.path.lexists(link) else ""
    return os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else ""


_active = []


def _ask(operation: str, arguments: tuple):
    for failure in _active:
        failure.meet(operation, arguments)


sys.addaudithook(_ask)


def failures(
    job: Callable[[], object], below: Path, error: Callable[..., BaseException], **options: Any
) -> Iterator[tuple[str, BaseException | None]]:
    """Do a job again and again; yield the operation that failed each time, and what the job raised of it, or None.

    Args:
        options: those of `Failure`.
    """
    for at in itertools.count(1):
        raised = None
        with Failure(below, error, at, **options) as failure:
            try:
                job()
            except (Exception, KeyboardInterrupt) as caught:
                raised = caught
        if not failure.operation:
            assert raised is None and at > 1, raised
            return
        yield failure.operation, raised


def unreadable(file: Path) -> Path:
    """Put a file in place of another whose reading fails with EIO, as that of this process's memory at address 0."""
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/self/mem")
    return file
