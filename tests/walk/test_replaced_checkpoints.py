"""Checkpoints that change while a walk measures them: no unit has numbers, hashes and fingerprint of different files."""

import json
import os
import shutil
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch

import tracker
from checkpoints.integrity import unchanged
from tests.walk.test_walk import commit, snapshots
from tests.walk.test_walk_hub import Toy
from tracker import pythia
from tracker.common.errors import CheckpointError
from tracker.store import Store
from tracker.walk import units

MEASURED = "was {} while this checkpoint was measured, and its results are not kept"


@pytest.fixture
def runs(suite, tmp_path) -> Path:
    """A directory of two checkpoints, and step 2 beside it."""
    for step in (8, 16):
        shutil.copytree(snapshots(suite) / commit(suite, min(step, 8)), tmp_path / "runs" / f"step{step}")
    shutil.copytree(snapshots(suite) / commit(suite, 2), tmp_path / "step2")
    return tmp_path / "runs"


def before_the_first_measurement(monkeypatch, act):
    """Call `act` when the first checkpoint is loaded and its weights are hashed."""
    measure, waiting = units._measure, [act]

    def measure_later(*arguments):
        if waiting:
            waiting.pop()()
        return measure(*arguments)

    monkeypatch.setattr(units, "_measure", measure_later)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["overwritten", "cut short"])
def test_a_checkpoint_that_changes_while_it_is_measured_fails_alone(change, walker, runs, monkeypatch, capsys):
    """A file cut short would end the process by SIGBUS, without a word, if its original were mapped."""
    file, other = runs / "step8" / "model.safetensors", runs.parent / "step2"

    def act():
        before = file.stat()
        if change == "cut short":
            return os.truncate(file, 5000)
        with open(file, "r+b") as handle:
            handle.write((other / file.name).read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of its last change stays

    before_the_first_measurement(monkeypatch, act)
    assert pythia.main(walker.arguments(model=str(runs))) == 1
    assert Store(walker.directory / "out").steps() == [16]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert line.startswith(f"failed: step 8: {file.parent}") and MEASURED.format("changed") in line
    if change == "overwritten":  # the same command measures the new weights
        assert pythia.main(walker.arguments(model=str(runs))) == 0
        assert pythia.main(walker.arguments("--out", str(runs.parent / "alone"), model=str(other))) == 0
        found, expected = Store(walker.directory / "out").read(8), Store(runs.parent / "alone").read(2)
        for name in ("miscoupling", "fingerprint", "files_sha256"):
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.slow
def test_a_directory_deleted_before_its_turn_is_named(walker, runs, monkeypatch, capsys):
    before_the_first_measurement(monkeypatch, lambda: shutil.rmtree(runs / "step16"))
    assert pythia.main(walker.arguments(model=str(runs))) == 1
    assert f"failed: step 16: {runs / 'step16'} is not there any more: restore it" in capsys.readouterr().err
    assert Store(walker.directory / "out").steps() == [8]


@pytest.mark.slow
def test_a_lightning_checkpoint_that_is_saved_again_fails_alone(walker, tmp_path, monkeypatch, capsys):
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    run = tmp_path / "run"
    for step in (10, 200, 3):
        trainer.strategy.connect(Toy(32))
        trainer.save_checkpoint(run / f"step={step}.ckpt", weights_only=True)
    (other := run / "step=3.ckpt").rename(tmp_path / "other")
    torch.save(torch.randint(320, (2, 8)), tmp_path / "inputs.pt")
    before_the_first_measurement(monkeypatch, lambda: shutil.copyfile(tmp_path / "other", run / "step=10.ckpt"))
    flags = ("--module", "tests.walk.test_walk_hub:Toy", "--inputs", str(tmp_path / "inputs.pt"))
    assert not other.exists() and pythia.main(walker.arguments(*flags, model=str(run))) == 1
    assert f"{run / 'step=10.ckpt'} {MEASURED.format('changed')}" in capsys.readouterr().err
    assert Store(walker.directory / "out").steps() == [200]


@pytest.mark.slow
@pytest.mark.parametrize("edit", [lambda content: content | {"dtype": "float64"}, None], ids=["changed", "removed"])
def test_settings_that_change_during_a_walk_leave_it_without_a_page(edit, walker, runs, monkeypatch, capsys):
    """Nobody but a walk respects the lock on them; the page would state settings that nothing was measured with."""
    store = Store(walker.directory / "out")

    def change():
        if edit is None:
            store.settings.unlink()
        else:
            store.settings.write_text(json.dumps(edit(store.read_settings())))

    before_the_first_measurement(monkeypatch, change)
    assert pythia.main(walker.arguments(model=str(runs))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("no page: ") and ("settings.json was changed" if edit else "no readable settings.json") in line
    )
    assert store.steps() == [8, 16] and not (store.path / "report.html").exists()


def test_what_loading_reads_may_not_change_and_other_files_may(tmp_path):
    weights, tokenizer, optimizer = (
        tmp_path / name for name in ("model.safetensors", "tokenizer.json", "optimizer.pt")
    )
    for file in (weights, tokenizer, optimizer, tmp_path / "other"):
        file.write_text("the same")
    with unchanged(tmp_path):
        optimizer.write_text("later")
        (tmp_path / "added.json").write_text("{}")
    for file in (weights, tokenizer):
        with pytest.raises(CheckpointError, match=rf"{file} was changed"), unchanged(tmp_path):
            os.replace(shutil.copy(file, tmp_path / "new"), file)  # saved again, with the same content
    with pytest.raises(CheckpointError, match=r"model.safetensors was changed"), unchanged(tmp_path):
        weights.unlink()
        weights.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"tokenizer.json was deleted"), unchanged(tmp_path):
        tokenizer.unlink()
        raise ValueError("what the missing file leads to")
    with pytest.raises(ValueError, match="of something else"), unchanged(tmp_path):
        raise ValueError("of something else")


@pytest.mark.slow
def test_tokenizers_that_make_other_ids_of_the_prompts_are_named(walker, runs, capsys):
    """The ids of two tokens are exchanged in step 24's tokenizer: lengths and texts of prompts are the same."""
    out = walker.directory / "out"
    assert pythia.main(walker.arguments("--steps", "8", model=str(runs))) == 0
    assert tracker.open_results(out).attrs["token_ids_sha256"]
    shutil.copytree(runs / "step16", runs / "step24")
    file = runs / "step24" / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    first, second = "m", "p"  # of "import"
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert pythia.main(walker.arguments(model=str(runs))) == 0
    printed = capsys.readouterr().out
    ds = tracker.open_results(out)
    hashes = ds["token_ids_sha256"]
    assert hashes[0] == hashes[1] != hashes[2] and hashes.attrs["long_name"].startswith("hash of the token ids")
    assert "inputs_sha256" in ds.attrs
    said = (
        "The prompts have other token ids at step 24 than at the other steps: the tokenizers of the checkpoints differ"
    )
    assert f"note: {said}" in printed and said in (out / "report.html").read_text()
    notes = tracker.summary(ds).attrs["notes"]
    assert any(note.startswith(said) for note in notes), notes
