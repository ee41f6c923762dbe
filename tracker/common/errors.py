"""Errors that several packages raise or tell apart, each a message for the user."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tracker.common.text import first_line

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # why a file can't be written
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class UsageError(ValueError):
    """A request that can't be met with this model or these inputs: what was given, what is allowed, what to do."""


class CheckpointError(Exception):
    """A checkpoint can't be loaded or can't be trusted; the message states which, why and what to do."""


class Unreachable(CheckpointError):
    """No hub responds: offline mode is on, there is no network, the hub stays busy, or something else answers."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for the panics of libraries written in Rust (tokenizers), which are no `Exception`s."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"a library panicked: {first_line(error)}") from error
