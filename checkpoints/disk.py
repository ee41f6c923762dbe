"""What this program has put into the hub's cache, so that it can take that out again, and only that.

    CACHE_ROOT/fetched/CACHE/<commit>.json      the files of one revision that were not in the hub's cache before

A record is written before the download begins, with the sizes that are to come: the sum over records is what the disk
budget bounds, whichever process wrote them. Whoever fetches or measures a revision holds a shared lock on it; eviction
takes that lock alone. So a revision in use stays, and one that a killed process left behind can go.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from checkpoints.files import Lock, cache_root, write_atomic
from checkpoints.hub import CheckpointError, File, Listing, read_ref, repo_dir

Files = dict[str, tuple[int, str | None]]  # bytes and SHA-256 of files, by their place in the cache


def partial_file(blob: Path) -> Path:
    """Where a blob is while it is being downloaded."""
    return blob.with_name(f"{blob.name}.tracker.incomplete")


def missing_files(directory: Path, listing: Listing) -> list[File]:
    """The needed files that a snapshot lacks, or holds cut short."""
    paths = {file: directory / file.name for file in listing.needed}
    return [file for file, path in paths.items() if not path.is_file() or path.stat().st_size != file.size]


class DiskBudget:
    """Our share of a hub cache: what this program has fetched.

    Args:
        cache_dir: the cache; None: the Hugging Face cache.
        budget: of its size, in bytes; None: no limit, and nothing is evicted.
    """

    def __init__(self, cache_dir: Path | None = None, budget: int | None = None):
        self.cache = repo_dir("any/any", cache_dir).parent
        self.budget = budget
        self.records = cache_root() / "fetched" / hashlib.sha256(str(self.cache.resolve()).encode()).hexdigest()[:16]

    def try_reserve(self, repo: str, listing: Listing, upcoming: Collection[str] = ()) -> Lock | None:
        """Make room for a revision and hold it until the lock is released; None while others in use leave no room.

        Args:
            upcoming: commits that are still to be measured: they are evicted last.

        Raises:
            CheckpointError: if the revision alone exceeds the budget.
        """
        self.records.mkdir(parents=True, exist_ok=True)
        with self._alone():
            use = Lock.wait(self._lock(listing.commit), shared=True)
            files = self._to_fetch(repo, listing) | self._read(listing.commit)
            size = _bytes(files)
            if self.budget is not None and size > self.budget:
                use.release()
                raise CheckpointError(
                    f"its files take {_gigabytes(size)}, more than the whole --disk_budget of {_gigabytes(self.budget)}"
                )
            if not self._make_room(size, listing.commit, upcoming):
                use.release()
                return None
            if files:
                write_atomic(self._record(listing.commit), json.dumps(files).encode())
            return use

    def used_bytes(self) -> int:
        """Bytes of what this program fetched or has begun to fetch."""
        return sum(_bytes(self._read(commit)) for commit in self._commits())

    def _to_fetch(self, repo: str, listing: Listing) -> Files:
        """The files that the cache lacks; what is there already is not ours."""
        place = repo_dir(repo, self.cache)
        files: Files = {}
        for file in listing.needed:
            pointer = place / "snapshots" / listing.commit / file.name
            if not pointer.exists():
                there = file.sha256 is not None and (place / "blobs" / file.sha256).exists()
                files[str(pointer.relative_to(self.cache))] = (0 if there else file.size, file.sha256)
        return files

    def _make_room(self, size: int, commit: str, upcoming: Collection[str]) -> bool:
        if self.budget is None:
            return True
        others = {other: _bytes(self._read(other)) for other in self._commits() if other != commit}
        held = sum(others.values())
        for other in sorted(others, key=lambda other: (other in upcoming, self._record(other).stat().st_mtime)):
            if held + size <= self.budget:
                break
            if self._evict(other):
                held -= others[other]
        return held + size <= self.budget

    def _evict(self, commit: str) -> bool:
        """Remove what was fetched of a revision; False if it is in use."""
        lock = Lock.take(self._lock(commit))
        if lock is None:
            return False
        elsewhere = {sha for other in self._commits() if other != commit for _, sha in self._read(other).values()}
        for name, (_, sha) in self._read(commit).items():
            pointer = self.cache / name
            snapshot = next(parent for parent in pointer.parents if parent.name == commit)
            place = snapshot.parent.parent
            blob = pointer.resolve() if pointer.is_symlink() else place / "blobs" / sha if sha else pointer
            pointer.unlink(missing_ok=True)
            linked = {path.resolve() for path in (place / "snapshots").rglob("*")}
            if blob.resolve() not in linked and sha not in elsewhere - {None}:
                blob.unlink(missing_ok=True)
                partial_file(blob).unlink(missing_ok=True)
            if snapshot.is_dir() and not any(snapshot.iterdir()):
                _remove(snapshot)
        self._record(commit).unlink()
        lock.release(remove=True)
        return True

    def _alone(self) -> Lock:
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
    """Remove an empty snapshot, and the references to it."""
    snapshot.rmdir()
    for reference in list((snapshot.parent.parent / "refs").rglob("*")):
        if not reference.name.startswith(".") and read_ref(reference) == snapshot.name:  # else it is being written
            reference.unlink(missing_ok=True)


def _bytes(files: Files) -> int:
    return sum(size for size, _ in files.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
