"""One malformed checkpoint does not stop the others, and no code of a checkpoint runs."""

import io
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.walk.malformed import FAULTS, with_code
from tests.walk.test_walk import STEPS, commit, snapshots
from tracker import pythia
from tracker.store.results import Store

SOUND = (1, 1000)  # before and after the malformed ones
STEP_OF = {name: step for step, name in enumerate(FAULTS, SOUND[0] + 1)}


def copy_of(suite: Path, directory: Path) -> Path:
    """Copy a sound checkpoint."""
    return shutil.copytree(snapshots(suite) / commit(suite, STEPS[-1]), directory)


def walk(directory: Path, *options: str) -> int:
    """Walk over the checkpoints in a directory; return the exit status."""
    prompts = directory / "prompts.txt"
    prompts.write_text("import os\nfor name in sorted(names)\n")
    given = ["--model", str(directory), "--prompts", str(prompts), "--k", "2", "--measures", "coupling"]
    return pythia.main([*given, "--out", str(directory / "out"), "--loggers=", "--device", "cpu", *options])


@pytest.fixture(scope="module")
def walked(suite, tmp_path_factory):
    """Walk over a directory with all malformed checkpoints between two sound ones; someone types "y" all the time."""
    directory = tmp_path_factory.mktemp("malformed")
    for step in (*SOUND, *STEP_OF.values()):
        copy_of(suite, directory / f"step{step}")
    for name, (change, _) in FAULTS.items():
        change(directory / f"step{STEP_OF[name]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("y\n" * 100))
        patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))  # it refuses half of a surrogate pair
        patch.setattr("sys.stderr", err := io.StringIO())
        started = time.monotonic()
        status = walk(directory)
    return directory, status, err.getvalue(), time.monotonic() - started


@pytest.mark.slow
def test_the_sound_checkpoints_are_measured(walked):
    directory, status, err, seconds = walked
    assert status == 1 and "Traceback" not in err
    assert Store(directory / "out").steps() == list(SOUND)
    assert (directory / "out" / "report.html").exists()
    assert seconds < 120


def test_code_of_a_tokenizer_that_is_not_needed_is_not_run(suite, tmp_path):
    """transformers has a class for tokenizer.json, and takes it in place of the checkpoint's own."""
    checkpoint = copy_of(suite, tmp_path / "step1")
    mapped = {"AutoTokenizer": [None, "foreign.Tokenizer"]}
    with_code("tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=mapped)(checkpoint)
    assert walk(tmp_path) == 0 and not (checkpoint / "executed").exists()


@pytest.mark.slow
def test_debug_prints_the_traceback_of_a_failed_revision(suite, tmp_path, capsys):
    FAULTS["no heads"][0](copy_of(suite, tmp_path / "step1"))
    assert walk(tmp_path) == 1 and "Traceback" not in capsys.readouterr().err
    assert walk(tmp_path, "--debug") == 1 and "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_directory_whose_name_is_no_text(suite, tmp_path, capsys):
    copy_of(suite, tmp_path / "step1")
    copy_of(suite, tmp_path / os.fsdecode(b"step2\xff"))
    assert walk(tmp_path) == 1
    assert Store(tmp_path / "out").steps() == [1] and (tmp_path / "out" / "report.html").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: step 2: ") and "is not valid UTF-8" in line


@pytest.mark.slow
def test_a_unit_of_another_model_leaves_the_walk_without_a_page(suite, tmp_path, capsys, monkeypatch):
    copy_of(suite, tmp_path / "step1")
    store = Store(tmp_path / "out")

    def add_other(fingerprints):
        other = store.read(1).assign_coords(step=2)
        store.write(2, other.isel(layer=slice(2), layer_other=slice(2)))

    monkeypatch.setattr(pythia, "print_repeats", add_other)
    assert walk(tmp_path) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no page: ") and "number of blocks (2, 3)" in line
    assert walk(tmp_path) == 2
    assert "remove the units of one kind" in capsys.readouterr().err


@pytest.mark.slow
def test_an_option_that_no_revision_can_be_measured_with_ends_the_walk_early(suite, tmp_path, capsys):
    for step in range(1, 6):
        copy_of(suite, tmp_path / f"step{step}")
    assert walk(tmp_path, "--k", "1000") == 2
    out, err = capsys.readouterr()
    assert out.count("FAILED") == 3 and err.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_one_line_says_why(walked, name):
    directory, _, err, _ = walked
    step = STEP_OF[name]
    lines = [line for line in err.splitlines() if re.match(rf"failed: [^:]*step[^:]*\b{step}\b[^:]*:", line)]
    assert len(lines) == 1, err
    assert re.search(FAULTS[name][1], lines[0]), lines[0]
    assert not (directory / f"step{step}" / "executed").exists()
