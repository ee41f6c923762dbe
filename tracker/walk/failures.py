"""The checkpoints that a walk could not measure, grouped by cause."""

import errno
import re
from collections.abc import Iterable
from pathlib import Path

from checkpoints.disk import missing_files
from checkpoints.hub import repo_dir
from checkpoints.suites import Checkpoint
from tracker.common.errors import NO_SPACE, NOT_ALLOWED, CheckpointError, UsageError
from tracker.common.text import join_names, printable
from tracker.walk.plan import SelectedCheckpoints

CONNECT = "run the same command again with a connection to the hub, or set HF_HUB_CACHE to a cache that holds them"
IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
NUMBERS = r"\b[0-9a-f]{8,64}\b|\d+(?:\.\d+)?"  # commits, and numbers that differ between steps


class Failures:
    """The messages of failed checkpoints. Messages that differ only in names and numbers have one cause."""

    def __init__(self) -> None:
        self._by_cause: dict[str, dict[int, str]] = {}  # messages by step

    def add(self, checkpoint: Checkpoint, message: str) -> str:
        """Record a failure; return its message, or the step that failed before for the same cause."""
        message = printable(message)
        shown = message.replace(checkpoint.name, re.sub(r"\d+", "*", checkpoint.name))
        messages = self._by_cause.setdefault(re.sub(NUMBERS, "*", shown), {})
        first = next(iter(messages), None)
        messages[checkpoint.step] = message if first is None else shown
        return message if first is None else f"for the same reason as step {first}"

    def alike(self, count: int) -> bool:
        """Whether so many checkpoints failed, all for one cause."""
        causes = [*self._by_cause.values()]
        return len(causes) == 1 and len(causes[0]) >= count

    def lines(self) -> list[str]:
        """Return a line for each cause, with the steps that it stopped."""
        lines = []
        for messages in self._by_cause.values():
            steps = list(messages)
            counted = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} checkpoints, steps {join_names(steps)}"
            lines.append(f"failed: {counted}: {messages[steps[-1]]}")
        return lines


def reason(error: Exception, debug: bool) -> str:
    """Return why a checkpoint failed."""
    if isinstance(error, (CheckpointError, UsageError)):
        return str(error)
    return f"{type(error).__name__}: {error}" + ("" if debug else "; --debug prints the traceback")


def unwritable(error: OSError, store: Path) -> str:
    """Return why results can't be written to a store, and what to do."""
    place = error.filename2 or error.filename or store  # of a renaming the new name
    if error.errno in NO_SPACE:
        remedy = "free disk space or give another --out"
    elif error.errno in NOT_ALLOWED:
        remedy = "give an --out that you may write to"
    elif error.errno in IN_THE_WAY:
        remedy = "move away what is in its place, or give another --out"
    else:
        remedy = "give another --out"
    return (
        f"can't write to {place} ({error.strerror or error}); finished revisions are kept: {remedy}, and run the same command "
        "again"
    )


def unavailable(selection: SelectedCheckpoints, checkpoints: Iterable[Checkpoint]) -> dict[Checkpoint, str]:
    """Return which checkpoints can't be measured because the hub can't be reached, and what the cache lacks of each."""
    if not selection.offline:
        return {}
    cache = repo_dir(selection.suite.source, selection.suite.cache_dir).parent
    lacking = {}
    for checkpoint in checkpoints:
        listing, state = selection.listings.get(checkpoint.name), "is not"
        if listing is not None:
            repository = repo_dir(checkpoint.source, selection.suite.cache_dir)
            missing = missing_files(repository / "snapshots" / listing.commit, listing)
            state = f"lacks {', '.join(file.name for file in missing)}" if missing else ""
        if state:
            lacking[checkpoint] = f"{checkpoint.source} at {checkpoint.name} {state} in the cache {cache}; {CONNECT}"
    return lacking


def nothing_cached(selection: SelectedCheckpoints) -> str:
    """Describe that the hub can't be reached and that the cache holds none of the checkpoints."""
    cache = repo_dir(selection.suite.source, selection.suite.cache_dir).parent
    return (
        f"{selection.offline}, and no checkpoint is complete in the cache {cache}; {CONNECT}. --model nano is trained here and "
        "needs no connection"
    )
