"""Errors of checkpoints, each a message for the user."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # why a file can't be written
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class CheckpointError(Exception):
    """A checkpoint can't be loaded or can't be trusted; the message states which, why and what to do."""


class Unreachable(CheckpointError):
    """No hub responds: offline mode is on, there is no network, the hub stays busy, or something else answers."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second where the first announces it with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return printable(" ".join(lines[: 2 if lines[0].rstrip().endswith(":") else 1]), 500)


def printable(text: str, most: int = 2000) -> str:
    r"""Return a text as one line that any terminal shows as it is: a file may hold anything, and error messages quote it.

    Args:
        most: characters to keep.

    >>> print(printable("no such\n type: \x1b[31m\ud800"))
    no such type: \x1b[31m\ud800
    """
    words = " ".join(text.split())
    words = words if len(words) <= most else f"{words[:most]} …"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for the panics of libraries written in Rust (tokenizers), which are no `Exception`s."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"a library panicked: {first_line(error)}") from error
