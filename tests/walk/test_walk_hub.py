"""Tests of walks over a served suite with planted faults, of walks that share a store, and of other checkpoint sources."""

import os
import random
import shutil
import signal
from html import unescape

import pytest

import tracker
from tests.support import processes
from tests.support.shards import SHARDS, plant
from tests.support.stopped_walks import start_and_stay_at_the_second
from tests.support.stores import assert_same_results
from tests.support.suite import STEPS, checkpoint_of, commit, snapshots
from tracker.store import Store
from tracker.walk import units


@pytest.mark.slow
def test_suspect_revisions_are_left_out_before_any_download(walker, served, capsys):
    plant(served.root, 2, *SHARDS)
    plant(served.root, 4, SHARDS[0])
    assert walker.main() == 0
    out = capsys.readouterr().out
    assert "step       2  its weights are identical to those of step 4, 8" in out
    assert "step       4  its shards (1 of 2) are identical to those of step 2, 8" in out
    assert "2 of the selected revisions are suspect; they are left out" in out
    assert walker.store.steps() == [0, 1, 8]
    for step in (2, 4):
        assert not served.requested(commit(served.root, step) + "/.*safetensors")
    # With --allow_suspect they are measured, and marked
    assert walker.main("--allow_suspect", "true") == 0
    assert "note: steps 2 and 8 hold the same weights in every tensor" in capsys.readouterr().out
    ds = tracker.open_results(walker.out)
    assert [bool(reason) for reason in ds.suspect.values] == [False, False, True, True, False]
    assert list(ds.repeats.values) == [-1, -1, -1, -1, 2]
    assert "Steps 2 and 8 hold the same weights" in (walker.out / "report.html").read_text()


def test_a_repository_without_a_tokenizer_is_refused_before_any_download(walker, served, capsys):
    for file in served.root.rglob("tokenizer*"):
        file.unlink()
    assert walker.main() == 2 and not served.requested("safetensors")
    assert "block-coupling/nano has no tokenizer; add --tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_faults_are_retried_or_reported_and_other_revisions_measured(walker, served, capsys):
    """With room for two checkpoints. More faults: test_fetch."""
    served.fail(f"GET .*{commit(served.root, 4)}/{SHARDS[0]}", status=503, times=2)
    served.fail(f"GET .*{commit(served.root, 2)}/{SHARDS[1]}", content=lambda b: b[::-1], times=2)
    of_one = sum(f.stat().st_size for f in checkpoint_of(served.root, 0).iterdir())
    budget, store = ("--disk_budget", f"{2.2 * of_one:.0f}B"), walker.store
    page = store.path / "report.html"
    assert walker.main(*budget) == 1
    out, err = capsys.readouterr()
    assert "failed: step 2: model-00002" in err and "Traceback" not in err
    assert "503 Service Unavailable" in out
    assert store.steps() == [0, 1, 4, 8] and "model-00002" in store.skipped()[2]
    assert "No results of step 2: model-00002" in unescape(page.read_text())
    assert walker.main(*budget) == 0
    assert not store.skipped() and "No results of" not in page.read_text()
    assert store.steps() == STEPS
    assert len(list(snapshots(walker.directory / "cache").iterdir())) == 2


@pytest.mark.slow
def test_next_revision_is_fetched_while_one_is_measured(walker, served, monkeypatch):
    """The first waits for the second, and that for the third."""
    following, measure = {0: 1, 1: 2}, units.measure_checkpoint

    def watched(plan, checkpoint, directory):
        if (step := following.get(checkpoint.step)) is not None:
            request = f"GET .*{commit(served.root, step)}/{SHARDS[1]}"
            processes.wait_until(lambda: served.requested(request))
        return measure(plan, checkpoint, directory)

    monkeypatch.setattr(units, "measure_checkpoint", watched)
    assert walker.main("--steps", "0,1,2") == 0
    assert walker.store.steps() == [0, 1, 2]


@pytest.mark.slow
def test_offline_walk_measures_the_cached_revisions(walker, served, capsys, monkeypatch):
    assert walker.main("--steps", "0") == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert walker.main("--out", str(walker.directory / "again")) == 0
    assert "offline mode is on" in capsys.readouterr().out


@pytest.mark.slow
def test_files_that_are_damaged_in_the_cache_are_downloaded_again(walker, served, capsys):
    assert walker.main("--steps", "0,1") == 0
    asked, directory = len(served.requested("resolve")), walker.directory
    for step, name in ((0, "config.json"), (1, SHARDS[1])):
        file = checkpoint_of(directory / "cache", step) / name
        file.write_bytes(file.read_bytes()[::-1])
    again = ("--steps", "0,1", "--out", str(directory / "again"))
    assert walker.main(*again) == 0
    out = capsys.readouterr().out
    assert "step 0: config.json is damaged in the cache" in out
    assert f"step 1: {SHARDS[1]} is damaged in the cache" in out
    assert len(served.requested("resolve")) == asked + 2
    assert_same_results(walker.out, directory / "again")


def test_a_hub_that_does_not_answer_is_stated_once(walker, served, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert walker.main(model="70m") == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "the hub can't be reached (ConnectError" in line and "no checkpoint is complete" in line
    assert "HF_HUB_CACHE" in line and "--model nano" in line
    assert printed.out and all("trying again" in line for line in printed.out.splitlines())


@pytest.mark.slow
def test_without_the_hub_cached_revisions_are_measured_and_the_others_are_one_line(
    walker, served, capsys, monkeypatch
):
    assert walker.main("--steps", "0,2") == 0
    for step in (1, 4, 8):
        (snapshots(walker.directory / "cache").parent / "refs" / f"step{step}").write_text(
            commit(served.root, step)
        )
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    again = walker.directory / "again"
    assert walker.main("--out", str(again)) == 1
    assert Store(again).steps() == [0, 2] and (again / "report.html").exists()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(
        "failed: 3 steps (1, 4, 8), the last: block-coupling/nano at step8 lacks "
    )
    assert f"No results of {line.removeprefix('failed: ')}" in unescape(
        (again / "report.html").read_text()
    )
    assert "FAILED" not in printed.out and printed.out.count("note: can't get the branches") == 1


@pytest.mark.slow
def test_a_hub_that_fails_during_the_walk_is_stated_once(walker, served, capsys):
    """Each revision is tried: the hub may come back."""
    served.fail("GET .*safetensors", status=503, times=10_000)
    assert walker.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: 5 steps (0, 1, 2, 4, 8), the last: can't get model")
    assert "503" in line


@pytest.mark.slow
def test_measured_revision_that_the_hub_no_longer_lists_is_kept(walker, served, capsys, tmp_path):
    """Its weights are no longer in the cache either, so nothing tells whether they have changed."""
    assert walker.main("--steps", "0,1") == 0
    shutil.rmtree(tmp_path / "ours")
    for file in (snapshots(tmp_path / "cache") / commit(served.root, 1)).glob("*.safetensors"):
        file.unlink()
    served.fail(f"GET /api/models/.*/revision/{commit(served.root, 1)}", status=204, times=1000)
    assert walker.main("--steps", "0,1") == 0
    out, err = capsys.readouterr()
    assert "step1 can't be compared with the others; step1: can't get the files of" in out
    assert not err
    assert walker.main("--steps", "1", "--out", str(tmp_path / "other")) == 1
    assert capsys.readouterr().err.startswith(
        "failed: step 1: can't get the files of block-coupling/nano at "
    )


@pytest.mark.slow
def test_two_walks_share_a_store_and_one_finishes_for_the_killed_other(walker):
    first = start_and_stay_at_the_second(walker)  # and has claimed the third, to fetch it
    second = walker.start()
    measured = []
    for line in second.stdout:
        measured += [line] if ": measured  (" in line else []
        if line.startswith("step 1: measured by "):
            assert f"process {first.pid}, " in line and line.endswith("; waiting for it\n")
            break
    assert len(measured) == 2 and walker.store.steps() == [0, 4, 8]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert walker.store.steps() == STEPS
    measured += [line for line in out.splitlines() if ": measured  (" in line]
    assert len(measured) == 4
    assert not list(walker.store.units.glob(".*"))


KILLED_BY_A_CHANGE = """
import atexit, os, signal, sys
changes = []

def hook(event, arguments):
    if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        return
    if event in ("open", "os.truncate", "os.rename", "os.link", "os.symlink", "os.remove"):
        changes.append(event)
        if len(changes) == {last}:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
atexit.register(lambda: print("changes:", len(changes)))
"""


def is_killed(process) -> bool:
    """Wait for a walk that ends well, unless it is killed."""
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode != 0


@pytest.mark.slow
def test_walks_killed_again_and_again_give_an_uninterrupted_walks_results(walker, served, tmp_path):
    """Two walks at a time work on one store, and each is killed by a random one of its changes to files.

    KILLS=20 kills more of them.
    """
    kills = int(os.environ.get("KILLS", "4"))
    environment = {**served.environment, "TRACKER_CACHE": str(tmp_path / "ours")}
    walker.cache = tmp_path / "uninterrupted-cache"
    before = KILLED_BY_A_CHANGE.format(last=0)
    status, out, err = walker.run(
        "--out", str(tmp_path / "uninterrupted"), before=before, **environment
    )
    assert status == 0, err
    changes = int(out.splitlines()[-1].removeprefix("changes: "))
    walker.cache = tmp_path / "killed-cache"
    store = walker.store
    found, random_, killed = [], random.Random(0), 0
    while killed < kills or not any(found):
        last = [random_.randint(1, changes // 2) for _ in range(2)]  # as they share the work
        both = [
            walker.start(before=KILLED_BY_A_CHANGE.format(last=last[i]), **environment)
            for i in range(2)
        ]
        killed += sum(map(is_killed, both))
        found.append(len(store.steps()))
        # The next ones must have something left to fetch and to measure
        if found[-1] == len(STEPS):
            shutil.rmtree(walker.cache)
            for step in STEPS[1:]:
                store.file(step).unlink()
    both = [walker.start(**environment) for _ in range(2)]
    assert not any(map(is_killed, both))
    assert_same_results(walker.out, tmp_path / "uninterrupted")
    assert not [name for name in os.listdir(walker.out / "units") if name.startswith(".")]
