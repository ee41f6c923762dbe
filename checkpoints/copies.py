"""Copies of a user's checkpoints, which are loaded and hashed in their place: nobody writes to what is measured.

A training run may write to a user's directory at any time. A file that is read twice, as weights and to be hashed, is then two
things, and a mapped file that another process cuts short ends this one by SIGBUS. So files are copied first. The copy is
unlinked once the model is loaded: mapped weights stay readable after that, and need no memory that the system can't take back.
Files of the hub's cache are named by their hash, and nobody rewrites them: they need no copy.

Each copy has a directory of its own with a lock that its process holds. A killed process leaves the directory and no lock, and
the next walk removes it (`sweep`).
"""

import os
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from checkpoints.integrity import files_digest, weight_files
from checkpoints.load import TOKENIZER_FILES
from tracker.common import files
from tracker.common.errors import CheckpointError, UsageError
from tracker.common.files import Lock
from tracker.common.text import first_line, size

PREFIX = ".block-coupling-copy-"
LOCK = ".lock"
CONFIGURATION = ("config.json", ".index.json", ".model")  # ends of names
TEXTS = (*TOKENIZER_FILES, "added_tokens", "special_tokens_map", "chat_template")  # begins of names
IN_MEMORY = ("tmpfs", "ramfs")  # file systems

Loaded = TypeVar("Loaded")


def load_copy(
    load: Callable[[Path], Loaded], source: Path, own_code: bool = False
) -> tuple[Loaded, str]:
    """Load a checkpoint, a directory or a file, from a copy that keeps its name and is removed when it is loaded.

    Args:
        own_code: whether the user's code loads it, which may read any file of a directory.

    Returns:
        what was loaded, and the `files_digest` of the copy.

    Raises:
        CheckpointError: as `load`, with the checkpoint's own path; if the copy can't be made, or files change meanwhile.
        UsageError: as `load`.
    """
    if not (source.is_file() or source.is_dir()):  # a pipe would be read for ever
        what = "a link that leads nowhere" if source.is_symlink() else "no file or directory"
        raise CheckpointError(f"{source} is {what}: restore it, or leave its step out")
    read = _read_by_loading(source, own_code)
    with _directory(_place(source, sum(file.stat().st_size for file in read))) as directory:
        # Of a link, too: its target may be named by a hash
        copy = directory / Path(os.path.abspath(source)).name
        digest = _copy(source, read, copy, own_code)
        try:
            return load(copy), digest
        except (CheckpointError, UsageError) as error:
            raise type(error)(str(error).replace(str(copy), str(source))) from error


def sweep(sources: Iterable[Path]) -> None:
    """Remove the copies that killed processes of this user left in `TMPDIR` and beside these checkpoints."""
    for place in {Path(tempfile.gettempdir()), *map(_beside, sources)}:
        for directory in place.glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is gone, or we lack the permission
                status = directory.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    _remove_unheld(directory)


def _remove_unheld(directory: Path) -> None:
    if not any(directory.iterdir()):  # a process was killed before it made its lock
        return directory.rmdir()
    if not (file := directory / LOCK).is_file() or (lock := Lock.take(file)) is None:
        return
    with lock:
        second = Lock.take(file)
        if second is None:
            _remove(directory)
        else:  # a file system without locks, which does not tell whether the copy is in use
            second.release()


def _remove(directory: Path) -> None:
    """Remove a copy, its lock last: a sweep takes a directory with files and without a lock for something else."""
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if entry.name != LOCK:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(
                    missing_ok=True
                )
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _directory(place: Path) -> Iterator[Path]:
    """Make a directory whose lock this process holds, and remove it with what it holds."""
    lock = directory = None
    try:
        while True:
            directory = place / f"{PREFIX}{secrets.token_hex(8)}"
            directory.mkdir(0o700)
            # A sweep may remove it, or hold its lock, before this process does: then another one is made.
            with suppress(FileNotFoundError):
                if lock := Lock.take(directory / LOCK):
                    break
        yield directory
    finally:  # also where a signal raises KeyboardInterrupt above
        if directory:
            _remove(directory)
        if lock:
            lock.release()


def _beside(source: Path) -> Path:
    return Path(os.path.realpath(source)).parent  # Path.resolve raises for a link to itself


def _place(source: Path, needed: int) -> Path:
    """Choose where a copy of so many bytes goes: `TMPDIR`, or beside the checkpoint; preferably not where files are in memory.

    Raises:
        CheckpointError: if neither has the space.
    """
    temporary = Path(tempfile.gettempdir())
    places = [temporary, *(place for place in [_beside(source)] if os.access(place, os.W_OK))]
    free = {place: shutil.disk_usage(place).free for place in places}
    fitting = sorted((place for place in places if needed <= free[place]), key=_is_in_memory)
    if not fitting:
        has = " and ".join(f"{place} ({size(free[place])} are free)" for place in free)
        raise CheckpointError(
            f"{source} is copied before it is measured, so that nobody changes it meanwhile, and there is no space for its "
            f"{size(needed)} in {has}; set TMPDIR to a directory with more space"
        )
    if _is_in_memory(fitting[0]):
        warnings.warn(
            f"{fitting[0]} is in memory, and so is the copy of each checkpoint while it is measured; to save that memory, set "
            "TMPDIR to a directory on a disk",
            stacklevel=1,
        )
    return fitting[0]


def _is_in_memory(place: Path) -> bool:
    """Return whether Linux keeps the files of a directory in memory."""
    device = place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except FileNotFoundError:  # another system
        return False
    described = (line.partition(" - ") for line in mounts)
    return any(
        mount.split()[2] == number and kind.split()[0] in IN_MEMORY for mount, _, kind in described
    )


def _copy(source: Path, read: list[Path], copy: Path, own_code: bool) -> str:
    """Copy what loading reads, and return its `files_digest`; link the rest of a directory, such as an optimizer's state.

    Raises:
        CheckpointError: if the copy can't be made, or files change meanwhile.
    """
    try:
        before = {file: files.identity(file) for file in read}
        copied = {file: copy / file.relative_to(source) for file in read}
        for file, its_copy in copied.items():
            its_copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, its_copy)
        hashes = {its_copy: files.hash_file(its_copy) for its_copy in copied.values()}
        for file, its_copy in copied.items():
            if files.identity(file) == before[file]:
                files.note_sha256(file, before[file], hashes[its_copy])
            # A hard link or other permissions change no content
            elif files.hash_file(file) != hashes[its_copy]:
                raise CheckpointError(
                    f"{file} was changed while it was copied, and this checkpoint is not measured: when nothing writes there any "
                    "more, run the same command again"
                )
        digest = files_digest(copy, own_code=own_code, hash_of=hashes.__getitem__)
        if source.is_dir():
            _link_others(source, copy)
        return digest
    except OSError as error:
        raise CheckpointError(
            f"{source} can't be copied to {copy.parents[1]} ({first_line(error)}); it is copied before it is measured, so that "
            "nobody changes it meanwhile: make it readable, or set TMPDIR to another directory"
        ) from error


def _link_others(source: Path, copy: Path) -> None:
    """Link what a directory has beside what was copied of it."""
    for entry in source.iterdir():
        its_copy = copy / entry.name
        if not its_copy.exists():
            its_copy.symlink_to(entry.absolute())
        elif its_copy.is_dir():
            _link_others(entry, its_copy)


def _read_by_loading(source: Path, own_code: bool) -> list[Path]:
    """List the files that loading reads: weights, configuration and tokenizer; no logs, and no state of an optimizer."""
    if source.is_file():
        return [source]
    texts = (
        file
        for file in source.iterdir()
        if file.name.endswith(CONFIGURATION) or file.name.startswith(TEXTS)
    )
    return list(
        dict.fromkeys(
            [*weight_files(source, own_code), *(file for file in texts if file.is_file())]
        )
    )
