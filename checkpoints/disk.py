"""A disk budget for the hub's cache: record the files that this program downloads, and evict only those.

    CACHE_ROOT/fetched/CACHE/<commit>.json      the files of one revision that the hub's cache lacked before

The record of a revision is written before its download starts and contains the expected sizes. The budget bounds the sum
over all records, whichever process wrote them. A process that downloads or measures a revision holds a shared lock on it;
eviction needs the exclusive lock. A revision in use is therefore kept, and one of a killed process can be evicted.

The hub's client can delete revisions too (`scan_cache_dir().delete_revisions`), but it deletes also files that others added to
a snapshot, and blobs that another process downloads and has not linked yet; and it deletes nothing of a repository with a
broken link or reference.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from checkpoints.hub import File, Listing, read_ref, repo_dir
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock, cache_root, read_json, write_atomic
from tracker.common.text import size

# Size in bytes and name of the blob of files, by path within the cache
Files = dict[str, tuple[int, str]]


def partial_file(blob: Path) -> Path:
    """Return the path of a blob while it is being downloaded."""
    return blob.with_name(f"{blob.name}.tracker.incomplete")


def missing_files(directory: Path, listing: Listing) -> list[File]:
    """List the needed files that are missing from a snapshot or have the wrong size."""
    paths = {file: directory / file.name for file in listing.needed}
    return [
        file
        for file, path in paths.items()
        if not path.is_file() or path.stat().st_size != file.size
    ]


class DiskBudget:
    """A limit on the disk space of the files that this program has downloaded into a hub cache.

    Args:
        cache_dir: the cache. Default: the Hugging Face cache.
        budget: the limit in bytes. Default: no limit and no eviction.
    """

    def __init__(self, cache_dir: Path | None = None, budget: int | None = None):
        self.cache = repo_dir("any/any", cache_dir).parent
        self.budget = budget
        self.records = (
            cache_root()
            / "fetched"
            / hashlib.sha256(str(self.cache.resolve()).encode()).hexdigest()[:16]
        )

    def try_reserve(
        self, repo: str, listing: Listing, upcoming: Collection[str] = ()
    ) -> Lock | None:
        """Reserve disk space for a revision, evicting others if necessary, and return a lock that keeps the revision.

        Return None if revisions in use leave too little space; try again later.

        Args:
            upcoming: commits that are still to be measured; these are evicted last.

        Raises:
            CheckpointError: if the revision alone exceeds the budget.
        """
        self.records.mkdir(parents=True, exist_ok=True)
        with Lock.wait(self.records / ".lock"):
            record = self.records / f"{listing.commit}.json"
            use = Lock.wait(record.with_suffix(".lock"), shared=True)
            files = self._to_fetch(repo, listing) | _read(record)
            needed = _bytes(files)
            if self.budget is not None and needed > self.budget:
                use.release()
                raise CheckpointError(
                    f"its files take {size(needed)}, more than the whole --disk_budget of {size(self.budget)}; raise "
                    "the budget"
                )
            if not self._free_space(needed, record, upcoming):
                use.release()
                return None
            if files:
                write_atomic(record, json.dumps(files).encode())
            return use

    def _to_fetch(self, repo: str, listing: Listing) -> Files:
        """Return the files that the cache lacks; files that are present already are never evicted."""
        directory = repo_dir(repo, self.cache)
        pointers = {
            directory / "snapshots" / listing.commit / file.name: file for file in listing.needed
        }
        return {
            str(pointer.relative_to(self.cache)): (
                0 if (directory / "blobs" / str(file.blob)).exists() else file.size,
                str(file.blob),
            )
            for pointer, file in pointers.items()
            if not pointer.exists()
        }

    def _free_space(self, needed: int, record: Path, upcoming: Collection[str]) -> bool:
        """Evict other revisions, oldest first, until `needed` bytes fit; return False if they do not."""
        if self.budget is None:
            return True
        others = {other: _read(other) for other in self.records.glob("*.json") if other != record}
        used = sum(map(_bytes, others.values()))
        for other in sorted(
            others, key=lambda other: (other.stem in upcoming, other.stat().st_mtime)
        ):
            if used + needed <= self.budget:
                break
            if self._evict(other):
                used -= _bytes(others[other])
        return used + needed <= self.budget

    def _evict(self, record: Path) -> bool:
        """Remove the downloaded files of a revision; return False if it is in use."""
        lock = Lock.take(record.with_suffix(".lock"))
        if lock is None:
            return False
        files = _read(record)
        for name in files:
            (self.cache / name).unlink(missing_ok=True)
        for repository in {self.cache / Path(name).parts[0] for name in files}:  # one
            kept = {path.resolve().name for path in (repository / "snapshots").rglob("*")}
            for other in set(self.records.glob("*.json")) - {record}:
                kept |= {blob for _, blob in _read(other).values()}
            for blob in {
                repository / "blobs" / blob for _, blob in files.values() if blob not in kept
            }:
                blob.unlink(missing_ok=True)
                partial_file(blob).unlink(missing_ok=True)
            snapshot = repository / "snapshots" / record.stem
            if snapshot.is_dir() and not any(snapshot.iterdir()):
                _remove(snapshot)
        record.unlink()
        lock.release(remove=True)
        return True


def _remove(snapshot: Path) -> None:
    """Remove an empty snapshot and the references to it."""
    snapshot.rmdir()
    for reference in list((snapshot.parent.parent / "refs").rglob("*")):
        # Dot files are being written
        if not reference.name.startswith(".") and read_ref(reference) == snapshot.name:
            reference.unlink(missing_ok=True)


def _read(record: Path) -> Files:
    try:
        kept = read_json(record, dict)
        return {name: (count, str(blob)) for name, (count, blob) in kept.items()}
    except FileNotFoundError:
        return {}


def _bytes(files: Files) -> int:
    return sum(count for count, _ in files.values())
