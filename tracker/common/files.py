"""Atomic writes, file locks and content hashes for files that several processes share.

Locks are `flock`s. The kernel releases a lock when its process ends for any reason, so a killed process leaves nothing to
clean up, and no time-out has to distinguish a slow process from a dead one. Linux supports them over NFS. On a file system
that grants every `flock` or none, the worst case is duplicated work: every file guarded by a lock is written atomically and
is replaced by an equal file.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

Content = TypeVar("Content", bound=dict[str, Any] | list[Any])

# A file system without locks
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)  # a file system that syncs no directories, such as SMB
# The temporary files of `write_atomic`
TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+-\d+-[0-9a-f]{16}\.tmp")
# Seconds without a write after which a temporary file is stale, where locks can't tell
ABANDONED = 24 * 3600.0


def cache_root() -> Path:
    """Return the directory of files that this package can recreate; the variable `TRACKER_CACHE` overrides it."""
    root = (
        os.environ.get("TRACKER_CACHE")
        or os.environ.get("XDG_CACHE_HOME")
        or Path.home() / ".cache"
    )
    return Path(root) / "block-coupling-tracker"


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name a file in the errors of a context that name none, as those of reading, writing and locking an open file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def write_atomic(file: Path, *parts: bytes | memoryview, aside: Path | None = None) -> None:
    """Write a file completely or not at all, even with concurrent writers, a full disk or a killed process.

    The content of the last writer wins. Temporary files that killed writers of the same file left behind are removed. Missing
    directories are made.

    Args:
        parts: the content, one after the other.
        aside: where the file that is replaced is kept.
    """
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True, exist_ok=True)
    while not _try_write(file, parts, aside):
        pass
    remove_stale_temporaries(file.parent, file.name)
    # The content is synced before it has its name; a crash of the machine might still lose the name.
    _sync_directory(file.parent)


def _sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk, where its file system can."""
    directory = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(directory)
    except OSError as error:
        if error.errno not in NOT_SYNCED:
            raise
    finally:
        os.close(directory)


def _try_write(file: Path, parts: Sequence[bytes | memoryview], aside: Path | None) -> bool:
    """Write under a name that no other writer uses, then rename; return False if another process removed the file."""
    writer = f"{os.getpid()}-{threading.get_native_id()}-{secrets.token_hex(8)}"
    temporary = file.with_name(f".{file.name}.{writer}.tmp")
    try:
        with open(temporary, "xb") as handle, naming(file):
            # Until it is closed: others must not remove a file being written
            _flock(handle.fileno(), fcntl.LOCK_EX)
            handle.writelines(parts)
            handle.flush()
            os.fsync(handle.fileno())
            if aside is not None:  # its successor is on the disk
                with suppress(FileNotFoundError):
                    os.replace(file, aside)
            try:
                os.replace(temporary, file)
            except FileNotFoundError:
                if os.fstat(handle.fileno()).st_nlink:
                    raise
                # Removed between creation and lock, or on a file system whose locks have no effect
                return False
    except BaseException:  # Ctrl-C leaves no temporary file either
        temporary.unlink(missing_ok=True)
        raise
    return True


def remove_stale_temporaries(directory: Path, name: str | None = None) -> None:
    """Remove the temporary files of killed writers from a directory, for the file `name` or all; keep those in use."""
    for temporary in directory.glob(".*.tmp"):
        # Files of other programs are not ours to remove.
        match = TEMPORARY.fullmatch(temporary.name)
        if match is None or name not in (None, match["name"]):
            continue
        with suppress(OSError):  # it is in use or gone, or we lack the permission
            descriptor = os.open(temporary, os.O_RDWR)
            try:
                locked = _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if locked or time.time() - os.fstat(descriptor).st_mtime > ABANDONED:
                    temporary.unlink()
            finally:
                os.close(descriptor)


def _flock(descriptor: int, operation: int) -> bool:
    """Lock an open file; return False on a file system without locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def read_json(file: Path, kind: type[Content], remedy: str = "remove it") -> Content:
    """Read a JSON file that holds a `kind` of value: a dictionary or a list.

    Args:
        remedy: what the message says to do about anything else.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is none.
        ValueError: if it holds something else, or is a directory or a pipe.
    """
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for ever
        raise ValueError(f"{file} is no file; {remedy}")
    with naming(file):
        stored = file.read_bytes()
    try:
        content = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}") from error
    if not isinstance(content, kind):
        raise ValueError(
            f"{file} is damaged: it holds a {type(content).__name__}, not a {kind.__name__}; {remedy}"
        )
    return content


def require_same_settings(
    directory: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Check that a directory is continued with the settings stored in it.

    Raises:
        ValueError: if some differ; the message names each.
    """
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the stored settings
    names = sorted(
        name for name in settings.keys() | stored.keys() if settings.get(name) != stored.get(name)
    )
    if changes := "; ".join(
        f"{name} was {stored.get(name)!r}, now {settings.get(name)!r}" for name in names
    ):
        raise ValueError(
            f"{directory} holds results of other settings ({changes}); results are never mixed: choose another directory, or "
            "the settings it was written with"
        )


class Lock:
    """A lock on a file, acquired by `take` or `wait` and kept until `release` or the end of this process; its forks have none."""

    def __init__(self, file: Path, descriptor: int):
        self.file, self.descriptor = file, descriptor
        _locks.add(self)

    @classmethod
    def take(cls, file: Path) -> "Lock | None":
        """Lock `file`, creating it if necessary; return None if another process holds the lock."""
        try:
            return cls._locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None

    @classmethod
    def wait(cls, file: Path, *, shared: bool = False) -> "Lock":
        """Lock `file`, creating it if necessary, as soon as no other process holds the lock."""
        return cls._locked(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    @classmethod
    def _locked(cls, file: Path, operation: int) -> "Lock":
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                with naming(file):
                    _flock(descriptor, operation)
            except BaseException:
                os.close(descriptor)
                raise
            lock = cls(file, descriptor)
            # The previous holder may have removed the file between our opening and our locking it.
            if lock.has_file:
                return lock
            lock.release()

    def sign(self) -> None:
        """Write into the file who holds the lock, and since when; release the lock if that fails."""
        holder = f"{socket.gethostname()}, process {os.getpid()}, {threading.current_thread().name}"
        try:
            with naming(self.file):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, f"{holder}, since {time.ctime()}".encode(), 0)
        except BaseException:
            self.release(remove=True)
            raise

    @staticmethod
    def holder(file: Path) -> str:
        """Return who holds the lock on a file; "" if nobody has signed it."""
        with suppress(FileNotFoundError):
            return file.read_text()
        return ""

    @property
    def held(self) -> bool:
        """Whether this process still has the lock."""
        return self in _locks

    @property
    def has_file(self) -> bool:
        """Whether the locked file is still there: its directory may have been removed, and made again."""
        return os.fstat(self.descriptor).st_nlink > 0

    def release(self, remove: bool = False) -> None:
        """Release the lock, if this process still has it; with `remove`, delete the file first."""
        if self.held:
            try:
                if remove and self.has_file:
                    self.file.unlink(missing_ok=True)
            finally:
                _locks.discard(self)
                os.close(self.descriptor)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()  # that this process holds


def _leave_to_parent() -> None:
    """Give up the locks of the parent process in its fork, which may outlive it, as workers that load data do."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)


def identity(file: Path) -> tuple[int, ...]:
    """Return what changes with a file's content, also if its size and modification time are set back."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content; one whose `identity` was noted with its hash is not read again."""
    # Before the file is read: one that changes meanwhile is noted with an identity that it no longer has.
    found = identity(file)
    with suppress(OSError, ValueError):  # not noted, or unreadable: hash the file
        path, *noted, digest = read_json(_note_of(file), list)
        if (path, tuple(noted)) == (str(file.resolve()), found):
            return digest
    digest = hash_file(file)
    note_sha256(file, found, digest)
    return digest


def note_sha256(file: Path, noted: tuple[int, ...], digest: str) -> None:
    """Keep the SHA-256 that a file had while its `identity` was this one."""
    note = _note_of(file)
    try:
        write_atomic(note, json.dumps([str(file.resolve()), *noted, digest]).encode())
    except OSError:
        pass  # a cache that can't be written: the file is hashed again next time


def _note_of(file: Path) -> Path:
    # A path itself may be too long for a name, and holds slashes.
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    return cache_root() / "digests" / f"{name}.json"


def hash_file(file: Path) -> str:
    """Read a file and return the SHA-256 of its content."""
    with open(file, "rb") as handle, naming(file):
        return hashlib.file_digest(handle, "sha256").hexdigest()


def visible(directory: Path) -> list[Path]:
    """List the files in a directory, below it and behind links, without hidden ones, such as copies that other walks make.

    A directory that several links lead to is listed once.
    """
    os.listdir(directory)  # raises what opening it raises
    found, listed, links = [], set(), [directory]
    for link in links:  # which grows
        for place, inside, names in os.walk(link):
            here = Path(place)
            inside[:] = [name for name in inside if not name.startswith(".")]
            if (real := here.resolve()) in listed:
                inside.clear()
                continue
            listed.add(real)
            links += filter(Path.is_symlink, map(here.joinpath, inside))
            found += [here / n for n in names if not n.startswith(".") and (here / n).is_file()]
    return sorted(found)
