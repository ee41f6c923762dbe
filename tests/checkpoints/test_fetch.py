"""Fetching through the real huggingface_hub client from a server that fails in every way: right files, or a clear message."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpoints import hub
from checkpoints.disk import DiskBudget, missing_files, partial_file
from checkpoints.fetch import cached_snapshot, fetch
from checkpoints.hub import CheckpointError, Unreachable, list_branches, list_files
from tests.hub_server import Handler, Hub, blob, serve

REPO = "org/toy"
STEPS = (0, 1, 2, 4)
SIZE = 300_000  # bytes of weights in a revision


class Place:
    """A served repository and an empty cache, with what was said and counted."""

    def __init__(self, server: Hub, root: Path, cache: Path):
        self.server, self.root, self.cache = server, root, cache
        self.said: list[str] = []
        self.counted = 0

    def fetch(self, step: int, commits: dict[str, str] | None = None, **options) -> Path:
        revision = f"step{step}"
        commits = commits or list_branches(REPO, self.said.append)[0]
        listing = list_files(REPO, {revision: commits[revision]}, self.cache, notify=self.said.append)[revision]
        return fetch(REPO, revision, listing, self.cache, notify=self.said.append, count=self.count, **options)

    def count(self, size: int) -> None:
        self.counted += size

    def assert_whole(self, step: int, directory: Path) -> None:
        published = self.published(step)
        assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
        for file in directory.iterdir():
            assert file.read_bytes() == (published / file.name).read_bytes()
        assert not list(self.cache.rglob("*.tracker.incomplete"))

    def published(self, step: int) -> Path:
        repository = self.root / "models--org--toy"
        return repository / "snapshots" / (repository / "refs" / f"step{step}").read_text()


def publish(root: Path, step: int, content: bytes) -> None:
    repository = root / "models--org--toy"
    commit = hashlib.sha1(content + bytes(step)).hexdigest()
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / f"step{step}").write_text(commit)
    for name in ("model.safetensors", "pytorch_model.bin"):  # the same weights in both formats
        (repository / "snapshots" / commit / name).write_bytes(content + (b"" if name.startswith("model") else b"!"))
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps({"step": step}))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "LONGEST_WAIT", 0.05)
    for step in STEPS:
        publish(tmp_path / "hub", step, hashlib.shake_128(bytes([step])).digest(SIZE))
    with serve(tmp_path / "hub") as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield Place(server, tmp_path / "hub", tmp_path / "cache")


def test_only_what_is_needed_is_fetched_once_and_counted(place):
    place.assert_whole(1, place.fetch(1))
    assert place.counted == sum(f.stat().st_size for f in place.published(1).iterdir() if f.suffix != ".bin")
    assert not place.server.asked("pytorch_model.bin")
    before = len(place.server.requests)
    place.assert_whole(1, place.fetch(1))
    assert len(place.server.requests) == before + 1  # for the branches; commits never change
    assert cached_snapshot(REPO, "step1", place.cache) == place.fetch(1)
    assert place.said == []


PASSING = {
    "dropped in mid-file": ("GET .*model.safetensors", {"drop_after": 100_000, "times": 2}, "resuming|trying again"),
    "429 with a time": ("GET .*model.safetensors", {"status": 429, "headers": {"Retry-After": "1"}}, "429.* in 1 s"),
    "429 of the rate limiter": ("GET /api.*refs", {"status": 429, "headers": {"ratelimit": '"api";r=0;t=0'}}, "429.* in 1 s"),
    "503 twice": ("GET .*model.safetensors", {"status": 503, "times": 2}, "503 Service Unavailable; trying again"),
    "503 for the listing": ("GET .*blobs=", {"status": 503}, "the files of org/toy at .*503"),
    "503 for a small file": ("GET .*config.json", {"status": 503}, "config.json .*503"),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSING)
def test_what_passes_is_waited_for_and_said(place, case):
    import re

    path, how, said = PASSING[case]
    place.server.fail(path, **how)
    place.assert_whole(2, place.fetch(2))
    assert re.search(said, "\n".join(place.said)), place.said


def test_nothing_is_fetched_twice_after_drops(place):
    place.server.fail("GET .*model.safetensors", drop_after=100_000, times=2)
    place.assert_whole(2, place.fetch(2))
    assert place.server.sent < SIZE + 2 * 65_536 + 1000 and place.counted >= SIZE


def test_a_download_that_was_stopped_is_taken_up_by_the_next_process(place):
    place.server.fail("GET .*model.safetensors", slow=0.05)
    stop = threading.Event()
    place.count = lambda size: stop.set() if size else None  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="stopped while fetching model.safetensors"):
        place.fetch(1, stop=stop)
    del place.count
    (left,) = place.cache.rglob("*.incomplete")
    have = left.stat().st_size
    assert 0 < have < SIZE
    place.assert_whole(1, place.fetch(1))
    assert f"resuming after {have / 1e9:.3g}" in place.said[-1]
    assert place.server.requests[-1].startswith("HEAD")


def test_a_server_without_ranges_sends_all_again(place, monkeypatch):
    monkeypatch.setattr(Handler, "asked_from", lambda self: None)
    place.server.fail("GET .*model.safetensors", drop_after=100_000)
    place.assert_whole(1, place.fetch(1))


def test_a_wrong_hash_is_fetched_anew_and_then_refused(place):
    place.server.fail("GET .*model.safetensors", content=lambda b: b[::-1])
    place.assert_whole(1, place.fetch(1))
    assert "does not match the hash" in place.said[0]
    place.server.fail("GET .*model.safetensors", content=lambda b: b[::-1], times=2)
    with pytest.raises(CheckpointError, match="was downloaded twice and does not match its SHA-256"):
        place.fetch(2)
    assert not list(place.cache.rglob("*.incomplete"))
    place.assert_whole(2, place.fetch(2))


def test_a_truncated_blob_is_refused_and_completed_later(place):
    place.server.fail("model.safetensors", content=lambda b: b[:200_000], times=100)
    with pytest.raises(CheckpointError, match="step2.*416"):
        place.fetch(2)
    place.server.faults.clear()
    place.assert_whole(2, place.fetch(2))


def test_a_cached_file_that_was_cut_short_is_fetched_again(place):
    directory = place.fetch(1)
    weights = (directory / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:1000])
    place.assert_whole(1, place.fetch(1))


def test_a_missing_repository_and_revision(place):
    with pytest.raises(CheckpointError, match="the branches of org/none: the hub has no such repository"):
        list_branches("org/none")
    assert "step3" not in list_branches(REPO)[0]


def test_a_revision_that_moves_after_the_listing_is_fetched_as_listed(place):
    commits, _ = list_branches(REPO)
    before = place.published(1)
    publish(place.root, 1, b"new" * 1000)
    directory = place.fetch(1, commits)
    assert directory.name == before.name
    assert (directory / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
    # Its listing is remembered, but the commit is gone from the hub before the download.
    list_files(REPO, {"step2": commits["step2"]}, place.cache)
    place.published(2).rename(place.root / "gone")
    with pytest.raises(CheckpointError, match="step2 is no longer on the hub as it was listed"):
        place.fetch(2, commits)


def test_a_hub_that_stays_busy(place):
    place.server.fail("GET .*refs", status=502, times=100)
    with pytest.raises(Unreachable, match=r"502 Bad Gateway, 6 attempts.*nothing of org/toy is in the cache"):
        list_branches(REPO, place.said.append)
    assert len(place.said) == 5


def test_no_network_at_all(place, monkeypatch):
    place.fetch(1)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(place.cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.cache))
    commits, reason = list_branches(REPO, place.said.append)
    assert "can't be reached (ConnectError" in reason and commits.keys() == {"step1"}
    found = list_files(REPO, commits, place.cache, offline=True)
    place.assert_whole(1, fetch(REPO, "step1", found["step1"], place.cache, offline=reason))
    (place.cache / "models--org--toy" / "snapshots" / commits["step1"] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="ConnectError.*step1 lacks model.safetensors in the cache"):
        fetch(REPO, "step1", found["step1"], place.cache, offline=reason)


def test_offline_without_our_listings_the_cache_says_what_it_holds(place, monkeypatch):
    import shutil

    place.fetch(1)
    shutil.rmtree(Path(os.environ["TRACKER_CACHE"]))
    found = list_files(REPO, list_branches(REPO)[0], place.cache, offline=True)
    (weights,) = found["step1"].weights
    assert found.keys() == {"step1"} and weights.sha256 == blob(place.published(1) / "model.safetensors")


FETCH = """
import sys
from checkpoints.hub import CheckpointError, list_branches, list_files
from checkpoints.fetch import fetch
from pathlib import Path
cache = Path(sys.argv[1])
for step in sys.argv[2:]:
    try:
        listing = list_files("org/toy", {step: list_branches("org/toy")[0][step]}, cache)[step]
        print(step, fetch("org/toy", step, listing, cache))
    except CheckpointError as error:
        print(step, error)
"""


def process(place: Place, *steps: str, within: Sequence[str] = ()) -> subprocess.Popen:
    environment = {**os.environ, **place.server.environment, "TRACKER_CACHE": str(place.cache.parent / "ours")}
    command = [*within, sys.executable, "-c", FETCH, str(place.cache), *steps]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


AT_ONCE = """
import sys, threading
from pathlib import Path
from checkpoints.fetch import fetch
from checkpoints.hub import list_branches, list_files

cache = Path(sys.argv[1])
commits = list_branches("org/toy")[0]
found = list_files("org/toy", commits, cache)
print("ready", flush=True)
for line in sys.stdin:
    step = line.strip()
    threads = [threading.Thread(target=fetch, args=("org/toy", step, found[step], cache)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(step, flush=True)
"""


def test_walks_of_several_stores_fetch_the_same_revision_into_one_cache_at_once(place):
    environment = {**os.environ, **place.server.environment, "TRACKER_CACHE": str(place.cache.parent / "ours")}
    command = [sys.executable, "-c", AT_ONCE, str(place.cache)]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    walks = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(4)]
    for walk in walks:
        walk.stdout.readline()
    for step in STEPS:
        for walk in walks:
            print(f"step{step}", file=walk.stdin, flush=True)
        for walk in walks:
            walk.stdout.readline()
    for walk in walks:
        _, err = walk.communicate(timeout=60)
        assert walk.returncode == 0 and "Traceback" not in err, err
    for step in STEPS:
        place.assert_whole(step, cached_snapshot(REPO, f"step{step}", place.cache))
    assert not list(place.cache.parent.rglob("*.tmp"))


def test_a_reference_that_is_being_written_is_no_branch(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.cache))
    place.fetch(1)
    references = place.cache / "models--org--toy" / "refs"
    (references / ".step1.1-1-0123456789abcdef.tmp").write_text((references / "step1").read_text())
    place.server.fail(".*refs", status=503, times=1000)
    assert list(list_branches(REPO, place.said.append)[0]) == ["step1"]


def test_a_full_disk(place):
    """The kernel refuses to write more than 200 kB to any file, as a full disk would."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
    try:
        full = process(place, "step1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "step1 does not fit on the disk of" in full.communicate()[0]
    place.assert_whole(1, place.fetch(1))


def test_a_cache_that_can_not_be_written_to(place):
    directory = place.fetch(1)
    read_only = f"mount --bind {place.cache} {place.cache} && mount -o remount,ro,bind {place.cache}"
    if subprocess.run(["unshare", "-m", "sh", "-c", read_only], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    said = process(place, "step1", "step2", within=["unshare", "-m", "sh", "-c", read_only + ' && exec "$@"', "sh"])
    first, second = said.communicate()[0].splitlines()
    assert first == f"step1 {directory}"
    assert "step2 is not in the cache" in second and "can't be written to; set HF_HUB_CACHE" in second
    place.assert_whole(2, place.fetch(2))


def test_killed_at_any_moment_it_is_completed(place):
    place.server.fail("GET .*model.safetensors", slow=0.02, times=1000)
    for moment in (0.4, 0.5, 0.6, 0.7, 0.8):
        running = process(place, "step0", "step1", "step2", "step4")
        try:
            running.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
    place.server.faults.clear()
    # Before any is looked at: the kills may have left parts of several.
    for step, directory in {step: place.fetch(step) for step in STEPS}.items():
        place.assert_whole(step, directory)


def used(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.rglob("*") if file.is_file() and not file.is_symlink())


def test_a_disk_budget_is_kept_by_evicting_what_was_fetched_here(place):
    theirs = place.fetch(0)  # by whoever used the cache before
    commits, _ = list_branches(REPO)
    found = list_files(REPO, commits, place.cache)
    before = used(place.cache)
    disk = DiskBudget(place.cache, budget=2 * SIZE + 1000)
    for step in (1, 2, 4):
        use = disk.try_reserve(REPO, found[f"step{step}"])
        assert use is not None
        place.assert_whole(step, place.fetch(step, commits))
        assert used(place.cache) - before <= 2 * SIZE + 3000 and disk.used_bytes() <= 2 * SIZE + 1000
        use.release()
    directories = {step: place.cache / "models--org--toy" / "snapshots" / commits[f"step{step}"] for step in STEPS}
    assert [step for step in STEPS if directories[step].exists()] == [0, 2, 4]  # the oldest of ours went
    place.assert_whole(0, theirs)
    assert not (place.cache / "models--org--toy" / "refs" / "step1").exists()


def test_what_is_in_use_is_not_evicted(place):
    commits, _ = list_branches(REPO)
    found = list_files(REPO, commits, place.cache)
    mine, others = DiskBudget(place.cache, budget=SIZE + 1000), DiskBudget(place.cache, budget=SIZE + 1000)
    use = mine.try_reserve(REPO, found["step1"])
    directory = place.fetch(1, commits)
    assert others.try_reserve(REPO, found["step2"]) is None
    place.assert_whole(1, directory)
    use.release()
    assert others.try_reserve(REPO, found["step2"]) is not None and not directory.exists()


def test_what_a_killed_process_began_can_be_evicted(place):
    commits, _ = list_branches(REPO)
    found = list_files(REPO, commits, place.cache)
    disk = DiskBudget(place.cache, budget=SIZE + 1000)
    disk.try_reserve(REPO, found["step1"]).release()
    (weights,) = found["step1"].weights
    left = partial_file(place.cache / "models--org--toy" / "blobs" / weights.sha256)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert disk.try_reserve(REPO, found["step2"]) is not None
    assert not left.exists()


def test_a_revision_beyond_the_whole_budget(place):
    found = list_files(REPO, list_branches(REPO)[0], place.cache)
    with pytest.raises(CheckpointError, match="more than the whole --disk_budget of 0.0001 GB"):
        DiskBudget(place.cache, budget=100_000).try_reserve(REPO, found["step1"])
    assert missing_files(place.cache, found["step1"])
