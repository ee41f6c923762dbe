"""What the hub says about a repository: its branches, and the files of each with size and hash, before any download.

Answers about a commit never change and are kept on disk. Requests are repeated after 429, 5xx, time-outs and dropped
connections, a bounded number of times, and each time the reason is said. Where the hub can't be reached, the cache answers.
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
LONGEST_WAIT = 60.0  # seconds, where the hub names no time itself
TIMEOUT = 30.0  # seconds without an answer or a byte
AT_ONCE = 8  # requests in flight
BUSY = (408, 429, 500, 502, 503, 504)
# In the order in which transformers looks for them.
FORMATS = {
    "safetensors": r"model(?:-\d{5}-of-(?P<of>\d{5}))?\.safetensors",
    "bin": r"pytorch_model(?:-\d{5}-of-(?P<of>\d{5}))?\.bin",
}
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
TEXT = (".json", ".txt", ".model")

T = TypeVar("T")
Notify = Callable[[str], None]


class CheckpointError(Exception):
    """A checkpoint that can't be had or can't be trusted; the message says which, why and what to do."""


class Unreachable(CheckpointError):
    """The hub gives no answer: offline mode is on, there is no network, or it stays busy."""


@dataclass(frozen=True)
class File:
    """A file of a revision."""

    name: str
    size: int
    sha256: str | None = None  # None for small files, which the hub keeps in git


@dataclass(frozen=True)
class Listing:
    """The files of a revision, as they were at a commit."""

    commit: str
    files: tuple[File, ...]

    @property
    def formats(self) -> dict[str, tuple[File, ...]]:
        """The weight files by format, each format in the order of its shards."""
        found = {name: _matching(self.files, pattern) for name, pattern in FORMATS.items()}
        return {name: files for name, files in found.items() if files}

    @property
    def format(self) -> str | None:
        """The format that is fetched: the first that is whole, else the first there is."""
        whole = [name for name, files in self.formats.items() if not missing_shards(files)]
        return next(iter([*whole, *self.formats]), None)

    @property
    def weights(self) -> tuple[File, ...]:
        """The weight files that are fetched: of one format, never of both."""
        return self.formats[self.format] if self.format else ()

    @property
    def needed(self) -> tuple[File, ...]:
        """All files that are fetched: weights, and the configuration and tokenizer beside them."""
        others = {index for name, index in INDEX.items() if name != self.format}
        text = [f for f in self.files if "/" not in f.name and f.name.endswith(TEXT) and f.name not in others]
        return (*text, *self.weights)

    @property
    def bytes(self) -> int:
        """Size of what is fetched."""
        return sum(file.size for file in self.needed)


def _matching(files: Iterable[File], pattern: str) -> tuple[File, ...]:
    matches = {file: re.fullmatch(pattern, file.name) for file in files}
    found = [file for file, match in matches.items() if match]
    # A whole file beside shards is what transformers loads.
    whole = [file for file in found if (match := matches[file]) and match["of"] is None]
    return tuple(whole or sorted(found, key=lambda file: file.name))


def missing_shards(files: Iterable[File]) -> list[str]:
    """The names of the shards that the names of the others say there should be."""
    names = {file.name for file in files}
    expected = set()
    for name in names:
        if match := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\..*)", name):
            expected |= {f"{match[1]}{i:05d}{match[2]}" for i in range(1, int(match[3]) + 1)}
    return sorted(expected - names)


def list_branches(repo: str, notify: Notify = print) -> tuple[dict[str, str], str]:
    """The commit that each branch of a repository points to: asked of the hub, or, where it can't be, of the cache.

    Returns:
        The commits by branch, and why the hub could not be asked ("" if it was).

    Raises:
        CheckpointError: if there is no such repository, or it can't be reached and nothing of it is cached.
    """
    from huggingface_hub import HfApi

    try:
        found = with_retries(lambda: HfApi().list_repo_refs(repo), f"the branches of {repo}", notify)
        return {reference.name: reference.target_commit for reference in found.branches}, ""
    except Unreachable as error:
        references = repo_dir(repo) / "refs"
        files = (file for file in references.rglob("*") if not file.name.startswith("."))  # those are being written
        cached = {str(file.relative_to(references)): commit for file in files if (commit := read_ref(file))}
        if cached:
            return cached, str(error)
        raise Unreachable(f"{error}, and nothing of {repo} is in the cache") from error


def list_files(
    repo: str, commits: Mapping[str, str], cache_dir: Path | None = None, offline: bool = False, notify: Notify = print
) -> dict[str, Listing]:
    """The files of each revision.

    Args:
        commits: the commit of each, from `branches`: listing and download are then of one state of the repository.
        offline: ask nobody; what is neither remembered nor in the cache is left out.
    """
    found = {revision: _known(repo, commit) for revision, commit in commits.items()}
    asked = [revision for revision, listing in found.items() if listing is None]
    if offline:
        found |= {revision: _in_cache(repo, commits[revision], cache_dir) for revision in asked}
    else:
        if len(asked) > AT_ONCE:
            notify(f"{repo}: asking for the files of {len(asked)} revisions")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found |= zip(asked, pool.map(lambda r: _ask(repo, commits[r], notify), asked), strict=True)
    return {revision: listing for revision, listing in found.items() if listing is not None}


def _ask(repo: str, commit: str, notify: Notify) -> Listing | None:
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
        _memory(repo, commit).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_memory(repo, commit), json.dumps([asdict(file) for file in files]).encode())
    except OSError:
        pass  # it is asked for again next time
    return listing


def _known(repo: str, commit: str) -> Listing | None:
    try:
        return Listing(commit, tuple(File(**file) for file in json.loads(_memory(repo, commit).read_text())))
    except (OSError, ValueError, TypeError):
        return None


def _memory(repo: str, commit: str) -> Path:
    return cache_root() / "listings" / repo.replace("/", "--") / f"{commit}.json"


def _in_cache(repo: str, commit: str, cache_dir: Path | None) -> Listing | None:
    """What a snapshot in the cache holds; a blob's name is its hash."""
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
    """The directory of a repository in the hub's cache."""
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def read_ref(reference: Path) -> str:
    """The commit that a file in the cache's `refs` names; "" if there is no such file: others write and evict meanwhile."""
    try:
        return reference.read_text().strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return ""


def with_retries(ask: Callable[[], T], what: str, notify: Notify = print, stop: threading.Event | None = None) -> T:
    """Ask the hub, and again where the reason may pass; says each time why and for how long it waits.

    Raises:
        Unreachable: if it does not pass, with the last reason.
        CheckpointError: if there is no such repository.
    """
    from huggingface_hub import get_session
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.utils import httpx

    get_session().timeout = TIMEOUT  # the client's own default is to wait for ever
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
            raise Unreachable(f"can't get {what}: offline mode is on") from error
        except httpx.HTTPError as error:
            pause_or_raise(error, attempt, what, notify, stop)


def pause_or_raise(error: Exception, attempt: int, what: str, notify: Notify, stop: threading.Event) -> None:
    """Wait before the next attempt, if the reason may pass and attempts are left.

    Raises:
        Unreachable: if none are left.
        Exception: the error itself, where asking again would not help.
    """
    from huggingface_hub.utils import httpx

    response = getattr(error, "response", None)
    if not isinstance(error, httpx.TransportError) and (response is None or response.status_code not in BUSY):
        raise error
    status = f"{response.status_code} {response.reason_phrase}" if response is not None else ""
    reason = status or f"{type(error).__name__}: {first_line(error)}"
    # Without a network every name fails at once: a few attempts tell that from a hiccup.
    attempts = ATTEMPTS_TO_CONNECT if isinstance(error, httpx.ConnectError) else ATTEMPTS
    if attempt >= attempts:
        raise Unreachable(f"can't get {what}: the hub can't be reached ({reason}, {attempt} attempts)") from error
    wait = (response is not None and _asked_to_wait(response.headers)) or min(LONGEST_WAIT, 2.0 ** (attempt - 1))
    notify(f"{what}: {reason}; trying again in {wait:.0f} s ({attempt} of {attempts - 1})")
    if stop.wait(wait):
        raise Unreachable(f"stopped while waiting for {what}") from error


def _asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a busy hub asks for."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1.0  # whole seconds, rounded down
    after = headers.get("retry-after", "")
    return float(after) if after.isdigit() else None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
