"""Download what is needed of a revision into the hub's cache, whatever the connection does.

Weight files come through a loop of our own, as blobs under their hash: since version 2 huggingface_hub drops what it has of
a file when a download ends early, and 10 GB shards have to be taken up where they stopped, also by another process. Their
SHA-256 is computed on the way. The rest, and the links between blobs and snapshots, is the client's work.
"""

import errno
import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from checkpoints.disk import missing_files, partial_file
from checkpoints.files import write_atomic
from checkpoints.hub import (
    TIMEOUT,
    CheckpointError,
    File,
    Listing,
    Notify,
    Unreachable,
    first_line,
    pause_or_raise,
    read_ref,
    repo_dir,
    with_retries,
)

BLOCK = 1 << 20  # bytes
Count = Callable[[int], None]  # takes bytes as they arrive, or that were there


def cached_snapshot(repo: str, revision: str, cache_dir: Path | None = None) -> Path:
    """The directory of a revision that must be in the cache.

    Raises:
        CheckpointError: if it is not.
    """
    directory = snapshot_dir(repo, revision, cache_dir)
    if not directory.is_dir():
        raise CheckpointError(
            f"{repo} at {revision} is not in the cache {repo_dir(repo, cache_dir).parent}; go online, or choose cached "
            "revisions"
        )
    return directory


def snapshot_dir(repo: str, revision: str, cache_dir: Path | None = None) -> Path:
    """Where the cache has a revision, or would have it if it is a commit; nothing is asked of the hub."""
    place = repo_dir(repo, cache_dir)
    return place / "snapshots" / (read_ref(place / "refs" / revision) or revision)


def fetch(
    repo: str,
    revision: str,
    listing: Listing,
    cache_dir: Path | None = None,
    *,
    offline: str = "",
    notify: Notify = print,
    count: Count = lambda _: None,
    stop: threading.Event | None = None,
) -> Path:
    """The directory with the needed files of a revision as it was listed, downloaded where the cache lacks them.

    Args:
        offline: why the hub can't be asked; then the cache must hold everything.
        count: told of bytes, as they arrive.
        stop: set from another thread, ends the download within a second or so of the next byte.

    Raises:
        CheckpointError: if a file can't be had, or is not what its hash says; the others, and what has come of it, are
            kept for the next time.
    """
    stop = stop or threading.Event()
    place = repo_dir(repo, cache_dir)
    directory = place / "snapshots" / listing.commit
    lacking = missing_files(directory, listing)
    if lacking and offline:
        names = ", ".join(file.name for file in lacking)
        raise CheckpointError(f"{offline}, and {repo} at {revision} lacks {names} in the cache {place.parent}")
    try:
        for file in lacking:
            if file.sha256 is None:
                _by_client(repo, listing.commit, file, cache_dir, notify, stop)
                count(file.size)
            else:
                blob = place / "blobs" / file.sha256
                if not blob.exists() or blob.stat().st_size != file.size:
                    _download(repo, listing.commit, file, blob, notify, count, stop)
                _by_client(repo, listing.commit, file, cache_dir, notify, stop)
        _refer(place / "refs" / revision, listing.commit, required=bool(lacking))
    except OSError as error:
        raise CheckpointError(_in_words(error, f"{repo} at {revision}", place.parent)) from error
    return directory


def _by_client(
    repo: str, commit: str, file: File, cache_dir: Path | None, notify: Notify, stop: threading.Event
) -> None:
    """Let huggingface_hub fetch a file, or link the snapshot to its blob where that is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, httpx

    disable_progress_bars()

    def ask() -> None:
        try:
            hf_hub_download(repo, file.name, revision=commit, cache_dir=cache_dir)
        except LocalEntryNotFoundError as error:  # what the client makes of a hub that does not answer
            if isinstance(error.__cause__, httpx.HTTPError):
                raise error.__cause__ from error
            raise

    with_retries(ask, f"{file.name} of {repo} at {commit[:8]}", notify, stop)


def _download(
    repo: str, commit: str, file: File, blob: Path, notify: Notify, count: Count, stop: threading.Event
) -> None:
    """Download a blob, going on from what an earlier attempt left, and check its hash."""
    from huggingface_hub.utils import WeakFileLock

    what = f"{file.name} of {repo} at {commit[:8]}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"  # the client's own
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists() and blob.stat().st_size == file.size:  # another process was quicker
            return
        for attempt in (1, 2):
            digest = _receive(repo, commit, file, partial_file(blob), what, notify, count, stop)
            if digest == file.sha256:
                partial_file(blob).replace(blob)
                return
            partial_file(blob).unlink()
            count(-file.size)
            if attempt == 1:
                notify(f"{what}: the content does not have the hash that the hub gives for it; fetching it anew")
        raise CheckpointError(
            f"{what} came twice with another content than its SHA-256 {file.sha256} says; the copy on the hub or the way to "
            "it is damaged"
        )


def _receive(
    repo: str, commit: str, file: File, target: Path, what: str, notify: Notify, count: Count, stop: threading.Event
) -> str:
    """Bring `target` to its full size; returns the SHA-256 of what it holds then."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, httpx

    url = hf_hub_url(repo, file.name, revision=commit)
    sha = hashlib.sha256()
    have = attempt = 0
    with open(target, "a+b") as handle:
        handle.seek(0)
        while block := handle.read(BLOCK):
            sha.update(block)
            have += len(block)
        if have:
            notify(f"{what}: going on after {have / 1e9:.3g} of {file.size / 1e9:.3g} GB")
        count(have)
        free = shutil.disk_usage(target.parent).free
        if file.size - have > free:
            raise OSError(
                errno.ENOSPC, f"{(file.size - have) / 1e9:.3g} GB are to come and {free / 1e9:.3g} GB are free"
            )
        while have < file.size:
            # Identity: a compressed answer has other byte positions.
            headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
            before = have
            try:
                with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
                    hf_raise_for_status(response)
                    if have and response.status_code != 206:  # the range was ignored: from the start
                        handle.truncate(0)
                        sha, have = hashlib.sha256(), _counted(count, -have)
                    for block in response.iter_bytes():  # as they arrive: nothing is lost with a connection
                        handle.write(block)
                        sha.update(block)
                        have += _counted(count, len(block))
                        if stop.is_set():
                            raise Unreachable(f"stopped while fetching {what}")
                if have < file.size:
                    raise httpx.RemoteProtocolError(f"the answer ended after {have:,} of {file.size:,} bytes")
            except httpx.HTTPError as error:
                handle.flush()
                attempt = 1 if have > before else attempt + 1
                pause_or_raise(error, attempt, what, notify, stop)
    return sha.hexdigest()


def _counted(count: Count, size: int) -> int:
    count(size)
    return max(size, 0)


def _refer(reference: Path, commit: str, required: bool) -> None:
    """Let the branch's name lead to the commit, so that offline walks find it."""
    if read_ref(reference) == commit:
        return
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(reference, commit.encode())
    except OSError:
        if required:
            raise


def _in_words(error: OSError, what: str, cache: Path) -> str:
    if getattr(getattr(error, "response", None), "status_code", None) == 404:
        return f"{what} is no longer on the hub as it was listed: the branch was changed meanwhile; run the same command again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{what} does not fit on the disk of {cache} ({first_line(error)}); free some, set HF_HUB_CACHE to a larger disk, "
            "or bound what is kept with --disk_budget"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what} is not in the cache {cache}, which can't be written to; set HF_HUB_CACHE to a directory of your own"
    return f"{what} can't be fetched ({type(error).__name__}: {first_line(error)})"
