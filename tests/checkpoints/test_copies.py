"""Copies of checkpoints: what is copied and where to, and the removal of those that killed processes left."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from checkpoints import copies
from checkpoints.copies import LOCK, PREFIX, load_copy, sweep
from checkpoints.integrity import files_digest
from checkpoints.suites import find_suite
from tests.support.failing_files import FAILING, failures
from tests.support.files import contents, holding
from tracker.common import files
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock

READ = ("model.safetensors", "config.json", "tokenizer.json", "vocab.txt")
NOT_READ = (
    "optimizer.bin",
    "training_args.bin",
    "rng_state_0.pth",
    "trainer_state.json",
    "train_log.txt",
)


@pytest.fixture
def run(tmp_path) -> Path:
    """A checkpoint with files that loading does not read."""
    run = tmp_path / "runs" / "step8"
    run.mkdir(parents=True)
    for name in (*READ, *NOT_READ):
        (run / name).write_text(name)
    return run


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    (directory := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def test_what_loading_reads_is_copied_and_the_copy_is_removed(run, temporary):
    loaded = []

    def load(copy: Path) -> dict[str, str]:
        loaded.append(copy)
        assert copy.name == "step8" and copy.is_relative_to(temporary)
        assert {file.name for file in copy.iterdir() if not file.is_symlink()} == {*READ}
        return {file.name: file.read_text() for file in copy.iterdir()}

    assert load_copy(load, run)[0] == {name: name for name in (*READ, *NOT_READ)}

    def refuse(copy: Path):
        raise CheckpointError(f"the weights in {copy} do not fit")

    with pytest.raises(CheckpointError, match=f"^the weights in {run} do not fit$"):
        load_copy(refuse, run)
    assert not loaded[0].exists() and not any(temporary.iterdir())


@pytest.mark.parametrize("name", ["weights.pt", "epoch=0-step=8.ckpt"])
def test_a_link_is_loaded_from_a_copy_of_its_own_name(name, tmp_path, temporary):
    (tmp_path / "3f9a").write_text("weights")
    (file := tmp_path / name).symlink_to(tmp_path / "3f9a")

    def load(copy: Path) -> str:
        file.unlink()
        assert copy.name == name
        return copy.read_text()

    assert load_copy(load, file) == ("weights", hashlib.sha256(b"weights").hexdigest()[:16])
    assert not any(temporary.iterdir())


def test_all_that_the_users_code_may_read_of_a_directory_is_copied_and_hashed(tmp_path, temporary):
    """Also behind links, of which one leads back."""
    (run := tmp_path / "step8").mkdir()
    (scratch := tmp_path / "scratch").mkdir()
    (run / "model").symlink_to(scratch)
    (scratch / "above").symlink_to(run)
    for name in (
        "config.yaml",
        "model/weights.npz",
        "model/train.log",
        "optimizer.pt",
        "ema.pt",
        "model.safetensors",
    ):
        (run / name).write_text(name)

    def load(copy: Path) -> str:
        (run / "model" / "weights.npz").write_text("written while it is loaded")
        assert (copy / "model" / "train.log").is_symlink() and (copy / "optimizer.pt").is_symlink()
        return (copy / "model" / "weights.npz").read_text()

    digests = []
    for changed in ("model/weights.npz", "ema.pt", "config.yaml", "model.safetensors"):
        (run / "model" / "weights.npz").write_text("model/weights.npz")
        (run / changed).write_text("other weights")
        digest = files_digest(run, own_code=True)
        assert load_copy(load, run, own_code=True) == (
            "other weights" if changed == "model/weights.npz" else "model/weights.npz",
            digest,
        )
        digests.append(digest)
    assert len(set(digests)) == 4
    for unread in ("model/train.log", "optimizer.pt", "new.txt"):
        before = files_digest(run, own_code=True)
        (run / unread).write_text("another line")
        assert files_digest(run, own_code=True) == before


@pytest.mark.parametrize("error", [FAILING, KeyboardInterrupt])
def test_a_copy_whose_removal_is_cut_short_is_removed_by_the_next_walk(temporary, error):
    """The lock goes last: without it nobody knows what the rest is."""

    def leave():
        holding(temporary / f"{PREFIX}1", LOCK, "step8/model.safetensors", "step8/config.json")

    leave()
    for _ in failures(lambda: sweep([]), temporary, error):
        sweep([])
        assert not any(temporary.iterdir())
        leave()


def test_a_copy_that_fails_at_any_operation_is_refused_and_removed(run, temporary):
    """A disk that fails; a hash that can't be noted is no failure."""
    cache, before = run.parents[1] / "cache", contents(run)

    def load():
        shutil.rmtree(cache, ignore_errors=True)
        load_copy(lambda copy: None, run)

    for operation, raised in failures(load, run, FAILING):
        assert operation == "os.listdir" or f"{run} can't be copied to {temporary}" in str(raised)
        assert isinstance(raised, CheckpointError | OSError) and not any(temporary.iterdir())
        assert contents(run) == before
    for _, raised in failures(load, cache / "block-coupling-tracker", FAILING):
        assert raised is None and not any(temporary.iterdir())


def test_a_copy_without_space_is_refused(run, temporary):
    with open(run / "model.safetensors", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(
        CheckpointError,
        match=r"no space for its 8.8 TB in .*temporary .* and .*/runs .* set TMPDIR",
    ):
        load_copy(Path.iterdir, run)


def when_copied(name, monkeypatch, act):
    """Call `act` when a file has been copied."""
    copy = copies.shutil.copyfile

    def copy_then_act(file: Path, its_copy: Path):
        copy(file, its_copy)
        if file.name == name:
            monkeypatch.setattr(copies.shutil, "copyfile", copy)
            act()

    monkeypatch.setattr(copies.shutil, "copyfile", copy_then_act)


@pytest.mark.parametrize("name", READ)
def test_a_file_that_changes_while_it_is_copied_is_named(name, run, temporary, monkeypatch):
    file, before = run / name, (run / name).stat()

    def change():
        file.write_text(name.upper())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    when_copied(name, monkeypatch, change)
    with pytest.raises(
        CheckpointError, match=f"{file} was changed while it was copied, and this checkpoint is not"
    ):
        load_copy(lambda copy: None, run)


def test_what_does_not_change_what_is_read_is_no_change(run, temporary, monkeypatch):
    weights = run / "model.safetensors"

    def touch():
        (run / "train_log.txt").write_text("another line")
        (run / "optimizer.bin").write_text("later")
        (run / "added.json").write_text("{}")
        weights.chmod(0o600)
        os.link(weights, run / "link")
        shutil.copyfile(run / "config.json", new := run / "new")
        os.replace(new, run / "config.json")  # saved again, with the same content

    digest = files_digest(run)
    when_copied("vocab.txt", monkeypatch, touch)
    assert load_copy(lambda copy: None, run) == (None, digest)


def test_the_hash_of_a_copied_file_is_noted(run, temporary, monkeypatch):
    _, digest = load_copy(lambda copy: None, run)
    read = []
    monkeypatch.setattr(files, "hash_file", lambda file: read.append(file) or "0" * 64)
    assert files_digest(run) == digest and not read
    (run / "model.safetensors").chmod(0o600)
    assert files_digest(run) != digest and read == [run / "model.safetensors"]


def is_in_memory(path: Path) -> bool:
    """Ask another program."""
    return (
        subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True).stdout
        == "tmpfs\n"
    )


@pytest.fixture
def in_memory(monkeypatch):
    """A directory in memory as `TMPDIR`."""
    if not is_in_memory(Path("/dev/shm")):
        pytest.skip("Linux's /dev/shm is not there, or on a disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def test_a_copy_goes_beside_the_checkpoint_where_the_temporary_directory_is_in_memory(
    run, in_memory, monkeypatch
):
    if is_in_memory(run):
        pytest.skip("this system has the directories of tests in memory")
    (link := run.parent.parent / "link").symlink_to(run)

    def load(copy: Path) -> Path:
        assert find_suite(str(run.parent)).checkpoints[0].source == str(run), (
            "the copy is taken for a checkpoint"
        )
        return copy.parents[1]

    for source in (run, link):
        assert load_copy(load, source)[0] == run.parent
    assert [file.name for file in run.parent.iterdir()] == ["step8"]
    monkeypatch.setattr(copies.os, "access", lambda *_: False)
    with pytest.warns(
        UserWarning, match=f"{in_memory} is in memory, .* set TMPDIR to a directory on a disk"
    ):
        assert load_copy(lambda copy: copy.parents[1], run)[0] == in_memory


def test_a_copy_goes_beside_the_checkpoint_where_the_temporary_directory_is_too_small(
    run, temporary, monkeypatch
):
    usage = copies.shutil.disk_usage

    def full(place: Path):
        return usage(place)._replace(free=10 if place == temporary else 1000)

    monkeypatch.setattr(copies.shutil, "disk_usage", full)
    assert load_copy(lambda copy: copy.parents[1], run)[0] == run.parent


def test_copies_are_no_checkpoints_and_what_two_links_lead_to_is_one(tmp_path):
    for name in ("scratch/epoch=0-step=8.ckpt", f"run/{PREFIX}x/step=8.ckpt"):
        holding(tmp_path, name, f"{Path(name).parent}/step8/config.json")
    for name in ("first", "second"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "scratch")
    (tmp_path / "run" / "step9").symlink_to(tmp_path / "scratch" / "step8")
    assert find_suite(str(tmp_path / "run"), lightning=True).steps == (8,)
    assert find_suite(str(tmp_path / "run")).steps == (9,)


def test_copies_that_nobody_holds_are_removed_and_nothing_else(run, temporary):
    left = holding(temporary / f"{PREFIX}of_a_killed_process", LOCK, "step8/model.safetensors")
    beside = holding(run.parent / f"{PREFIX}beside", LOCK)
    (empty := temporary / f"{PREFIX}before_the_lock").mkdir()
    # Without a lock, nobody knows what this is
    foreign = holding(temporary / f"{PREFIX}of_others", "notes.txt")
    (link := temporary / f"{PREFIX}link").symlink_to(run)

    def load(copy: Path):
        sweep([run])
        assert copy.exists() and not any(file.exists() for file in (left, empty, beside))

    load_copy(load, run)
    assert (foreign / "notes.txt").exists() and link.is_symlink()
    assert {file.name for file in run.iterdir()} == {*READ, *NOT_READ}


def test_copies_are_kept_where_locks_do_not_tell_whether_they_are_used(run, temporary, monkeypatch):
    def load(copy: Path):
        sweep([run])
        assert copy.exists()

    monkeypatch.setattr("tracker.common.files._flock", lambda *_: False)
    load_copy(load, run)


def test_a_copy_is_made_while_another_process_sweeps(run, temporary, monkeypatch):
    """The sweep takes the lock, or removes the directory, before its maker has the lock."""
    take, waiting = Lock.take, ["take the lock", "remove the directory"]

    def late(file: Path):
        if waiting and file.parent.parent == temporary:
            if waiting.pop() == "remove the directory":
                file.parent.rmdir()
            else:
                other = take(file)
                assert other and take(file) is None
                monkeypatch.setattr(Lock, "kept", other, raising=False)
        return take(file)

    monkeypatch.setattr(Lock, "take", late)
    assert load_copy(lambda copy: copy.name, run)[0] == "step8" and not waiting
