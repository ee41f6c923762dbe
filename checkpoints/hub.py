"""Metadata from the hub: a repository's branches, and each branch's files with size and hash, before any download.

The listing of a commit never changes and is cached on disk. If the hub can't be reached, the local cache is used.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from checkpoints.retries import TIMEOUT, Notify, with_retries
from tracker.common.errors import CheckpointError, Unreachable
from tracker.common.files import cache_root, read_json, write_atomic

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

AT_ONCE = 8  # concurrent requests
# In the order of preference of transformers.
FORMATS = {
    "safetensors": r"model(?:-\d{5}-of-(?P<of>\d{5}))?\.safetensors",
    "bin": r"pytorch_model(?:-\d{5}-of-(?P<of>\d{5}))?\.bin",
}
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
TEXT = (".json", ".txt", ".model")
COMMIT, SHA256 = r"[0-9a-f]{40}", r"[0-9a-f]{64}"


@dataclass(frozen=True)
class File:
    """A file of a revision."""

    name: str
    size: int
    sha256: str | None = None  # None for small files, which the hub keeps in git
    git: str | None = None  # the hash of a small file; None if the cache alone lists it

    @property
    def blob(self) -> str | None:
        """The name of its content in the cache, the hub's ETag."""
        return self.sha256 or self.git


@dataclass(frozen=True)
class Listing:
    """The files of a revision at one commit."""

    commit: str
    files: tuple[File, ...]

    @property
    def formats(self) -> dict[str, tuple[File, ...]]:
        """The weight files by format, in the order of the shards."""
        return {
            name: files
            for name, pattern in FORMATS.items()
            if (files := _matching(self.files, pattern))
        }

    @property
    def format(self) -> str | None:
        """The format to download: the first without missing shards, else the first present."""
        complete = [name for name, files in self.formats.items() if not missing_shards(files)]
        return next(iter([*complete, *self.formats]), None)

    @property
    def weights(self) -> tuple[File, ...]:
        """The weight files to download, in one format."""
        return self.formats[self.format] if self.format else ()

    @property
    def needed(self) -> tuple[File, ...]:
        """All files to download: weights, configuration and tokenizer."""
        others = {index for name, index in INDEX.items() if name != self.format}
        text = [
            f
            for f in self.files
            if "/" not in f.name and f.name.endswith(TEXT) and f.name not in others
        ]
        return (*text, *self.weights)

    @property
    def bytes(self) -> int:
        """The total size of the files to download."""
        return sum(file.size for file in self.needed)


def _matching(files: Iterable[File], pattern: str) -> tuple[File, ...]:
    matches = {file: re.fullmatch(pattern, file.name) for file in files}
    weights = [file for file, match in matches.items() if match]
    # transformers prefers a single file to shards.
    single = [file for file in weights if (match := matches[file]) and match["of"] is None]
    return tuple(single or sorted(weights, key=lambda file: file.name))


def missing_shards(files: Iterable[File]) -> list[str]:
    """List the shards that are absent, from the number of shards in the names of the others."""
    names = {file.name for file in files}
    expected = set()
    for name in names:
        if match := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\..*)", name):
            expected |= {f"{match[1]}{i:05d}{match[2]}" for i in range(1, int(match[3]) + 1)}
    return sorted(expected - names)


def list_branches(repo: str, notify: Notify = print) -> tuple[dict[str, str], str]:
    """Get the commit of each branch of a repository from the hub, or from the cache if the hub can't be reached.

    Returns:
        The commits by branch, and why the hub could not be reached ("" if it was).

    Raises:
        CheckpointError: if the hub refuses access, or can't be reached and nothing is cached.
    """
    from huggingface_hub import HfApi

    try:
        references = with_retries(
            lambda: HfApi().list_repo_refs(repo), f"the branches of {repo}", notify
        )
        branches = {str(branch.name): str(branch.target_commit) for branch in references.branches}
        for name in [name for name in branches if not _is_reference(name)]:
            notify(
                f"{repo}: the hub lists a branch {name!r}, which git does not allow; it is left out"
            )
            del branches[name]
        return branches, ""
    except Unreachable as error:
        if cached := cached_branches(repo):
            return cached, str(error)
        raise Unreachable(f"{error}, and nothing of {repo} is in the cache") from error


def cached_branches(repo: str) -> dict[str, str]:
    """Return the commit of each branch of a repository that the cache knows."""
    directory = repo_dir(repo) / "refs"
    # Dot files are being written
    files = (file for file in directory.rglob("*") if not file.name.startswith("."))
    return {
        str(file.relative_to(directory)): commit for file in files if (commit := read_ref(file))
    }


def list_revisions(
    repo: str,
    commits: Mapping[str, str],
    cache_dir: Path | None = None,
    offline: bool = False,
    notify: Notify = print,
) -> tuple[dict[str, Listing], dict[str, CheckpointError]]:
    """List the files of each revision.

    Args:
        commits: the commit of each revision, from `list_branches`, so that listing and download refer to the same commit.
        offline: use cached listings and snapshots only; revisions without either are left out.

    Returns:
        The listings, and why others can't be got, both by revision. Revisions that do not exist are in neither.
    """
    cached = {revision: _cached_listing(repo, commit) for revision, commit in commits.items()}
    listings = {revision: listing for revision, listing in cached.items() if listing is not None}
    unknown = {revision: commit for revision, commit in commits.items() if revision not in listings}
    if offline:
        snapshots = {
            revision: _list_snapshot(repo, commit, cache_dir)
            for revision, commit in unknown.items()
        }
        return listings | {
            revision: listing for revision, listing in snapshots.items() if listing is not None
        }, {}
    if len(unknown) > AT_ONCE:
        notify(f"{repo}: requesting the file lists of {len(unknown)} revisions")
    faults: dict[str, CheckpointError] = {}
    failed_in_a_row, stop = 0, threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        requests = {
            pool.submit(_request_listing, repo, unknown[r], notify, stop): r for r in unknown
        }
        for request in as_completed(requests):
            try:
                listing = request.result()
            except CheckpointError as error:
                faults[requests[request]] = error
                failed_in_a_row += 1
                if failed_in_a_row >= AT_ONCE:  # the others are not asked for
                    stop.set()
                continue
            failed_in_a_row = 0
            if listing is not None:
                listings[requests[request]] = listing
    return listings, faults


def _request_listing(
    repo: str, commit: str, notify: Notify, stop: threading.Event
) -> Listing | None:
    """Request the listing of a commit; return None if the hub does not have it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    def ask() -> Listing | None:
        try:
            info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT)
        except RevisionNotFoundError:
            return None
        if info.sha != commit:
            raise ValueError(f"it is about the commit {info.sha!r}")
        return Listing(commit, tuple(_file(sibling) for sibling in info.siblings or []))

    subject = f"the files of {repo} at {commit[:8]}"
    if not _is(COMMIT, commit):
        raise CheckpointError(
            f"the hub states {commit!r} as the commit of a branch of {repo}; leave its step out"
        )
    if stop.is_set():
        raise Unreachable(
            f"can't get {subject}: the hub was not asked, since it failed to list those before it"
        )
    listing = with_retries(ask, subject, notify)
    if listing is None:
        return None
    # A cache that can't be written to: the listing is requested again next time
    with suppress(OSError):
        write_atomic(
            _listing_file(repo, commit),
            json.dumps([asdict(file) for file in listing.files]).encode(),
        )
    return listing


def _file(sibling: "RepoSibling") -> File:
    """Check a file's entry in a listing.

    Raises:
        ValueError: for a name, size or hash that can't be one.
    """
    name = sibling.rfilename
    size = sibling.size or 0
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    if not isinstance(name, str) or not _is_path(name) or type(size) is not int or size < 0:
        raise ValueError(f"it lists {name!r} with size {size!r}")
    if sha256 is not None and not _is(SHA256, sha256):
        raise ValueError(f"it lists {name!r} with SHA-256 {sha256!r}")
    if sha256 is None and not _is(COMMIT, sibling.blob_id):
        raise ValueError(f"it lists {name!r} without a hash")
    return File(name, size, sha256, None if sha256 else sibling.blob_id)


def _is_path(name: str) -> bool:
    """Whether a file of this name can be below a directory."""
    return name.isprintable() and not any(
        part in ("", ".", "..") or len(part.encode()) > 255 for part in name.split("/")
    )


def _is_reference(name: str) -> bool:
    """Whether git allows the name of a branch, so that it can be a path within the cache."""
    return (
        name.isprintable() and re.search(r"\.\.|//|^/|[\s~^:?*\[\\]", name) is None and bool(name)
    )


def _is(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _cached_listing(repo: str, commit: str) -> Listing | None:
    try:
        files = tuple(File(**file) for file in read_json(_listing_file(repo, commit), list))
    except (OSError, ValueError, TypeError):
        return None
    return Listing(commit, files) if all(file.blob for file in files) else None


def _listing_file(repo: str, commit: str) -> Path:
    return cache_root() / "listings" / repo.replace("/", "--") / f"{commit}.json"


def _list_snapshot(repo: str, commit: str, cache_dir: Path | None) -> Listing | None:
    """List the files of a snapshot in the cache; the name of a blob is its hash."""
    snapshot = repo_dir(repo, cache_dir) / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    files = []
    for file in sorted(path for path in snapshot.rglob("*") if path.is_file()):
        blob = file.resolve().name
        files.append(
            File(
                str(file.relative_to(snapshot)),
                file.stat().st_size,
                blob if _is(SHA256, blob) else None,
            )
        )
    return Listing(commit, tuple(files))


def repo_dir(repo: str, cache_dir: Path | None = None) -> Path:
    """Return the directory of a repository in the hub's cache."""
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def describe_cache(path: Path, flag: str) -> str:
    """Describe that a path is, holds or lies in a cache of the hub's client, and what to run instead; "" if it does not.

    Args:
        flag: the flag that was given the path, which takes a repository too.
    """
    inside = path.parent if path.name in ("snapshots", "refs", "blobs") else path
    directories = [inside, *sorted(path.glob("models--*")), *sorted(path.glob("hub/models--*"))]
    repositories = [
        one
        for one in directories
        if re.fullmatch("models--.+--.+", one.name) and (one / "snapshots").is_dir()
    ]
    if not repositories:
        return ""
    cache = quote(str(repositories[0].parent))
    names = [
        repository.name.removeprefix("models--").replace("--", "/", 1)
        for repository in repositories
    ]
    return (
        f"{path} belongs to a cache of the hub, which has {', '.join(names)}: set HF_HUB_CACHE and give the name of a "
        f"repository, HF_HUB_CACHE={cache} python -m tracker.pythia {flag} {quote(names[0])}"
    )


def read_ref(reference: Path) -> str:
    """Read the commit from a file under the cache's `refs`; return "" if another process has removed the file."""
    try:
        return reference.read_text().strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return ""
