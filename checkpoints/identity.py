"""Whether a user's checkpoint stays the same while it is measured, and copies of its files that nobody else writes to.

A training run may write to a directory at any time. A file that is read twice (weights to measure and to hash) is
then two things, and a mapped file that another process cuts short ends this one by SIGBUS. So files are
copied before they are mapped, and compared with what they were once all is measured. Files of the hub's cache are named by
their hash, and nobody rewrites them: they need neither.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from checkpoints.hub import TEXT
from tracker.common.errors import CheckpointError
from tracker.common.text import first_line

WEIGHTS = (".safetensors", ".bin")
Loaded = TypeVar("Loaded")


@contextmanager
def unchanged(source: Path) -> Iterator[None]:
    """Compare the files of a checkpoint, a directory or one file, before and after what is done with them in this context.

    Raises:
        CheckpointError: if there is none; if a file was replaced, deleted or written to, in place of whatever that led to. New
            files are allowed.
    """
    if not source.exists():
        raise CheckpointError(f"{source} is not there any more: restore it, or leave its step out")
    before = {file: _identity(file) for file in _read_by_loading(source)}
    try:
        yield
    except Exception as error:
        if found := _change(before):
            raise CheckpointError(found) from error
        raise
    if found := _change(before):
        raise CheckpointError(found)


def load_copy(load: Callable[[Path], Loaded], source: Path) -> Loaded:
    """Load a checkpoint from a copy of its directory in `TMPDIR`, which keeps its name and is unlinked when it is loaded.

    Mapped weights stay readable after that, and need no memory that the system can't take back. A single file is read as it
    is: it is not mapped.

    Raises:
        CheckpointError: as `load`, with the directory's own path; if the copy can't be made.
    """
    if source.is_file():
        return load(source)
    with tempfile.TemporaryDirectory(prefix="tracker-", ignore_cleanup_errors=True) as temporary:
        copy = Path(temporary) / source.resolve().name
        _copy(source, copy)
        try:
            return load(copy)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(copy), str(source))) from error


def _copy(source: Path, copy: Path) -> None:
    """Copy what loading reads; other files, such as an optimizer's state, are links."""
    files = _read_by_loading(source)
    try:
        size, free = sum(file.stat().st_size for file in files), shutil.disk_usage(copy.parent).free
        if size > free:
            raise CheckpointError(
                f"{source} is copied before it is measured, so that nobody changes it meanwhile, and {tempfile.gettempdir()} has "
                f"no space for its {size / 1e9:.3g} GB ({free / 1e9:.3g} GB are free); set TMPDIR to a directory with more space"
            )
        copy.mkdir()
        for file in files:
            shutil.copyfile(file, copy / file.name)
        for file in source.iterdir():
            if file.is_file() and file not in files:
                (copy / file.name).symlink_to(file.absolute())
    except OSError as error:
        raise CheckpointError(
            f"{source} can't be copied to {tempfile.gettempdir()} ({first_line(error)}); it is copied before it is measured, so "
            "that nobody changes it meanwhile: make it readable, or set TMPDIR to another directory"
        ) from error


def _read_by_loading(source: Path) -> list[Path]:
    """List the files that loading reads: weights, configuration and tokenizer, but not the state of an optimizer."""
    if source.is_file():
        return [source]
    return [file for file in source.iterdir() if file.name.endswith((*WEIGHTS, *TEXT)) and file.is_file()]


def _identity(file: Path) -> tuple[int, ...] | None:
    """Return what changes with a file's content, also if its size and modification time are set back; None without a file."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _change(before: dict[Path, tuple[int, ...] | None]) -> str:
    """Describe the first change of files, or return ""."""
    for file, known in before.items():
        now = _identity(file)
        if now != known:
            return (
                f"{file} was {'changed' if now else 'deleted'} while this checkpoint was measured, and its results are not kept: "
                "when nothing writes there any more, run the same command again"
            )
    return ""
