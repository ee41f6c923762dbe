"""Tests of the walk's command line: real processes, the real hub client and W&B files, interrupted and killed walks."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import tracker
from checkpoints.copies import PREFIX
from checkpoints.load import load
from tests.conftest import USUAL
from tests.support.stopped_walks import start_and_stay_at_the_second
from tests.support.suite import STEPS, checkpoint_of, commit, copied
from tests.support.wandb_runs import of, offline_run, records
from tracker import pythia
from tracker.loggers.protocol import Row, select_metrics
from tracker.store import Store
from tracker.walk.display import unwritable


@pytest.mark.slow
def test_untrained_model_is_measured_as_step_0(walker, suite, tmp_path):
    """The model has one checkpoint, and its prompts have difficulties."""
    trained = copied(suite, 8, tmp_path / "trained")
    rated = tmp_path / "rated.jsonl"
    rated.write_text(
        '{"prompt": "import os", "difficulty": 0.5, "source": "os"}\n'
        '{"prompt": "for name in", "difficulty": 2, "source": "loops"}\n'
    )
    assert walker.main("--prompts", str(rated), "--untrained", "3", model=str(trained)) == 0
    ds = tracker.open_results(walker.out)
    assert ds.step.values.tolist() == [0, 1] and ds.difficulty.values.tolist() == [0.5, 2]
    assert ds.prompt_source.values.tolist() == ["os", "loops"]
    assert ds.revision.values.tolist() == ["untrained, seed 3", ""]

    model, tokenizer = load(trained)
    torch.manual_seed(3)
    untrained, given = type(model)(model.config), ["import os", "for name in"]
    for step, measured in ((0, untrained), (1, model)):
        expected = tracker.measure(measured, given, tokenizer=tokenizer, measures="entropy")
        np.testing.assert_array_equal(ds.entropy.sel(step=step), expected.entropy)


@pytest.mark.parametrize("measures", ["trajectory", "coupling", "entropy", "pca, noise"])
def test_walk_with_some_measures(measures, walker, suite, tmp_path):
    """The page has only these measures, and a step may have more than eight digits."""
    model = tmp_path / "runs" / "step1000000000"
    copied(suite, 8, model)
    assert walker.main("--measures", measures, model=str(model.parent)) == 0
    assert Store(tmp_path / "out").steps() == [1_000_000_000]
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_untrained_model_is_added_to_an_existing_store(walker, suite, capsys):
    """Another seed is refused, more checkpoints can be added, and a later walk may omit the baseline."""
    steps, store = walker.directory / "steps", walker.store
    for step in (4, 8):
        copied(suite, step, steps / f"step{step}")

    def walk(*more):
        return walker.main(*more, model=str(steps))

    assert walk("--steps", "8") == 0
    assert walk("--steps", "8", "--untrained", "3") == 0
    assert walk("--steps", "4,8") == 0
    ds = tracker.open_results(store)
    assert ds.step.values.tolist() == [0, 4, 8]
    assert ds.files_sha256.values[0] == "" and "" not in ds.files_sha256.values[1:]
    page = (store.path / "report.html").read_text()
    assert "random initialisation (untrained, seed 3)" in page
    assert walk("--steps", "8", "--untrained", "4") == 2
    assert "has another step 0 (untrained, seed 3); choose another --out" in capsys.readouterr().err
    store.file(0).write_bytes(store.file(0).read_bytes()[:5000])
    assert walk("--steps", "8", "--untrained", "3") == 0
    assert "a walk that selects step 0 measures it again" in capsys.readouterr().err
    np.testing.assert_array_equal(tracker.open_results(store).entropy, ds.entropy)


@pytest.mark.slow
def test_a_continued_walk_keeps_the_final_norm_convention_of_its_units(walker):
    """Units without the final norm, by a version that did not find it; "auto" would now include it."""
    assert walker.main("--steps", "4", *USUAL) == 0
    older = walker.store.read(4)
    assert older.attrs["final_norm"] == "include"
    walker.store.write(4, older.assign_attrs(final_norm="exclude"))
    assert walker.main("--steps", "4,8", *USUAL) == 0
    assert walker.store.read(8).attrs["final_norm"] == "exclude"


@pytest.mark.slow
def test_walk_measures_only_missing_checkpoints_and_writes_the_page(walker):
    status, out, err = walker.run("--steps", "0,2", *USUAL, cold=True)
    assert status == 0, err
    results = walker.out
    assert Store(results).steps() == [0, 2] and (results / "report.html").exists()
    assert "[1/2] step 0: miscoupling" in out and "s left" in out
    written = Store(results).file(2).stat().st_mtime_ns
    status, out, err = walker.run(*USUAL)
    assert (
        status == 0
        and "2 already measured" in out
        and Store(results).file(2).stat().st_mtime_ns == written
    ), err
    ds = tracker.open_results(results)
    assert list(ds.step.values) == STEPS
    assert list(ds.revision.values) == [f"step{s}" for s in STEPS]
    assert [str(c) for c in ds.commit.values] == [commit(walker.cache, s) for s in STEPS]
    assert ds.score.dims == ("step", "task") and (np.diff(ds.score.values[:, 0]) < 0).all()
    assert ds.attrs["final_norm"] == "include"


@pytest.mark.slow
def test_wandb_has_the_steps_of_the_store_and_no_prompt(walker):
    """Its numbers: test_wandb. The page has them, too: test_units."""
    status, out, err = walker.run("--steps", "0,4,8", *USUAL, wandb="auto")
    assert status == 0, err
    lines, directory = out.splitlines(), walker.out / "wandb"
    where = f"W&B offline: project block-coupling, run nano, files in {directory}: nothing is sent; --wandb off stops it"
    assert lines[0] == where
    assert sum(line.startswith("W&B offline: ") for line in lines) == 2
    assert "warning" not in err
    assert f"{tracker.summary(walker.out)!r}\n" in out
    found = records(offline_run(walker.out))
    rows = [row["item"] for row in of("history", found)]
    assert [row["training/step"] for row in rows] == [0, 4, 8]
    for row in rows:
        chosen = select_metrics(Row.from_unit(walker.store.read(row["training/step"])), "main")
        assert row.keys() >= chosen.scalars.keys() and len(chosen.scalars) < 50
        assert not [name for name in row if name.endswith("/mean")]
    assert not [artifact for artifact in of("artifact", found) if artifact["type"] == "results"]
    content = b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())
    for prompt in walker.prompts.read_text().splitlines():
        assert prompt.encode() not in content and prompt[:12].encode() not in content


INTERRUPTED_BY_AN_IMPORT = """
import signal, sys

class Finder:
    def find_spec(name, *_):
        if name == {package!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["jsonargparse", "torch", "transformers"])
def test_interrupted_start_is_reported(walker, package):
    process = walker.start(cold=True, before=INTERRUPTED_BY_AN_IMPORT.format(package=package))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "the same command continues" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_a_walk_that_a_signal_ends_is_resumed(walker, suite, tmp_path, monkeypatch, number):
    """A killed one leaves its copy of a checkpoint and its claim, which the next walk removes; others leave nothing."""
    (temporary := tmp_path / "temporary").mkdir()
    runs, killed = str(tmp_path / "runs"), number == signal.SIGKILL
    for step in STEPS[:3]:
        copied(suite, step, tmp_path / "runs" / f"step{step}")
    process = start_and_stay_at_the_second(walker, model=runs, TMPDIR=str(temporary))
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == (-number if killed else 130)
    assert killed or "the same command continues with the rest" in err and "Traceback" not in err
    assert bool([*temporary.glob(f"{PREFIX}*")]) == killed
    assert walker.store.steps() == STEPS[:1]
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert walker.main(model=runs) == 0
    assert walker.store.steps() == STEPS[:3]
    assert not [*temporary.glob(f"{PREFIX}*"), *walker.store.units.glob(".*")]


def test_a_walk_that_ignores_hang_ups_goes_on(walker, monkeypatch):
    """As after `nohup`."""
    show = pythia.print_overview

    def hang_up(*arguments):
        signal.raise_signal(signal.SIGHUP)
        show(*arguments)

    monkeypatch.setattr(pythia, "print_overview", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert walker.main("--steps", "0") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_store_is_named_where_an_error_names_no_file():
    said = "can't write to out (broken); finished revisions"
    assert unwritable(OSError("broken"), Path("out")).startswith(said)


USAGE = {
    "unknown model": (["--model", "13b"], "no model '13b'"),
    "no such checkpoint": (
        ["--steps", "3"],
        "no checkpoint at step 3; published are 0, 1, 2, 4, 8",
    ),
    "steps in words": (["--steps", "some"], "paper, all, log2, scores"),
    "no scores": (["--steps", "scores"], "selects no checkpoint"),
    "no prompt file": (["--prompts", "absent.txt"], "no prompt file 'absent.txt'"),
    "untrained": (["--untrained", "0"], "nano has a published step 0; measure it with --steps 0,"),
    "k above the width": (["--k", "33"], "1 to the model's width d = 32"),
    "token out of range": (["--tokens", "0,99"], "out of range"),
    "no such device": (["--device", "gpu"], "--device gpu can't be used"),
    "no key": (["--wandb", "online"], "needs a key"),
    "out is a file": (["--out", __file__], "Not a directory"),
    "wrong choice": (["--dtype", "float16"], "float16"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_is_refused(walker, case, monkeypatch, capsys):
    arguments, message = USAGE[case]
    monkeypatch.setenv("NETRC", str(walker.directory / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    try:
        status = walker.main(*arguments)
    except SystemExit as stopped:  # raised by the parser
        status = stopped.code
    assert status == 2 and message in capsys.readouterr().err
    assert not walker.store.steps()


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_cut(walker):
    walker.prompts.write_text("import os " * 60 + "\n")
    status, _, err = walker.run("--steps", "0", "--max_tokens", "20")
    assert status == 0 and "cut to its first 20 (max_tokens)" in err


def without_tokenizer(suite: Path, run: Path, *steps: int):
    """Copy checkpoints, all but their tokenizers."""
    for step in steps:
        copied(suite, step, run / f"checkpoint-{step}")
    for file in run.rglob("tokenizer*"):
        file.unlink()


@pytest.mark.slow
def test_checkpoints_without_a_tokenizer_point_to_the_flags_that_help(
    walker, suite, tmp_path, capsys
):
    """Before any is loaded; --tokenizer measures them, and the results are those of their own tokenizer."""
    run, tokenizer = tmp_path / "run", str(checkpoint_of(suite, 0))
    without_tokenizer(suite, run, 1, 4, 8)
    assert walker.main(model=str(run)) == walker.main("--dry_run", model=str(run)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count(f"{run} has no tokenizer; add --tokenizer NAME") == 2

    named = walker.arguments(
        "--tokenizer", tokenizer, "--out", str(tmp_path / "named"), model=str(run)
    )
    assert pythia.main(named) == 0 and pythia.main(named) == 0
    assert Store(tmp_path / "named").read_settings()["tokenizer"] == str(Path(tokenizer).resolve())
    assert walker.main("--steps", "1,4,8", "--out", str(tmp_path / "expected")) == 0
    of_named, expected = (tracker.open_results(tmp_path / name) for name in ("named", "expected"))
    np.testing.assert_array_equal(of_named.entropy, expected.entropy)


def test_a_configuration_alone_is_no_tokenizer(walker, suite, tmp_path, capsys):
    """transformers makes a tokenizer without words of it."""
    run = tmp_path / "run"
    without_tokenizer(suite, run, 4, 8)
    for checkpoint in run.iterdir():
        (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTNeoXTokenizer"}')
    assert walker.main(model=str(run)) == 1
    out, err = capsys.readouterr()
    assert "there is none of" in err and "tokenizer.json); add --tokenizer" in err
    assert "step 8: FAILED, for the same reason as step 4" in out
    assert walker.main("--tokenizer", str(run / "checkpoint-8"), model=str(run)) == 2
    assert "no such tokenizer" in capsys.readouterr().err


def test_a_walk_that_is_about_to_start_keeps_others_from_its_store(walker, monkeypatch, capsys):
    """It has measured and claimed nothing yet: it sets up its loggers, or trains nano."""
    show, statuses = pythia.print_overview, []

    def another_first(*arguments):
        monkeypatch.setattr(pythia, "print_overview", show)
        statuses.append(walker.main("--steps", "2", "--k", "3"))
        (other := walker.directory / "other.txt").write_text("another prompt\n")
        statuses.append(walker.main("--steps", "2", "--prompts", str(other)))
        show(*arguments)

    monkeypatch.setattr(pythia, "print_overview", another_first)
    assert walker.main("--steps", "1") == 0
    err = capsys.readouterr().err
    assert statuses == [2, 2] and "(k was [4, 8], now [3])" in err and "(prompts was " in err
    assert walker.store.steps() == [1] and not list(walker.store.units.glob(".*"))
