"""Directories of files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def holding(directory, *files):
    """Make empty files below a directory; return the directory."""
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("{}")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Return what the files of a directory contain, by their names; of no directory, nothing."""
    return {file.name: file.read_bytes() for file in sorted(directory.glob("*")) if file.is_file()}


def configured(file: str = "config.json", **changes: Any) -> Callable[[Path], None]:
    """Return a function that changes entries of a JSON file."""

    def change(directory: Path):
        content = json.loads((directory / file).read_text()) | changes
        replaced(file, json.dumps(content))(directory)

    return change


def replaced(name: str, content: str) -> Callable[[Path], None]:
    """Return a function that replaces a file."""

    def change(directory: Path):
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_text(content)

    return change
