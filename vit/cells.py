"""One training's directory, which is also one cell of a grid: what is in it, whether it is done, who works on it.

    CELL/recipe.json     what the numbers were decided by: a directory is never taken up with anything else
    CELL/history.json    one row per epoch, rewritten whole after each
    CELL/last.ckpt       where to go on
    CELL/coupling/       units of coupling over training, for tracker.open_results
    CELL/result.json     written last: the cell is done if and only if this is whole
    CELL/failed.json     why it is not, after a death

A training that diverges is done as well: the same command would diverge again.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints.files import Lock, differences, write_atomic
from vit.recipe import Recipe

SCHEMA = 1  # of result.json


class BusyError(RuntimeError):
    """Another process is training this cell."""


def read(directory: Path, name: str) -> Any:
    """A JSON file of a cell; None where there is no whole one."""
    try:
        return json.loads((directory / f"{name}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write(directory: Path, name: str, content: Any) -> None:
    """Write a JSON file of a cell, whole or not at all."""
    write_atomic(directory / f"{name}.json", json.dumps(content, indent=1).encode())


def is_done(directory: Path) -> bool:
    """Whether the cell needs no more training."""
    return read(directory, "result") is not None


def agree(directory: Path, recipe: Recipe) -> None:
    """Refuse a directory that was begun with other settings.

    Raises:
        ValueError: naming each setting that differs.
    """
    stored = read(directory, "recipe")
    if stored is None:
        return
    if changes := differences(stored, recipe.identity):
        raise ValueError(
            f"{directory} holds a training with other settings ({changes}); results are never mixed: choose another "
            "--out, or the settings it was begun with"
        )


@contextmanager
def claim(directory: Path, recipe: Recipe) -> Iterator[None]:
    """Have a cell to oneself; the claim ends with the process, however that ends.

    Raises:
        BusyError: if another process has it.
        ValueError: if it was begun with other settings.
    """
    agree(directory, recipe)
    directory.mkdir(parents=True, exist_ok=True)
    lock = Lock.take(directory / ".lock")
    if lock is None:
        raise BusyError(f"{directory} is being trained by another process; wait for it, or end it")
    with lock:
        write(directory, "recipe", recipe.identity)
        yield
