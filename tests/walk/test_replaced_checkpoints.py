"""Checkpoints that change while a walk measures or copies them, or between walks: no unit has the hash of other files."""

import json
import os
import shutil
from pathlib import Path

import pytest

import tracker
from tests.support.stores import assert_same_results
from tests.support.suite import copied
from tracker.walk import units

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(suite, tmp_path) -> Path:
    """A directory of two checkpoints, and step 2 beside it."""
    for step in (8, 16):
        copied(suite, min(step, 8), tmp_path / "runs" / f"step{step}")
    copied(suite, 2, tmp_path / "step2")
    return tmp_path / "runs"


def before_the_first_measurement(monkeypatch, act):
    """Call `act` when the first checkpoint is loaded and its weights are hashed."""
    measure, waiting = units._measure, [act]

    def measure_later(*arguments):
        if waiting:
            waiting.pop()()
        return measure(*arguments)

    monkeypatch.setattr(units, "_measure", measure_later)


def replace(file: Path, other: Path):
    """Replace a file by another of its size, with its modification time, as `rsync -t` and archives of fixed dates do."""
    before = file.stat()
    shutil.copyfile(other, new := file.with_name("new"))
    assert new.stat().st_size == before.st_size
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(new, file)


@pytest.mark.parametrize("change", ["cut short", "deleted"])
def test_what_happens_to_a_checkpoint_while_it_is_measured_changes_no_result(
    change, walker, runs, monkeypatch, capsys
):
    """A file cut short would end the process by SIGBUS, without a word, if its original were mapped."""
    file, undisturbed = runs / "step8" / "model.safetensors", walker.directory / "undisturbed"
    assert walker.main("--out", str(undisturbed), model=str(runs)) == 0

    def act():
        if change == "cut short":
            os.truncate(file, 5000)
        else:
            shutil.rmtree(file.parent)

    before_the_first_measurement(monkeypatch, act)
    assert walker.main(model=str(runs)) == 0
    assert_same_results(walker.out, undisturbed)
    assert walker.main(model=str(runs)) == (2 if change == "cut short" else 0)
    err = capsys.readouterr().err
    assert ("retrained, or published again?" in err) == (change == "cut short")


def test_replaced_weights_of_equal_size_and_time_are_other_weights(walker, runs, capsys):
    file = runs / "step8" / "model.safetensors"
    assert walker.main(model=str(runs)) == 0
    file.chmod(0o600)
    os.link(file, runs / "kept.safetensors")
    assert walker.main(model=str(runs)) == 0
    replace(file, runs.parent / "step2" / file.name)
    assert walker.main(model=str(runs)) == 2
    assert "the weights of step 8 of" in capsys.readouterr().err
    replace(file, runs / "kept.safetensors")
    assert walker.main(model=str(runs)) == 0


@pytest.mark.parametrize(
    "edit", [lambda content: content | {"dtype": "float64"}, None], ids=["changed", "removed"]
)
def test_settings_that_change_during_a_walk_leave_it_without_a_page(
    edit, walker, runs, monkeypatch, capsys
):
    """Nobody but a walk respects the lock on them; the page would state settings that nothing was measured with."""
    store = walker.store

    def change():
        if edit is None:
            store.settings.unlink()
        else:
            store.settings.write_text(json.dumps(edit(store.read_settings())))

    before_the_first_measurement(monkeypatch, change)
    assert walker.main(model=str(runs)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no page: ")
    assert ("settings.json was changed" if edit else "no readable settings.json") in line
    assert store.steps() == [8, 16] and not (store.path / "report.html").exists()


def test_tokenizers_that_make_other_ids_of_the_prompts_are_named(walker, runs, capsys):
    """The ids of two tokens are exchanged in step 24's tokenizer: lengths and texts of prompts are the same."""
    shutil.copytree(runs / "step16", runs / "step24")
    content = json.loads((file := runs / "step24" / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["m"], words["p"] = words["p"], words["m"]  # of "import"
    file.write_text(json.dumps(content))
    assert walker.main(model=str(runs)) == 0
    ds = tracker.open_results(walker.out)
    hashes = ds["token_ids_sha256"]
    assert hashes[0] == hashes[1] != hashes[2] and "inputs_sha256" in ds.attrs
    said = "The prompts have other token ids at step 24 than at the other steps: the tokenizers of the checkpoints differ"
    assert f"note: {said}" in capsys.readouterr().out
    assert said in (walker.out / "report.html").read_text()
