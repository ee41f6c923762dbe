"""Tests of fetching with the real huggingface_hub client from a faulty server: the right files, or a clear message."""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints import hub, retries
from checkpoints.disk import DiskBudget, missing_files, partial_file
from checkpoints.fetch import cached_snapshot, fetch
from checkpoints.hub import list_branches, list_revisions
from tests.support import processes
from tests.support.failing_files import FAILING, FULL, failures, numbered
from tests.support.hub_server import Handler, Hub, blob, serve
from tracker.common.errors import CheckpointError, Unreachable

REPO = "org/toy"
STEPS = (0, 1, 2, 4)
SIZE = 300_000  # bytes of weights in a revision
WEIGHTS = "GET .*model.safetensors"
IN_CIRCLES = {"Location": f"/{REPO}/resolve/step1/model.safetensors"}


class Fetcher:
    """A served repository and an empty cache; records the messages and counts the bytes of its downloads."""

    def __init__(self, server: Hub, root: Path, cache: Path):
        self.server, self.root, self.cache = server, root, cache
        self.cached = cache / "models--org--toy"
        self.messages = []
        self.counted = 0

    def fetch(self, step: int, commits: dict[str, str] | None = None, **options) -> Path:
        revision = f"step{step}"
        commits = commits or list_branches(REPO, self.messages.append)[0]
        listings, faults = list_revisions(
            REPO, {revision: commits[revision]}, self.cache, notify=self.messages.append
        )
        for fault in faults.values():
            raise fault
        listing = listings[revision]
        return fetch(
            REPO,
            revision,
            listing,
            self.cache,
            notify=self.messages.append,
            count=self.count,
            **options,
        )

    def listings(self) -> tuple[dict[str, str], dict[str, hub.Listing]]:
        """Return the commit and the files of every revision."""
        commits, _ = list_branches(REPO)
        return commits, list_revisions(REPO, commits, self.cache)[0]

    def count(self, size: int):
        self.counted += size

    def assert_whole(self, step: int, directory: Path):
        published = self.published(step)
        assert sorted(file.name for file in directory.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        for file in directory.iterdir():
            assert file.read_bytes() == (published / file.name).read_bytes()
        assert not list(self.cache.rglob("*.tracker.incomplete"))

    def fetch_whole(self, step: int):
        """Fetch a step and assert that all of it is there."""
        self.assert_whole(step, self.fetch(step))

    def snapshot(self, commit: str) -> Path:
        return self.cached / "snapshots" / commit

    def published(self, step: int) -> Path:
        repository = self.root / "models--org--toy"
        return repository / "snapshots" / (repository / "refs" / f"step{step}").read_text()


def publish(root: Path, step: int, content: bytes):
    repository = root / "models--org--toy"
    commit = hashlib.sha1(content + bytes(step)).hexdigest()
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / f"step{step}").write_text(commit)
    for name in ("model.safetensors", "pytorch_model.bin"):  # the same weights in both formats
        (repository / "snapshots" / commit / name).write_bytes(
            content + (b"" if name.startswith("model") else b"!")
        )
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps({"step": step}))


@pytest.fixture
def fetcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    for step in STEPS:
        publish(tmp_path / "hub", step, hashlib.shake_128(bytes([step])).digest(SIZE))
    with serve(tmp_path / "hub") as server:
        server.be_used(monkeypatch)
        yield Fetcher(server, tmp_path / "hub", tmp_path / "cache")


def test_fetch_downloads_needed_files_once_and_counts_bytes(fetcher):
    fetcher.fetch_whole(1)
    assert fetcher.counted == sum(
        f.stat().st_size for f in fetcher.published(1).iterdir() if f.suffix != ".bin"
    )
    assert not fetcher.server.requested("pytorch_model.bin")
    before = len(fetcher.server.requests)
    fetcher.fetch_whole(1)
    assert len(fetcher.server.requests) == before + 1  # for the branches; commits never change
    assert cached_snapshot(REPO, "step1", fetcher.cache) == fetcher.fetch(1)
    assert fetcher.messages == []


TRANSIENT = {
    "429 of the rate limiter": ("GET /api.*refs", {"status": 429, "headers": {"ratelimit": '"api";r=0;t=0'}}, "429.* in 1 s"),
    "503 twice": (WEIGHTS, {"status": 503, "times": 2}, "503 Service Unavailable; trying again"),
    "503 for the listing": ("GET .*blobs=", {"status": 503}, "the files of org/toy at .*503"),
    "503 for a small file": ("GET .*config.json", {"status": 503}, "config.json .*503"),
    "other weights": (WEIGHTS, {"content": lambda c: c[::-1]}, "does not match the hash"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", TRANSIENT)
def test_transient_faults_are_retried_and_reported(fetcher, case):
    path, fault, message = TRANSIENT[case]
    fetcher.server.fail(path, **fault)
    fetcher.fetch_whole(2)
    assert re.search(message, "\n".join(fetcher.messages)), fetcher.messages


def test_dropped_download_continues_at_the_received_bytes(fetcher, monkeypatch):
    """It may be dropped more often than a request without progress is made."""
    monkeypatch.setattr("checkpoints.fetch.BLOCK", 30_000)
    fetcher.server.fail(WEIGHTS, drop_after=40_000, times=7)
    fetcher.fetch_whole(2)
    assert fetcher.server.sent < SIZE + 2 * 65_536 + 1000 and fetcher.counted >= SIZE


def test_stopped_download_is_resumed_by_the_next_call(fetcher):
    stop = threading.Event()
    fetcher.count = lambda size: stop.set() if size > 1000 else None  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="stopped while fetching model.safetensors"):
        fetcher.fetch(1, stop=stop)
    del fetcher.count
    (left,) = fetcher.cache.rglob("*.incomplete")
    have = left.stat().st_size
    assert 0 < have < SIZE
    fetcher.fetch_whole(1)
    assert f"resuming after {have / 1e6:.3g} MB" in fetcher.messages[-1]
    assert fetcher.server.requests[-1].startswith("GET")
    assert "model.safetensors" in fetcher.server.requests[-1]


@pytest.mark.parametrize("etag", ["1" * 64, "../../../../evil", ""])
def test_the_snapshot_has_the_listed_content_whatever_the_hub_says_of_a_file(fetcher, etag):
    """The hub's client would download the content of another hash, unchecked, and to the path that the hash makes."""
    fetcher.server.fail("/resolve/", headers={"ETag": f'"{etag}"'}, times=1000)
    fetcher.fetch_whole(1)
    assert not list(fetcher.cache.parent.rglob("evil*"))
    names = {
        file.resolve().name for file in cached_snapshot(REPO, "step1", fetcher.cache).iterdir()
    }
    assert names == {blob(file) for file in fetcher.published(1).iterdir() if file.suffix != ".bin"}


def test_branches_whose_names_leave_the_cache_are_left_out(fetcher):
    listed = {"branches": [], "converts": [], "tags": []}
    for name in (
        "step1",
        "../../../../evil/step2",
        "/tmp/step3",
        "step4\0",
        "step5\ud800",
        "a/step6",
    ):
        listed["branches"].append(
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": "1" * 40}
        )
    fetcher.server.fail("/refs", content=lambda _: json.dumps(listed).encode())
    assert list(list_branches(REPO, fetcher.messages.append)[0]) == ["step1", "a/step6"]
    assert (
        "lists a branch '../../../../evil/step2', which git does not allow" in fetcher.messages[0]
    )


def test_download_restarts_on_a_server_without_ranges(fetcher, monkeypatch):
    monkeypatch.setattr(Handler, "range_start", lambda self: None)
    fetcher.server.fail(WEIGHTS, drop_after=100_000)
    fetcher.fetch_whole(1)


def test_truncated_cached_file_is_fetched_again(fetcher):
    directory = fetcher.fetch(1)
    weights = (directory / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:1000])
    fetcher.fetch_whole(1)


def test_missing_repository_is_reported(fetcher):
    with pytest.raises(
        CheckpointError,
        match=r"branches of org/none: the hub answers 404.*\(RepoNotFound.*no token.*check the name",
    ):
        list_branches("org/none")
    assert "step3" not in list_branches(REPO)[0]


def test_revision_that_moves_after_the_listing_is_fetched_as_listed(fetcher):
    commits, _ = list_branches(REPO)
    before = fetcher.published(1)
    publish(fetcher.root, 1, b"new" * 1000)
    directory = fetcher.fetch(1, commits)
    assert directory.name == before.name
    assert (directory / "model.safetensors").read_bytes() == (
        before / "model.safetensors"
    ).read_bytes()
    # The listing of step 2 is cached, but its commit is removed from the hub before the download.
    list_revisions(REPO, {"step2": commits["step2"]}, fetcher.cache)
    fetcher.published(2).rename(fetcher.root / "gone")
    with pytest.raises(CheckpointError, match="step2 is no longer on the hub as it was listed"):
        fetcher.fetch(2, commits)


def in_listing(**entries):
    """Return a fault: the entry of the weights in a listing has other values."""

    def change(content: bytes) -> bytes:
        info = json.loads(content)
        next(file for file in info["siblings"] if file["rfilename"] == "model.safetensors").update(
            entries
        )
        return json.dumps(info).encode()

    return "GET .*blobs=", {"content": change}


# An answer of the hub, and the message. The client or this program would follow each of them into an error of another kind.
REFUSED = {
    "a name that leaves the cache": (in_listing(rfilename="../../x.json"), "can't be read .ValueError: it lists '../../x.json'"),
    "a name of 300 characters": (in_listing(rfilename="x" * 300), "can't be read .ValueError: it lists 'xxx"),
    "a name with half a character": (in_listing(rfilename="\ud800"), "can't be read .ValueError: it lists .*ud800"),
    "a size in words": (in_listing(size="many"), "can't be read .ValueError: it lists 'model.safetensors' with size 'many'"),
    "a hash that leaves the cache": (in_listing(lfs={"sha256": "../x", "size": 1, "pointerSize": 1}), "with SHA-256 '../x'"),
    "no hash": (in_listing(lfs=None, blobId=None), "can't be read .ValueError: it lists 'model.safetensors' without a hash"),
    "another commit": (("GET .*blobs=", {"content": lambda c: c.replace(b'"sha": "', b'"sha": "0')}), "about the commit '0"),
    "a log-in page": (("GET .*blobs=", {"content": lambda _: b"<html>"}), "can't be read .JSONDecodeError.*check HF_ENDPOINT"),
    "no content": ((WEIGHTS, {"status": 204}), "model.safetensors of .* answers 204 No Content"),
    "a teapot": ((WEIGHTS, {"status": 418}), "model.safetensors of .* answers 418 I'm a Teapot"),
    "no access": (
        ("GET .*config.json", {"status": 403, "headers": {"X-Error-Message": "not yours"}}),
        "config.json of .* answers 403 Forbidden .not yours., and no token is in use.*hf auth login",
    ),
    "another small file": (("GET .*config.json", {"content": lambda c: c[::-1], "times": 2}), "does not match its git hash"),
    "other weights": ((WEIGHTS, {"content": lambda c: c[::-1], "times": 2}), "twice and does not match its SHA-256"),
    "weights without end": ((WEIGHTS, {"content": lambda c: c * 100, "times": 2}), "was downloaded twice"),
    "weights cut short": ((WEIGHTS, {"content": lambda c: c[:200_000], "times": 100}), "step1.*416"),
    "a few bytes at a time": ((WEIGHTS, {"drop_after": 100, "times": 1000}), "6 attempts"),
    "a busy hub": (("GET .*refs", {"status": 502, "times": 100}), "502 Bad Gateway, 6 attempts.*nothing of org/toy is in the"),
    "circles": ((WEIGHTS, {"status": 302, "headers": IN_CIRCLES, "times": 100}), "can't be read .TooManyRedirects"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_that_is_of_no_use_is_one_message(fetcher, case):
    (path, fault), message = REFUSED[case]
    fetcher.server.fail(path, **fault)
    with pytest.raises(CheckpointError, match=message):
        fetcher.fetch(1)
    # What the server has sent depends on the buffers of its sockets
    assert fetcher.counted < SIZE
    fetcher.server.faults.clear()
    fetcher.fetch_whole(1)


def test_a_file_larger_than_the_free_space_is_not_requested(fetcher):
    path, fault = in_listing(size=10**18)
    fetcher.server.fail(path, **fault)
    with pytest.raises(
        CheckpointError, match=r"step1 does not fit on the disk of .*1e\+06 TB are needed"
    ):
        fetcher.fetch(1)
    assert not fetcher.server.requested(WEIGHTS)


WEDNESDAY = "Wed, 21 Oct 2015 07:30:10 GMT"
PAUSES = {
    "none": ({}, [1, 2, 4, 8, 16]),
    "seconds": ({"Retry-After": "100"}, [100, 100, 100]),
    "a date": ({"Retry-After": WEDNESDAY}, [10, 10, 10, 10, 10]),
    "a word": ({"Retry-After": "soon"}, [1, 2, 4, 8, 16]),
    "five minutes": ({"ratelimit": '"api";r=0;t=300'}, [301]),
    "a day": ({"Retry-After": "86400"}, []),
    "requests are left": ({"ratelimit": '"api";r=1;t=300'}, [1, 2, 4, 8, 16]),
}


@pytest.mark.parametrize("case", PAUSES)
def test_pauses_are_those_that_the_hub_asks_for_up_to_a_limit(monkeypatch, case):
    from email.utils import parsedate_to_datetime

    from huggingface_hub.utils import httpx

    headers, expected = PAUSES[case]
    waited = []
    monkeypatch.setattr(
        retries.time, "time", lambda: parsedate_to_datetime(WEDNESDAY).timestamp() - 10
    )

    class Stop(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return False

    request = httpx.Request("GET", "http://localhost")
    error = httpx.HTTPStatusError(
        "", request=request, response=httpx.Response(429, headers=headers, request=request)
    )
    attempts = retries.Attempts("a file", lambda line: None, Stop())
    with pytest.raises(
        Unreachable, match="can't get a file: the hub can't be reached .429 Too Many Requests"
    ) as raised:
        while True:
            attempts.wait_or_raise(error)
    assert waited == expected
    assert (
        "it asks for a pause of 86,400 s: run the same command again later" in str(raised.value)
    ) == (case == "a day")


def test_silent_hub_is_given_up_after_three_attempts(fetcher, monkeypatch):
    monkeypatch.setattr("checkpoints.fetch.TIMEOUT", 0.4)
    hung = threading.Event()
    fetcher.server.fail(WEIGHTS, times=1000, then=lambda: hung.wait(300))
    try:
        with pytest.raises(
            Unreachable, match="model.safetensors of org/toy at step1: .*ReadTimeout.*3 attempts"
        ):
            fetcher.fetch(1)
    finally:
        hung.set()
    assert len(fetcher.server.requested(WEIGHTS)) == 3


def test_a_hub_that_sends_a_few_bytes_a_second_is_given_up(fetcher, monkeypatch):
    """By a clock by which 40 s pass before each block arrives, of which there are five in the file."""
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, 40.0)))
    monkeypatch.setattr("checkpoints.fetch.time", clock)
    monkeypatch.setattr("checkpoints.fetch.SLOWEST", 1)
    fetcher.fetch_whole(1)
    monkeypatch.setattr("checkpoints.fetch.SLOWEST", 10_000)
    message = (
        r"model.safetensors of org/toy at step2: .*ReadTimeout: [\d,]+ bytes in 80 s, 3 attempts"
    )
    with pytest.raises(Unreachable, match=message):
        fetcher.fetch(2)


def test_hub_that_lists_nothing_is_not_asked_for_ever(fetcher, monkeypatch):
    monkeypatch.setattr(hub, "AT_ONCE", 1)
    fetcher.server.fail("GET .*blobs=", status=503, times=1000)
    commits, _ = list_branches(REPO)
    listings, faults = hub.list_revisions(REPO, commits, notify=fetcher.messages.append)
    assert listings == {} and faults.keys() == commits.keys()
    assert any("was not asked" in str(error) for error in faults.values())
    assert len(fetcher.server.requested("GET .*blobs=")) < 4 * 6


def test_token_that_gives_no_access_is_named(fetcher, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    fetcher.server.fail("GET .*refs", status=401)
    with pytest.raises(
        CheckpointError,
        match="the branches of org/toy: .*401.*the token in use does not give access",
    ):
        list_branches(REPO)


def test_branch_without_a_commit_is_a_fault_of_its_own(fetcher):
    commits, _ = list_branches(REPO)
    listings, faults = hub.list_revisions(REPO, commits | {"step1": "None"})
    assert listings.keys() == commits.keys() - {"step1"}
    assert "the hub states 'None' as the commit of a branch of org/toy" in str(faults["step1"])


@pytest.mark.parametrize("listed", [True, False])
def test_without_network_the_cache_is_used(fetcher, monkeypatch, listed):
    """Its listings, or else what its files are."""
    fetcher.fetch(1)
    if not listed:
        shutil.rmtree(os.environ["TRACKER_CACHE"])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(fetcher.cache))
    commits, reason = list_branches(REPO, fetcher.messages.append)
    assert "can't be reached (ConnectError" in reason and commits.keys() == {"step1"}
    found, _ = list_revisions(REPO, commits, fetcher.cache, offline=True)
    (weights,) = found["step1"].weights
    assert weights.sha256 == blob(fetcher.published(1) / "model.safetensors")
    fetcher.assert_whole(1, fetch(REPO, "step1", found["step1"], fetcher.cache))


FETCH = """
import sys
from tracker.common.errors import CheckpointError
from checkpoints.hub import list_branches, list_revisions
from checkpoints.fetch import fetch
from pathlib import Path
cache = Path(sys.argv[2])
for step in sys.argv[3:]:
    try:
        listing = list_revisions("org/toy", {step: list_branches("org/toy")[0][step]}, cache)[0][step]
        print(step, fetch("org/toy", step, listing, cache))
    except CheckpointError as error:
        print(step, error)
"""


@pytest.mark.slow
def test_several_processes_fetch_the_same_revisions_into_one_cache(fetcher):
    # So that they meet
    fetcher.server.fail(WEIGHTS, pause=lambda: time.sleep(0.1), times=1000)
    commits, _ = list_branches(REPO)
    directories = {f"step{step}": fetcher.snapshot(commits[f"step{step}"]) for step in STEPS}
    given = ("tests.support.statements", FETCH, fetcher.cache, *directories)
    environment = os.environ | fetcher.server.environment
    for running in [processes.start(*given, env=environment) for _ in range(4)]:
        out, _ = running.communicate(timeout=300)
        assert out.splitlines() == [f"{step} {place}" for step, place in directories.items()]
    for step, place in zip(STEPS, directories.values(), strict=True):
        fetcher.assert_whole(step, place)
    assert len(fetcher.server.requested(WEIGHTS)) == len(STEPS)
    assert not list(fetcher.cache.parent.rglob("*.tmp"))


def test_partly_written_reference_is_not_listed_as_a_branch(fetcher, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(fetcher.cache))
    fetcher.fetch(1)
    references = fetcher.cached / "refs"
    (references / ".step1.1-1-0123456789abcdef.tmp").write_text((references / "step1").read_text())
    fetcher.server.fail(".*refs", status=503, times=1000)
    assert list(list_branches(REPO, fetcher.messages.append)[0]) == ["step1"]


READ_ONLY = numbered(errno.EROFS)
CACHES = {
    "full": (FULL, "step1 does not fit on the disk of .*No space left"),
    "read-only": (READ_ONLY, "step1 is not in the cache .*can't be written to; set HF"),
    "damaged": (FAILING, r"step1 can't be downloaded \(OSError: .*Input/output error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHES)
def test_a_download_that_fails_at_any_operation_is_completed_by_the_next(fetcher, case):
    """Where links are not supported, the snapshot has copies."""
    error, message = CACHES[case]
    commits, found = fetcher.listings()

    def fetch_step():
        return fetch(REPO, "step1", found["step1"], fetcher.cache, notify=fetcher.messages.append)

    outcomes = {}
    for operation, raised in failures(fetch_step, fetcher.cached, error):
        if raised is None:
            fetcher.assert_whole(1, fetcher.snapshot(commits["step1"]))
        else:
            assert re.search(message, str(raised)), raised
        outcomes[operation] = raised
        fetcher.assert_whole(1, fetch_step())
        shutil.rmtree(fetcher.cache)
    assert outcomes["os.symlink"] is None and outcomes["os.rename"]


def test_a_whole_revision_is_taken_from_a_cache_that_can_not_be_written_to(fetcher):
    directory, reference = fetcher.fetch(1), fetcher.cached / "refs" / "step1"
    reference.unlink()
    for _, raised in failures(lambda: fetcher.fetch(1), fetcher.cached, READ_ONLY, reading=False):
        assert raised is None
        reference.unlink(missing_ok=True)
    assert fetcher.fetch(1) == directory


def used(cache: Path) -> int:
    return sum(
        file.stat().st_size for file in cache.rglob("*") if file.is_file() and not file.is_symlink()
    )


def test_disk_budget_evicts_only_revisions_fetched_by_this_program(fetcher):
    theirs = fetcher.fetch(0)  # fetched without a budget, as by another program
    commits, found = fetcher.listings()
    before = used(fetcher.cache)
    disk = DiskBudget(fetcher.cache, budget=2 * SIZE + 1000)
    for step in (1, 2, 4):
        use = disk.try_reserve(REPO, found[f"step{step}"])
        assert use is not None
        fetcher.assert_whole(step, fetcher.fetch(step, commits))
        assert used(fetcher.cache) - before <= 2 * SIZE + 3000
        use.release()
    directories = {step: fetcher.snapshot(commits[f"step{step}"]) for step in STEPS}
    assert [step for step in STEPS if directories[step].exists()] == [
        0,
        2,
        4,
    ]  # the oldest one fetched under the budget was removed
    fetcher.assert_whole(0, theirs)
    assert not (fetcher.cached / "refs" / "step1").exists()


def test_revision_in_use_is_not_evicted(fetcher):
    commits, found = fetcher.listings()
    mine = DiskBudget(fetcher.cache, budget=SIZE + 1000)
    others = DiskBudget(fetcher.cache, budget=SIZE + 1000)
    use = mine.try_reserve(REPO, found["step1"])
    directory = fetcher.fetch(1, commits)
    assert others.try_reserve(REPO, found["step2"]) is None
    fetcher.assert_whole(1, directory)
    use.release()
    assert others.try_reserve(REPO, found["step2"]) is not None and not directory.exists()


def test_partial_download_of_a_killed_process_is_evicted(fetcher):
    commits, found = fetcher.listings()
    disk = DiskBudget(fetcher.cache, budget=SIZE + 1000)
    disk.try_reserve(REPO, found["step1"]).release()
    (weights,) = found["step1"].weights
    left = partial_file(fetcher.cached / "blobs" / weights.sha256)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert disk.try_reserve(REPO, found["step2"]) is not None
    assert not left.exists()


def test_eviction_keeps_what_others_added_or_need(fetcher):
    """Another program's file in the snapshot, and the blob that a revision which is being fetched shares with it."""
    publish(fetcher.root, 8, (fetcher.published(1) / "model.safetensors").read_bytes())
    commits, listings = fetcher.listings()
    DiskBudget(fetcher.cache).try_reserve(REPO, listings["step1"]).release()
    directory = fetcher.fetch(1, commits)
    use = DiskBudget(fetcher.cache).try_reserve(REPO, listings["step8"])  # it is not fetched yet
    blob_of_both = (directory / "model.safetensors").resolve()
    (directory / "theirs").write_text("kept")
    assert DiskBudget(fetcher.cache, budget=SIZE + 1000).try_reserve(REPO, listings["step2"])
    assert not (directory / "config.json").exists() and [
        file.name for file in directory.iterdir()
    ] == ["theirs"]
    assert blob_of_both.exists() and (directory.parents[1] / "refs" / "step1").exists()
    fetcher.assert_whole(8, fetcher.fetch(8, commits))
    use.release()


def test_revision_larger_than_the_budget_is_refused(fetcher):
    _, found = fetcher.listings()
    with pytest.raises(CheckpointError, match="more than the whole --disk_budget of 0.1 MB"):
        DiskBudget(fetcher.cache, budget=100_000).try_reserve(REPO, found["step1"])
    assert missing_files(fetcher.cache, found["step1"])
