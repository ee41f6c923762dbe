"""Files that several processes share: written whole, locked, and known by their content.

Locks are `flock`s. The kernel gives one back when its holder ends, however it ends, so a killed process leaves nothing to
clean up and no time-out decides that a slow one is dead; Linux carries them over NFS. On a file system that grants every
`flock` or none, the worst is work done twice: everything guarded here is written whole and replaces its equal.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without locks
# What `write_atomic` writes to before it renames it; an earlier form named no writer, and was not locked.
TEMPORARY = re.compile(r"\.(?P<name>.+?)(?P<writer>\.\d+-\d+-[0-9a-f]{16})?\.tmp")
ABANDONED = 24 * 3600.0  # seconds without a write after which a temporary file has no writer, where no lock says so


def cache_root() -> Path:
    """Where this package keeps what it can make again; `TRACKER_CACHE` moves it."""
    root = os.environ.get("TRACKER_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "block-coupling-tracker"


def write_atomic(file: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all: also if others write it at once, the disk is full or the process is killed.

    The last writer's content stays. What killed writers of the same file left behind is removed.
    """
    while not _written(file, content):
        pass
    remove_stale_temporaries(file.parent, file.name)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _written(file: Path, content: bytes | memoryview) -> bool:
    """Write a file under a name that no other writer uses, and rename it; False if somebody removed it meanwhile."""
    writer = f"{os.getpid()}-{threading.get_native_id()}-{secrets.token_hex(8)}"
    temporary = file.with_name(f".{file.name}.{writer}.tmp")
    try:
        with open(temporary, "xb") as handle:
            _flock(handle.fileno(), fcntl.LOCK_EX)  # until it is closed: it has a writer, and is not to be removed
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
            try:
                os.replace(temporary, file)
            except FileNotFoundError:
                if os.fstat(handle.fileno()).st_nlink:
                    raise
                return False  # between its creation and the lock, or because this file system's locks exclude nobody
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return True


def remove_stale_temporaries(directory: Path, name: str | None = None) -> None:
    """Remove what killed writers left in a directory, of the file `name` or of all; not what is being written."""
    for left in directory.glob(".*.tmp"):
        match = TEMPORARY.fullmatch(left.name)
        if match is None or name not in (None, match["name"]):
            continue
        with suppress(OSError):  # it has a writer or is gone, or we may not
            descriptor = os.open(left, os.O_RDWR)
            try:
                locked = _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (locked and match["writer"]) or time.time() - os.fstat(descriptor).st_mtime > ABANDONED:
                    left.unlink()
            finally:
                os.close(descriptor)


def _flock(descriptor: int, operation: int) -> bool:
    """Lock an open file; False on a file system without locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def differences(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Which of the settings that a directory was written with are others now, in words; "" where none is."""
    settings = json.loads(json.dumps(settings))  # as they would be read back
    names = sorted(name for name in settings.keys() | stored.keys() if settings.get(name) != stored.get(name))
    return "; ".join(f"{name} was {stored.get(name)!r}, now {settings.get(name)!r}" for name in names)


class Lock:
    """A lock on a file, from `take` or `wait` until `release` or the end of this process."""

    def __init__(self, file: Path, descriptor: int):
        self.file, self.descriptor = file, descriptor

    @classmethod
    def take(cls, file: Path, *, shared: bool = False) -> "Lock | None":
        """The lock on `file`, which is created where it is absent; None if another has it."""
        try:
            return cls._locked(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None

    @classmethod
    def wait(cls, file: Path, *, shared: bool = False) -> "Lock":
        """The lock on `file`, once no other has it."""
        return cls._locked(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    @classmethod
    def _locked(cls, file: Path, operation: int) -> "Lock":
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _flock(descriptor, operation)
            except BaseException:
                os.close(descriptor)
                raise
            # The last holder may have removed the file between our opening and locking it.
            if os.fstat(descriptor).st_nlink:
                return cls(file, descriptor)
            os.close(descriptor)

    def sign(self) -> None:
        """Say in the file who holds it."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode(), 0)

    def release(self, remove: bool = False) -> None:
        """Give the lock back, and remove the file if nothing else is kept in it."""
        if remove:
            self.file.unlink(missing_ok=True)
        os.close(self.descriptor)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def sha256(file: Path) -> str:
    """The SHA-256 of a file's content; remembered by path, size and time of change, so that it is read once."""
    status = file.stat()
    signature = [str(file.resolve()), status.st_size, status.st_mtime_ns]
    name = hashlib.sha256(signature[0].encode()).hexdigest()[:32]
    memory = cache_root() / "digests" / f"{name}.json"
    try:
        *known, digest = json.loads(memory.read_text())
        if known == signature:
            return digest
    except (OSError, ValueError, TypeError):
        pass  # not known, or not readable: read the file
    digest = hash_file(file)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memory, json.dumps([*signature, digest]).encode())
    except OSError:
        pass  # it is read again next time
    return digest


def hash_file(file: Path) -> str:
    """The SHA-256 of a file's content, read now."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
