"""Metadata from the hub: a repository's branches, and each branch's files with size and hash, before any download.

The listing of a commit never changes and is cached on disk. After 429, 5xx, time-outs and dropped connections a request is
retried a bounded number of times, with a message for each retry. If the hub can't be reached, the local cache is used.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from checkpoints.files import cache_root, write_atomic

ATTEMPTS, ATTEMPTS_TO_CONNECT = 6, 3
LONGEST_WAIT = 60.0  # seconds between retries, unless the hub asks for more
TIMEOUT = 30.0  # seconds without a response or a byte
AT_ONCE = 8  # concurrent requests
BUSY = (408, 429, 500, 502, 503, 504)
# In the order of preference of transformers.
FORMATS = {
    "safetensors": r"model(?:-\d{5}-of-(?P<of>\d{5}))?\.safetensors",
    "bin": r"pytorch_model(?:-\d{5}-of-(?P<of>\d{5}))?\.bin",
}
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
TEXT = (".json", ".txt", ".model")
CODE = ".py"

T = TypeVar("T")
Notify = Callable[[str], None]


class CheckpointError(Exception):
    """A checkpoint can't be loaded or can't be trusted; the message states which, why and what to do."""


class Unreachable(CheckpointError):
    """The hub does not respond: offline mode is on, there is no network, or the hub stays busy."""


@dataclass(frozen=True)
class File:
    """A file of a revision."""

    name: str
    size: int
    sha256: str | None = None  # None for small files, which the hub keeps in git


@dataclass(frozen=True)
class Listing:
    """The files of a revision at one commit."""

    commit: str
    files: tuple[File, ...]
    with_code: bool = False  # whether its Python files are needed

    @property
    def formats(self) -> dict[str, tuple[File, ...]]:
        """The weight files by format, in the order of the shards."""
        found = {name: _matching(self.files, pattern) for name, pattern in FORMATS.items()}
        return {name: files for name, files in found.items() if files}

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
        """All files to download: weights, configuration and tokenizer, perhaps code."""
        others = {index for name, index in INDEX.items() if name != self.format}
        endings = (*TEXT, CODE) if self.with_code else TEXT
        text = [f for f in self.files if "/" not in f.name and f.name.endswith(endings) and f.name not in others]
        return (*text, *self.weights)

    @property
    def bytes(self) -> int:
        """The total size of the files to download."""
        return sum(file.size for file in self.needed)


def _matching(files: Iterable[File], pattern: str) -> tuple[File, ...]:
    matches = {file: re.fullmatch(pattern, file.name) for file in files}
    found = [file for file, match in matches.items() if match]
    # transformers prefers a single file to shards.
    single = [file for file in found if (match := matches[file]) and match["of"] is None]
    return tuple(single or sorted(found, key=lambda file: file.name))


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
        CheckpointError: if there is no such repository, or the hub can't be reached and nothing is cached.
    """
    from huggingface_hub import HfApi

    try:
        found = with_retries(lambda: HfApi().list_repo_refs(repo), f"the branches of {repo}", notify)
        return {reference.name: reference.target_commit for reference in found.branches}, ""
    except Unreachable as error:
        references = repo_dir(repo) / "refs"
        files = (file for file in references.rglob("*") if not file.name.startswith("."))  # dot files are being written
        cached = {str(file.relative_to(references)): commit for file in files if (commit := read_ref(file))}
        if cached:
            return cached, str(error)
        raise Unreachable(f"{error}, and nothing of {repo} is in the cache") from error


def list_files(
    repo: str, commits: Mapping[str, str], cache_dir: Path | None = None, offline: bool = False, notify: Notify = print
) -> dict[str, Listing]:
    """List the files of each revision.

    Args:
        commits: the commit of each revision, from `list_branches`, so that listing and download refer to the same commit.
        offline: use cached listings and snapshots only; revisions without either are left out.
    """
    found = {revision: _cached_listing(repo, commit) for revision, commit in commits.items()}
    unknown = [revision for revision, listing in found.items() if listing is None]
    if offline:
        found |= {revision: _list_snapshot(repo, commits[revision], cache_dir) for revision in unknown}
    else:
        if len(unknown) > AT_ONCE:
            notify(f"{repo}: requesting the file lists of {len(unknown)} revisions")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found |= zip(unknown, pool.map(lambda r: _request_listing(repo, commits[r], notify), unknown), strict=True)
    return {revision: listing for revision, listing in found.items() if listing is not None}


def _request_listing(repo: str, commit: str, notify: Notify) -> Listing | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = with_retries(
            lambda: HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT),
            f"the files of {repo} at {commit[:8]}",
            notify,
        )
    except RevisionNotFoundError:
        return None
    files = [File(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None) for s in info.siblings or []]
    listing = Listing(commit, tuple(files))
    try:
        _listing_file(repo, commit).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_listing_file(repo, commit), json.dumps([asdict(file) for file in files]).encode())
    except OSError:
        pass  # a cache that can't be written: the listing is requested again next time
    return listing


def _cached_listing(repo: str, commit: str) -> Listing | None:
    try:
        return Listing(commit, tuple(File(**file) for file in json.loads(_listing_file(repo, commit).read_text())))
    except (OSError, ValueError, TypeError):
        return None


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
        named_by_hash = re.fullmatch(r"[0-9a-f]{64}", blob) is not None
        files.append(File(str(file.relative_to(snapshot)), file.stat().st_size, blob if named_by_hash else None))
    return Listing(commit, tuple(files))


def repo_dir(repo: str, cache_dir: Path | None = None) -> Path:
    """Return the directory of a repository in the hub's cache."""
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def read_ref(reference: Path) -> str:
    """Read the commit from a file under the cache's `refs`; return "" if another process has removed the file."""
    try:
        return reference.read_text().strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return ""


def with_retries(ask: Callable[[], T], what: str, notify: Notify = print, stop: threading.Event | None = None) -> T:
    """Call `ask`, and retry after transient errors; `notify` receives the reason and the waiting time of each retry.

    Raises:
        Unreachable: if all attempts fail, with the last reason.
        CheckpointError: if there is no such repository.
    """
    from huggingface_hub import get_session
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.utils import httpx

    get_session().timeout = TIMEOUT  # by default the client waits for ever
    stop = stop or threading.Event()
    attempt = 0
    while True:
        attempt += 1
        try:
            return ask()
        except RepositoryNotFoundError as error:
            raise CheckpointError(
                f"can't get {what}: the hub has no such repository (or it is private and you are not logged in)"
            ) from error
        except OfflineModeIsEnabled as error:
            raise Unreachable(f"can't get {what}: offline mode is on (HF_HUB_OFFLINE)") from error
        except httpx.HTTPError as error:
            pause_or_raise(error, attempt, what, notify, stop)


def pause_or_raise(error: Exception, attempt: int, what: str, notify: Notify, stop: threading.Event) -> None:
    """Wait before the next attempt if the error is transient and attempts are left.

    Raises:
        Unreachable: if no attempt is left, or `stop` is set.
        Exception: the error itself, if it is not transient.
    """
    from huggingface_hub.utils import httpx

    response = getattr(error, "response", None)
    if not isinstance(error, httpx.TransportError) and (response is None or response.status_code not in BUSY):
        raise error
    status = f"{response.status_code} {response.reason_phrase}" if response is not None else ""
    reason = status or f"{type(error).__name__}: {first_line(error)}"
    # Without a network every connection fails at once; a few attempts suffice to tell that from a transient failure.
    attempts = ATTEMPTS_TO_CONNECT if isinstance(error, httpx.ConnectError) else ATTEMPTS
    if attempt >= attempts:
        raise Unreachable(f"can't get {what}: the hub can't be reached ({reason}, {attempt} attempts)") from error
    wait = (response is not None and _retry_after(response.headers)) or min(LONGEST_WAIT, 2.0 ** (attempt - 1))
    notify(f"{what}: {reason}; trying again in {wait:.0f} s ({attempt} of {attempts - 1})")
    if stop.wait(wait):
        raise Unreachable(f"stopped while waiting for {what}") from error


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a busy hub asks the client to wait."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1.0  # whole seconds, rounded down
    after = headers.get("retry-after", "")
    return float(after) if after.isdigit() else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second where the first announces it with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
