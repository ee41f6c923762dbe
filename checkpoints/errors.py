"""Errors of checkpoints, each a message for the user."""


class CheckpointError(Exception):
    """A checkpoint can't be loaded or can't be trusted; the message states which, why and what to do."""


class Unreachable(CheckpointError):
    """No hub responds: offline mode is on, there is no network, the hub stays busy, or something else answers."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second where the first announces it with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
