"""Tests of atomic writes by many processes and threads: files are never partial, and no temporary file remains."""

import errno
import os
import re
import signal
import threading
import time
from functools import partial

import pytest

from tests.support import processes
from tests.support.failing_files import FAILING, FULL, Failure, failures, numbered, unreadable
from tracker.common import files
from tracker.common.files import Lock, hash_file, read_json, remove_stale_temporaries, write_atomic

WRITE = """
import sys, threading
from itertools import count
from pathlib import Path
from tracker.common.files import write_atomic

stop = threading.Event()

def work(letter):
    for i in count():
        if i >= 60 and stop.is_set():
            break
        write_atomic(Path(sys.argv[2]), letter * (500 * (1 + i % 40)))
    print("written\\n", end="", flush=True)  # in one piece, as two threads do it

for letter in sys.argv[3]:
    threading.Thread(target=work, args=(letter.encode(),)).start()
sys.stdin.read()
stop.set()
"""
HALF_WRITTEN = """
import os, sys
from pathlib import Path
from tracker.common.files import write_atomic

def wait(descriptor):
    print("half", flush=True)
    sys.stdin.read()  # until it is killed

os.fsync = wait
write_atomic(Path(sys.argv[2]), b"new")
"""


program = partial(processes.start, "tests.support.statements")


def names(directory) -> list[str]:
    return sorted(os.listdir(directory))


def half_written(file):
    """Return a process that has written its temporary file and not yet renamed it."""
    writer = program(HALF_WRITTEN, file)
    assert writer.stdout.readline() == "half\n"
    return writer


def test_concurrent_writers_never_leave_a_partial_file(tmp_path):
    file = tmp_path / "file"
    write_atomic(file, b"x" * 500)
    writers = [program(WRITE, file, letters) for letters in ("ab", "cd", "ef", "gh")]
    torn, deadline = [], time.monotonic() + 300

    def read():
        """Read while all are writing: until there was something of each."""
        letters, reads = set(), 0
        while (reads < 200 or not letters >= set(b"abcdefgh")) and time.monotonic() < deadline:
            content = file.read_bytes()
            letters, reads = letters | set(content), reads + 1
            if len(set(content)) != 1 or len(content) % 500:
                torn.append(content)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    in_time = time.monotonic() < deadline
    outputs = [writer.communicate(timeout=300)[0] for writer in writers]
    assert outputs == ["written\nwritten\n"] * 4 and not torn and in_time
    assert names(tmp_path) == ["file"] and file.read_text()[0] in "abcdefgh"


def test_next_writer_removes_temporary_files_of_killed_writers_only(tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    killed, alive, elsewhere = half_written(file), half_written(file), half_written(other)
    killed.kill()
    killed.wait()
    assert len(names(tmp_path)) == 3
    write_atomic(file, b"whole")
    assert [re.sub(r"\d+-\d+-.*\.", "WRITER.", name) for name in names(tmp_path)] == [
        ".file.WRITER.tmp", ".other.WRITER.tmp", "file"
    ]  # fmt: skip
    os.utime(next(tmp_path.glob(".file*")), (0, 0))  # a live writer's file is kept at any age
    remove_stale_temporaries(tmp_path)
    assert len(names(tmp_path)) == 3
    for writer in (alive, elsewhere):
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    remove_stale_temporaries(tmp_path)
    assert names(tmp_path) == ["file"] and file.read_bytes() == b"whole"


# An error of the system or of Python, and the operations whose failure leaves the file written all the same.
WRITTEN = {
    "full disk": (FULL, []),
    "damaged disk": (FAILING, []),
    # Of a file system without locks; SMB and vboxsf refuse so to sync a directory
    "invalid": (numbered(errno.EINVAL), ["fcntl.flock", "os.fsync"]),
    "no locks": (numbered(errno.ENOLCK), ["fcntl.flock"]),
    "Ctrl-C": (KeyboardInterrupt, []),
    "memory": (MemoryError, []),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_write_that_fails_at_any_operation_leaves_the_old_content_or_the_new(tmp_path, case):
    file, (error, tolerated) = tmp_path / "file", WRITTEN[case]
    file.write_bytes(b"old")
    without_error, renamed = [], False
    for operation, raised in failures(lambda: write_atomic(file, b"new"), tmp_path, error):
        renamed |= file.read_bytes() == b"new"
        assert file.read_bytes() == (b"new" if renamed or raised is None else b"old")
        assert names(tmp_path) == ["file"]
        if raised is None:
            without_error.append(operation)
            renamed = False
        elif isinstance(raised, OSError):
            assert str(tmp_path) in str(raised)
        file.write_bytes(b"old")
    assert without_error == tolerated


def test_removed_temporary_file_is_written_again(tmp_path, monkeypatch):
    """Imitate a file system on which locks have no effect."""
    fsync, removed = os.fsync, []

    def remove_once(descriptor):
        if not removed:
            removed.extend(tmp_path.glob(".file.*"))
            removed[0].unlink()
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", remove_once)
    write_atomic(tmp_path / "file", b"whole")
    assert removed and names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize(
    "read", [hash_file, lambda file: read_json(file, dict)], ids=["hash", "json"]
)
def test_an_error_of_reading_names_the_file(tmp_path, read):
    with pytest.raises(OSError, match=r"Input/output error: '.*file'"):
        read(unreadable(tmp_path / "file"))


@pytest.mark.parametrize("take", [Lock.take, Lock.wait])
def test_a_lock_that_fails_at_any_operation_names_its_file_and_is_free(tmp_path, take):
    file, opened = tmp_path / "lock", len(os.listdir("/proc/self/fd"))

    def sign():
        lock = take(file)
        lock.sign()
        lock.release(remove=True)

    for operation, raised in failures(sign, tmp_path, FAILING):
        assert f"Input/output error: '{file}'" in str(raised)
        assert len(os.listdir("/proc/self/fd")) == opened
        assert operation != "os.truncate" or not file.exists()


def test_without_locks_only_old_temporary_files_are_removed(tmp_path):
    """And no other files, however old they are."""
    old, young = (f".file.1-1-{'0' * 15}{i}.tmp" for i in range(2))
    others = [".hidden", ".old.tmp", "plain.tmp"]
    for name in (old, young, *others):
        (tmp_path / name).touch()
        if name != young:
            os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    with Failure(tmp_path, numbered(errno.ENOLCK), only=["fcntl.flock"]):
        write_atomic(tmp_path / "file", b"whole")
        remove_stale_temporaries(tmp_path)
    assert names(tmp_path) == sorted([young, "file", *others])


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_written_file_respects_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def test_files_behind_links_are_listed_once_in_directories_that_link_to_each_other(tmp_path):
    places = [tmp_path / f"d{i}" for i in range(12)]
    for place in places:
        place.mkdir()
        (place / "file").touch()
    for place in places:
        for other in places:
            (place / f"to {other.name}").symlink_to(other)
    assert files.visible(tmp_path) == sorted(place / "file" for place in places)
