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
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without locks


def cache_root() -> Path:
    """Where this package keeps what it can make again; `TRACKER_CACHE` moves it."""
    root = os.environ.get("TRACKER_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "block-coupling-tracker"


def write_whole(file: Path, content: bytes) -> None:
    """Write a file whole or not at all, also when the disk is full or the process killed."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


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
                fcntl.flock(descriptor, operation)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
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
        write_whole(memory, json.dumps([*signature, digest]).encode())
    except OSError:
        pass  # it is read again next time
    return digest


def hash_file(file: Path) -> str:
    """The SHA-256 of a file's content, read now."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
