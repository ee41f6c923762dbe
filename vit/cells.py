"""The directory of one training run, which is also a cell of a grid: its files, state and lock.

    CELL/recipe.json     the settings that determine the results, written before the first step; the directory is resumed only
                         with equal settings
    CELL/history.json    one row per epoch, rewritten atomically after each
    CELL/progress.json   the loss on plain training images at each measured step
    CELL/last.ckpt       the checkpoint to resume from
    CELL/coupling/       units of coupling over training, for tracker.open_results
    CELL/result.json     written last: the cell is done if and only if this file is valid
    CELL/log.txt         what a training of a grid printed
    CELL/failed.json     why the training failed: its error, and the reason in one line

A diverged run counts as done, because the same command would diverge again.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracker.common.files import Lock, read_json, require_same_settings, write_atomic
from vit.recipe import Recipe

SCHEMA = 1  # of result.json
ROWS = ("history", "progress")  # the files that hold lists


class BusyError(RuntimeError):
    """Another process or thread is training this cell."""


def read(directory: Path, name: str) -> Any:
    """Read a JSON file of a cell; return None if it is missing or invalid."""
    try:
        return read_json(directory / f"{name}.json", list if name in ROWS else dict)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def write(directory: Path, name: str, content: Any) -> None:
    """Write a JSON file of a cell atomically."""
    write_atomic(directory / f"{name}.json", json.dumps(content, indent=1).encode())


def finished_epochs(directory: Path) -> int:
    """Return the number of epochs in the history of a cell."""
    return len(read(directory, "history") or ())


def is_done(directory: Path) -> bool:
    """Whether the cell is trained (or diverged) and has its result."""
    return read(directory, "result") is not None


def record_failure(recipe: Recipe, error: str) -> None:
    """Write the text of an error, whose last line is the reason, to failed.json, or to standard error if that is impossible."""
    reason = error.splitlines()[-1]
    try:
        recipe.directory.mkdir(parents=True, exist_ok=True)
        write(recipe.directory, "failed", {"reason": reason, "error": error})
    except OSError as failure:
        print(f"{recipe.cell}: {reason} ({failure})", file=sys.stderr, flush=True)


def check_settings(recipe: Recipe) -> None:
    """Check that a cell's directory is empty or was started with the same settings.

    Raises:
        ValueError: if settings differ; the message names each.
    """
    stored = read(recipe.directory, "recipe")
    if stored is not None:
        require_same_settings(recipe.directory, stored, recipe.identity)


@contextmanager
def claim(recipe: Recipe) -> Iterator[None]:
    """Lock a cell for this process; the lock is released when the process ends for any reason.

    Raises:
        BusyError: if another process or thread holds the lock.
        ValueError: if the cell was started with other settings.
    """
    check_settings(recipe)
    recipe.directory.mkdir(parents=True, exist_ok=True)
    file = recipe.directory / ".lock"
    lock = Lock.take(file)
    if lock is None:
        raise BusyError(
            f"{recipe.directory} is being trained already ({Lock.holder(file)}); wait for it, or stop it"
        )
    with lock:
        lock.sign()
        yield
