"""A disk budget for the hub's cache: record the files that this program downloads, and evict only those.

    CACHE_ROOT/fetched/CACHE/<commit>.json      the files of one revision that the hub's cache lacked before

The record of a revision is written before its download starts and contains the expected sizes. The budget bounds the sum
over all records, whichever process wrote them. A process that downloads or measures a revision holds a shared lock on it;
eviction needs the exclusive lock. A revision in use is therefore kept, and one of a killed process can be evicted.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from checkpoints.hub import File, Listing, read_ref, repo_dir
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock, cache_root, write_atomic

Files = dict[str, tuple[int, str | None]]  # size in bytes and SHA-256 of files, by path within the cache


def partial_file(blob: Path) -> Path:
    """Return the path of a blob while it is being downloaded."""
    return blob.with_name(f"{blob.name}.tracker.incomplete")


def missing_files(directory: Path, listing: Listing) -> list[File]:
    """List the needed files that are missing from a snapshot or have the wrong size."""
    paths = {file: directory / file.name for file in listing.needed}
    return [file for file, path in paths.items() if not path.is_file() or path.stat().st_size != file.size]


class DiskBudget:
    """A limit on the disk space of the files that this program has downloaded into a hub cache.

    Args:
        cache_dir: the cache. Default: the Hugging Face cache.
        budget: the limit in bytes. Default: no limit and no eviction.
    """

    def __init__(self, cache_dir: Path | None = None, budget: int | None = None):
        self.cache = repo_dir("any/any", cache_dir).parent
        self.budget = budget
        self.records = cache_root() / "fetched" / hashlib.sha256(str(self.cache.resolve()).encode()).hexdigest()[:16]

    def try_reserve(self, repo: str, listing: Listing, upcoming: Collection[str] = ()) -> Lock | None:
        """Reserve disk space for a revision, evicting others if necessary, and return a lock that keeps the revision.

        Return None if revisions in use leave too little space; try again later.

        Args:
            upcoming: commits that are still to be measured; these are evicted last.

        Raises:
            CheckpointError: if the revision alone exceeds the budget.
        """
        self.records.mkdir(parents=True, exist_ok=True)
        with self._exclusive():
            use = Lock.wait(self._lock(listing.commit), shared=True)
            files = self._to_fetch(repo, listing) | self._read(listing.commit)
            size = _bytes(files)
            if self.budget is not None and size > self.budget:
                use.release()
                raise CheckpointError(
                    f"its files take {_gigabytes(size)}, more than the whole --disk_budget of {_gigabytes(self.budget)}; "
                    "raise the budget"
                )
            if not self._free_space(size, listing.commit, upcoming):
                use.release()
                return None
            if files:
                write_atomic(self._record(listing.commit), json.dumps(files).encode())
            return use

    def used_bytes(self) -> int:
        """Return the size of all files that this program downloaded or started to download."""
        return sum(_bytes(self._read(commit)) for commit in self._commits())

    def _to_fetch(self, repo: str, listing: Listing) -> Files:
        """Return the files that the cache lacks; files that are present already are never evicted."""
        directory = repo_dir(repo, self.cache)
        files: Files = {}
        for file in listing.needed:
            pointer = directory / "snapshots" / listing.commit / file.name
            if not pointer.exists():
                has_blob = file.sha256 is not None and (directory / "blobs" / file.sha256).exists()
                files[str(pointer.relative_to(self.cache))] = (0 if has_blob else file.size, file.sha256)
        return files

    def _free_space(self, size: int, commit: str, upcoming: Collection[str]) -> bool:
        """Evict other revisions, oldest first, until `size` bytes fit; return False if they do not."""
        if self.budget is None:
            return True
        others = {other: _bytes(self._read(other)) for other in self._commits() if other != commit}
        used = sum(others.values())
        for other in sorted(others, key=lambda other: (other in upcoming, self._record(other).stat().st_mtime)):
            if used + size <= self.budget:
                break
            if self._evict(other):
                used -= others[other]
        return used + size <= self.budget

    def _evict(self, commit: str) -> bool:
        """Remove the downloaded files of a revision; return False if it is in use."""
        lock = Lock.take(self._lock(commit))
        if lock is None:
            return False
        shared = {sha for other in self._commits() if other != commit for _, sha in self._read(other).values()}
        for name, (_, sha) in self._read(commit).items():
            pointer = self.cache / name
            snapshot = next(parent for parent in pointer.parents if parent.name == commit)
            directory = snapshot.parent.parent
            blob = pointer.resolve() if pointer.is_symlink() else directory / "blobs" / sha if sha else pointer
            pointer.unlink(missing_ok=True)
            linked = {path.resolve() for path in (directory / "snapshots").rglob("*")}
            if blob.resolve() not in linked and sha not in shared - {None}:
                blob.unlink(missing_ok=True)
                partial_file(blob).unlink(missing_ok=True)
            if snapshot.is_dir() and not any(snapshot.iterdir()):
                _remove(snapshot)
        self._record(commit).unlink()
        lock.release(remove=True)
        return True

    def _exclusive(self) -> Lock:
        return Lock.wait(self.records / ".lock")

    def _lock(self, commit: str) -> Path:
        return self.records / f"{commit}.lock"

    def _record(self, commit: str) -> Path:
        return self.records / f"{commit}.json"

    def _commits(self) -> list[str]:
        return [record.stem for record in self.records.glob("*.json")]

    def _read(self, commit: str) -> Files:
        try:
            return {name: (size, sha) for name, (size, sha) in json.loads(self._record(commit).read_text()).items()}
        except FileNotFoundError:
            return {}


def _remove(snapshot: Path) -> None:
    """Remove an empty snapshot and the references to it."""
    snapshot.rmdir()
    for reference in list((snapshot.parent.parent / "refs").rglob("*")):
        if not reference.name.startswith(".") and read_ref(reference) == snapshot.name:  # dot files are being written
            reference.unlink(missing_ok=True)


def _bytes(files: Files) -> int:
    return sum(size for size, _ in files.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
