"""Tests of atomic writes by many processes and threads: files are never partial, and no temporary file remains."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest

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
        write_atomic(Path(sys.argv[1]), letter * (500 * (1 + i % 40)))
    print("written\\n", end="", flush=True)  # in one piece, as two threads do it

for letter in sys.argv[2]:
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
write_atomic(Path(sys.argv[1]), b"new")
"""


def program(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def names(directory) -> list[str]:
    return sorted(os.listdir(directory))


def half_written(file) -> subprocess.Popen:
    """Return a process that has written its temporary file and not yet renamed it."""
    writer = program(HALF_WRITTEN, str(file))
    assert writer.stdout and writer.stdout.readline() == "half\n"
    return writer


def test_concurrent_writers_never_leave_a_partial_file(tmp_path):
    file = tmp_path / "file"
    write_atomic(file, b"x" * 500)
    writers = [program(WRITE, str(file), letters) for letters in ("ab", "cd", "ef", "gh")]
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


def test_other_files_are_kept(tmp_path):
    for name in (".old.tmp", "plain.tmp", ".hidden"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    remove_stale_temporaries(tmp_path)
    assert names(tmp_path) == [".hidden", ".old.tmp", "plain.tmp"]


@pytest.mark.parametrize(
    "failure", [partial(OSError, 28, "No space left on device"), KeyboardInterrupt, MemoryError]
)
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(
    tmp_path, monkeypatch, failure, moment
):
    file = tmp_path / "file"
    write_atomic(file, b"old")

    def fail(*_):
        raise failure()

    monkeypatch.setattr(files.os, moment, fail)
    with pytest.raises(type(failure())) as raised:
        write_atomic(file, b"new")
    monkeypatch.undo()
    assert not isinstance(raised.value, OSError) or raised.value.filename == str(file)
    assert names(tmp_path) == ["file"] and file.read_bytes() == b"old"


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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_only_a_directory_that_cannot_be_synced_at_all_is_left_unsynced(
    tmp_path, monkeypatch, number
):
    """SMB and vboxsf refuse it with EINVAL; EIO is a disk that fails."""
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", refuse)
    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError, match=str(tmp_path)):
        write_atomic(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize(
    "use",
    [Lock.take, Lock.wait, hash_file, lambda file: read_json(file, dict)],
    ids=["take", "wait", "hash", "json"],
)
def test_errors_of_an_open_file_name_it(tmp_path, monkeypatch, use):
    file = tmp_path / "file"
    file.write_bytes(b"{}")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    monkeypatch.setattr("hashlib.file_digest", fail)
    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*file'"):
        use(file)


def test_without_locks_only_old_temporary_files_are_removed(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(files.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    old, young = (tmp_path / f".file.1-1-{'0' * 15}{i}.tmp" for i in range(2))
    for file in (old, young):
        file.write_bytes(b"")
    os.utime(old, (time.time() - 90_000,) * 2)
    write_atomic(tmp_path / "file", b"whole")
    assert names(tmp_path) == [young.name, "file"]


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


def test_a_lock_that_cannot_be_signed_is_released(tmp_path, monkeypatch):
    lock = Lock.take(tmp_path / "lock")
    monkeypatch.setattr(os, "pwrite", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        lock.sign()
    assert not lock.held and not names(tmp_path)
