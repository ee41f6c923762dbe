"""Download the needed files of a revision into the hub's cache, resuming after interruptions.

Files are downloaded by our own loop, as blobs named by their hash. Since version 2, huggingface_hub discards a partial file
when a download ends early, but a 10 GB shard has to resume where it stopped, also in another process; and it sleeps as long as
the hub asks, without a limit. The hash is computed while a file arrives, and the snapshot links to the blob of the listed hash,
whatever the hub says later.
"""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from checkpoints.disk import missing_files, partial_file
from checkpoints.hub import File, Listing, read_ref, repo_dir
from checkpoints.retries import TIMEOUT, Attempts, Notify, unexpected
from tracker.common.errors import NO_SPACE, NOT_ALLOWED, CheckpointError, Unreachable
from tracker.common.files import write_atomic
from tracker.common.text import first_line, size

BLOCK = 1 << 20  # bytes
# Bytes a second, over so many seconds, below which a download has stalled
SLOWEST, WINDOW = 1000, 60.0
# Receives the number of bytes that arrived or were found on disk; negative: discarded
Count = Callable[[int], None]


def cached_snapshot(repo: str, revision: str, cache_dir: Path | None = None) -> Path:
    """Return the directory of a cached revision.

    Raises:
        CheckpointError: if the revision is not in the cache.
    """
    directory = snapshot_dir(repo, revision, cache_dir)
    if not directory.is_dir():
        raise CheckpointError(
            f"{repo} at {revision} is not in the cache {repo_dir(repo, cache_dir).parent}; go online, or choose cached "
            "revisions"
        )
    return directory


def snapshot_dir(repo: str, revision: str, cache_dir: Path | None) -> Path:
    """Return the directory in the cache for a revision (a branch in the cache, or a commit) without asking the hub."""
    directory = repo_dir(repo, cache_dir)
    return directory / "snapshots" / (read_ref(directory / "refs" / revision) or revision)


def fetch(
    repo: str,
    revision: str,
    listing: Listing,
    cache_dir: Path | None = None,
    *,
    notify: Notify = print,
    count: Count = lambda _: None,
    stop: threading.Event | None = None,
) -> Path:
    """Download the needed files of a listed revision that the cache lacks, and return the snapshot's directory.

    Args:
        count: called with the number of bytes as they arrive.
        stop: an event that another thread sets to end the download at the next chunk.

    Raises:
        CheckpointError: if a file can't be downloaded or does not match its hash. Complete files and the partial file
            are kept for the next attempt.
    """
    repo_cache = repo_dir(repo, cache_dir)
    directory = repo_cache / "snapshots" / listing.commit
    missing = missing_files(directory, listing)
    try:
        for file in missing:
            blob = repo_cache / "blobs" / str(file.blob)
            if not blob.exists() or blob.stat().st_size != file.size:
                attempts = Attempts(f"{file.name} of {repo} at {revision}", notify, stop)
                _download(repo, listing.commit, file, blob, attempts, count)
            _link(directory / file.name, blob)
        # By which offline walks find the commit of the branch
        reference = repo_cache / "refs" / revision
        if read_ref(reference) != listing.commit:
            # A cache that can't be written to may lack nothing
            with nullcontext() if missing else suppress(OSError):
                write_atomic(reference, listing.commit.encode())
    except OSError as error:
        raise CheckpointError(
            _describe_error(error, f"{repo} at {revision}", repo_cache.parent)
        ) from error
    return directory


def remove_damaged(repo: str, listing: Listing, cache_dir: Path | None) -> list[str]:
    """Remove the files of a cached revision whose content does not match the listed hash; return their names."""
    snapshot = snapshot_dir(repo, listing.commit, cache_dir)
    damaged = []
    # What can't be read or removed stays, and with it the error that led here.
    with suppress(OSError):
        for file in listing.needed:
            pointer = snapshot / file.name
            with pointer.open("rb") as handle:
                sha = hashlib.file_digest(handle, partial(_new_hash, file))
            if sha.hexdigest() != file.blob:
                pointer.unlink()
                (snapshot.parents[1] / "blobs" / str(file.blob)).unlink(missing_ok=True)
                damaged.append(file.name)
    return damaged


def _link(pointer: Path, blob: Path) -> None:
    """Make a file of a snapshot a link to its blob, as the hub's client does, or a copy where links are not supported."""
    # Another process has made it
    if pointer.is_file() and pointer.stat().st_size == blob.stat().st_size:
        return
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:  # another process has made it meanwhile
        pass
    except OSError:
        temporary = partial_file(pointer)
        shutil.copyfile(blob, temporary)
        temporary.replace(pointer)


def _download(
    repo: str, commit: str, file: File, blob: Path, attempts: Attempts, count: Count
) -> None:
    """Download a blob, resuming an earlier attempt, and verify its hash."""
    from huggingface_hub.utils import WeakFileLock

    blob.parent.mkdir(parents=True, exist_ok=True)
    # The one that the client uses
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists() and blob.stat().st_size == file.size:  # another process has downloaded it
            return
        for attempt in (1, 2):
            digest = _receive(repo, commit, file, partial_file(blob), attempts, count)
            if digest == blob.name:
                partial_file(blob).replace(blob)
                return
            partial_file(blob).unlink()
            count(-file.size)
            if attempt == 1:
                attempts.notify(
                    f"{attempts.subject}: the content does not match the hash that the hub lists; downloading it again"
                )
        raise CheckpointError(
            f"{attempts.subject} was downloaded twice and does not match its {'SHA-256' if file.sha256 else 'git hash'} "
            f"{blob.name}; the copy on the hub or the connection is damaged: try again later, or leave this revision out"
        )


def _receive(
    repo: str, commit: str, file: File, target: Path, attempts: Attempts, count: Count
) -> str:
    """Download the rest of a file to `target` and return the hash of its whole content."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, httpx

    url = hf_hub_url(repo, file.name, revision=commit)
    with open(target, "a+b") as handle:
        handle.seek(0)
        sha = hashlib.file_digest(handle, partial(_new_hash, file))
        have = handle.tell()
        if have:
            attempts.notify(f"{attempts.subject}: resuming after {size(have)} of {size(file.size)}")
        count(have)
        free = shutil.disk_usage(target.parent).free
        if file.size - have > free:
            raise OSError(
                errno.ENOSPC,
                f"{size(file.size - have)} are needed and {size(free)} are free",
            )
        furthest = have
        while have < file.size:
            # Identity: byte positions in a compressed response would differ.
            headers = build_hf_headers() | {
                "Accept-Encoding": "identity",
                "Range": f"bytes={have}-",
            }
            try:
                with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
                    hf_raise_for_status(response)
                    if response.status_code not in (200, 206):
                        raise unexpected(
                            attempts.subject,
                            f"answers {response.status_code} {response.reason_phrase}",
                        )
                    # The server ignored the range: start over
                    if have and response.status_code != 206:
                        handle.truncate(0)
                        count(-have)
                        sha, have = _new_hash(file), 0
                    since, had = time.monotonic(), have
                    # Unbuffered: a dropped connection loses nothing
                    for block in response.iter_bytes():
                        if (passed := time.monotonic() - since) > WINDOW:
                            if have - had < SLOWEST * passed:
                                raise httpx.ReadTimeout(f"{have - had:,} bytes in {passed:.0f} s")
                            since, had = time.monotonic(), have
                        handle.write(block)
                        sha.update(block)
                        count(len(block))
                        have += len(block)
                        if attempts.stop.is_set():
                            raise Unreachable(f"stopped while fetching {attempts.subject}")
                        if have > file.size:  # it would not match the hash, and might never end
                            break
                if have < file.size:
                    raise httpx.RemoteProtocolError(
                        f"the response ended after {have:,} of {file.size:,} bytes"
                    )
            except httpx.HTTPError as error:
                handle.flush()
                if have - furthest >= BLOCK:  # a few bytes for each attempt are no progress
                    attempts.restart()
                    furthest = have
                attempts.wait_or_raise(error)
    return sha.hexdigest()


def _new_hash(file: File) -> "hashlib._Hash":
    """Start the hash that names a file's blob: SHA-256 in LFS, that of git for small files."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


def _describe_error(error: OSError, subject: str, cache: Path) -> str:
    if error.errno in NO_SPACE:
        return (
            f"{subject} does not fit on the disk of {cache} ({first_line(error)}); free some space, set HF_HUB_CACHE to a larger "
            "disk, or limit the cache with --disk_budget"
        )
    if error.errno in NOT_ALLOWED:
        return f"{subject} is not in the cache {cache}, which can't be written to; set HF_HUB_CACHE to a directory of your own"
    return f"{subject} can't be downloaded ({type(error).__name__}: {first_line(error)})"
