"""Tests of the walk's command line: real processes, the real hub client and W&B files, interrupted and killed walks."""

import errno
import json
import shutil
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
from tracker.analysis.curves import scalars
from tracker.store import Store
from tracker.walk.display import unwritable


@pytest.mark.slow
def test_untrained_model_is_measured_as_step_0(walker, suite, tmp_path):
    """The model has one checkpoint, and its prompts have difficulties."""
    trained = tmp_path / "trained"
    copied(suite, 8, trained)
    rated = tmp_path / "rated.jsonl"
    lines = (("import os", 0.5, "os"), ("for name in", 2, "loops"))
    rated.write_text(
        "\n".join(
            json.dumps(dict(zip(("prompt", "difficulty", "source"), one, strict=True)))
            for one in lines
        )
    )
    arguments = walker.arguments("--prompts", str(rated), "--untrained", "3", model=str(trained))
    assert pythia.main(arguments) == 0
    ds = tracker.open_results(tmp_path / "out")
    assert ds.step.values.tolist() == [0, 1] and ds.difficulty.values.tolist() == [0.5, 2]
    assert ds.prompt_source.values.tolist() == ["os", "loops"]
    assert ds.revision.values.tolist() == ["untrained, seed 3", ""]

    model, tokenizer = load(trained)
    torch.manual_seed(3)
    untrained = type(model)(model.config)
    for step, measured in ((0, untrained), (1, model)):
        expected = tracker.measure(
            measured, ["import os", "for name in"], tokenizer=tokenizer, measures="entropy"
        )
        np.testing.assert_array_equal(ds.entropy.sel(step=step), expected.entropy)


@pytest.mark.parametrize("measures", ["trajectory", "coupling", "entropy", "pca, noise"])
def test_walk_with_some_measures(measures, walker, suite, tmp_path):
    """The page has only these measures, and a step may have more than eight digits."""
    model = tmp_path / "runs" / "step1000000000"
    copied(suite, 8, model)
    assert walker.main("--measures", measures, model=str(model.parent)) == 0
    assert Store(tmp_path / "out").steps() == [1_000_000_000]
    assert (tmp_path / "out" / "report.html").exists()


def test_results_within_a_block_are_not_continued_across_blocks(walker, suite, capsys):
    def walk(*more):
        return walker.main("--measures", "tokenwise", *more, model=str(steps))

    steps = walker.directory / "steps"
    for step in (0, 1):
        copied(suite, step, steps / f"step{step}")
    assert walk("--steps", "0") == 0
    store = walker.store
    older = store.read_settings()
    assert older.pop("pair_layers") == 1
    store.settings.write_text(json.dumps(older))
    capsys.readouterr()
    assert walk("--steps", "1") == 2
    assert "pair_layers was None, now 1); results are never mixed" in capsys.readouterr().err


@pytest.mark.slow
def test_untrained_model_is_added_to_an_existing_store(walker, suite, tmp_path, capsys):
    """Another seed is refused, scores belong to trained steps only, and more checkpoints can be added."""
    steps = tmp_path / "steps"
    for step in (4, 8):
        copied(suite, step, steps / f"step{step}")
        (steps / f"step{step}" / "scores.json").unlink(missing_ok=True)
    scores = tmp_path / "scores.csv"
    scores.write_text("step,arc\n0,0.1\n4,0.4\n8,0.8\n")

    def walk(*more):
        return walker.main(*more, model=str(steps))

    out = tmp_path / "out"
    assert walk("--steps", "8") == 0
    assert walk("--steps", "8", "--untrained", "3") == 0
    assert walk("--steps", "4,8", "--untrained", "3", "--scores", str(scores)) == 0
    ds = tracker.open_results(out)
    assert ds.step.values.tolist() == [0, 4, 8]
    np.testing.assert_array_equal(ds.score.sel(task="arc"), [np.nan, 0.4, 0.8])
    assert walk("--steps", "4,8", "--scores", str(scores)) == 0, (
        "a later walk may omit the baseline"
    )
    np.testing.assert_array_equal(
        tracker.open_results(out).score.sel(task="arc"), [np.nan, 0.4, 0.8]
    )
    assert ds.files_sha256.values[0] == "" and "" not in ds.files_sha256.values[1:]
    assert "random initialisation (untrained, seed 3)" in (out / "report.html").read_text()
    capsys.readouterr()
    assert walk("--steps", "8", "--untrained", "4") == 2
    assert "has another step 0 (untrained, seed 3); choose another --out" in capsys.readouterr().err
    baseline = Store(out).file(0)
    baseline.write_bytes(baseline.read_bytes()[:5000])
    assert walk("--steps", "8", "--untrained", "3") == 0
    assert "a walk that selects step 0 measures it again" in capsys.readouterr().err
    np.testing.assert_array_equal(tracker.open_results(out).entropy, ds.entropy)


@pytest.fixture
def run(walker, capsys):
    """Return a function that walks over the suite in this process; its result is as that of `walker.run`."""
    return lambda *arguments: (walker.main(*arguments), *capsys.readouterr())


@pytest.mark.slow
def test_a_continued_walk_keeps_the_final_norm_convention_of_its_units(walker, suite, tmp_path):
    """Units without the final norm, by a version that did not find it; "auto" would now include it."""
    steps = tmp_path / "steps"
    for step in (4, 8):
        copied(suite, step, steps / f"step{step}")

    def walk(out, *more):
        assert walker.main("--out", str(tmp_path / out), *USUAL, *more, model=str(steps)) == 0
        return Store(tmp_path / out)

    without, older = walk("without", "--final_norm", "exclude"), walk("older", "--steps", "4")
    settings = older.read(4).attrs["settings_sha256"]
    assert older.read(4).attrs["final_norm"] == "include"
    older.write(4, without.read(4).assign_attrs(settings_sha256=settings))
    walk("older")
    assert older.read(8).attrs["final_norm"] == "exclude"
    np.testing.assert_array_equal(older.read(8).miscoupling, without.read(8).miscoupling)
    assert tracker.open_results(older.path).step.values.tolist() == [4, 8]


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
    assert ds.diagnostics_complete.all()
    assert ds.diagnostics_sliced.all()


@pytest.mark.slow
def test_wandb_has_the_numbers_of_the_store_and_no_prompt(walker):
    """The page has them, too: test_units."""
    status, out, err = walker.run("--steps", "0,4,8", "--log", "all", *USUAL, wandb="auto")
    assert status == 0, err
    lines, directory = out.splitlines(), walker.out / "wandb"
    where = f"W&B offline: project block-coupling, run nano, files in {directory}: nothing is sent; --wandb off stops it"
    assert lines[0] == where
    assert sum(line.startswith("W&B offline: ") for line in lines) == 2
    assert "warning" not in err
    assert f"{tracker.summary(walker.directory / 'out')!r}\n" in out
    found = records(offline_run(walker.out))
    rows = [row["item"] for row in of("history", found)]
    assert [row["training/step"] for row in rows] == [0, 4, 8]
    assert not [artifact for artifact in of("artifact", found) if artifact["type"] == "results"]
    content = b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())
    for prompt in walker.prompts.read_text().splitlines():
        assert prompt.encode() not in content and prompt[:12].encode() not in content
    for row in rows:
        stored = scalars(walker.store.read(row["training/step"]))
        assert len(stored) > 60
        for name, value in stored.items():
            assert row[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name
        assert row["miscoupling/heatmap/k4._type"] == "image-file"


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


def test_what_can_not_be_written_is_named():
    error = OSError(errno.ENOSPC, "No space left on device", "a.tmp", None, "a")
    assert unwritable(error, Path("out")).startswith(
        "can't write to a (No space left on device); finished revisions"
    )
    assert unwritable(OSError("broken"), Path("out")).startswith(
        "can't write to out (broken); finished revisions"
    )


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
def test_other_settings_are_not_mixed_into_a_store(walker, run):
    assert run("--steps", "0")[0] == 0
    walker.prompts.write_text("another prompt\n")
    status, _, err = run("--steps", "1")
    assert status == 2 and "prompts was" in err
    assert walker.store.steps() == [0]


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_cut(walker):
    walker.prompts.write_text("import os " * 60 + "\n")
    status, _, err = walker.run("--steps", "0", "--max_tokens", "20")
    assert status == 0 and "cut to its first 20 (max_tokens)" in err


def without_tokenizer(suite: Path, run: Path, *steps: int):
    """Copy checkpoints, their weights and configuration alone."""
    for step in steps:
        (run / f"checkpoint-{step}").mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(checkpoint_of(suite, step) / name, run / f"checkpoint-{step}" / name)


@pytest.mark.slow
def test_checkpoints_without_a_tokenizer_point_to_the_flags_that_help(
    walker, suite, tmp_path, capsys
):
    """One line for all of them; --tokenizer measures them, and the results are those of their own tokenizer."""
    run, tokenizer = tmp_path / "run", str(checkpoint_of(suite, 0))
    without_tokenizer(suite, run, 1, 4, 8)
    assert walker.main(model=str(run)) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(
        f"failed: 3 steps (1, 4, 8), the last: {run}/checkpoint-8 has no tokenizer; add --tokenizer "
    )
    assert "--inputs FILE" in line and printed.out.count("has no tokenizer") == 1
    assert "step 4: FAILED, for the same reason as step 1" in printed.out

    named = walker.arguments(
        "--tokenizer", tokenizer, "--out", str(tmp_path / "named"), model=str(run)
    )
    assert pythia.main(named) == 0 and pythia.main(named) == 0
    assert Store(tmp_path / "named").read_settings()["tokenizer"] == str(Path(tokenizer).resolve())
    own = tmp_path / "own"
    for step in (1, 4, 8):
        copied(suite, step, own / f"checkpoint-{step}")
    assert walker.main("--out", str(tmp_path / "expected"), model=str(own)) == 0
    of_named, expected = (tracker.open_results(tmp_path / name) for name in ("named", "expected"))
    np.testing.assert_array_equal(of_named.entropy, expected.entropy)


def test_a_configuration_alone_is_no_tokenizer(walker, suite, tmp_path, capsys):
    """transformers makes a tokenizer without words of it."""
    run = tmp_path / "run"
    without_tokenizer(suite, run, 8)
    (run / "checkpoint-8" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPTNeoXTokenizer"})
    )
    assert walker.main(model=str(run)) == 1
    err = capsys.readouterr().err
    assert "there is none of" in err and "tokenizer.json); add --tokenizer" in err
    assert walker.main("--tokenizer", str(run / "checkpoint-8"), model=str(run)) == 2
    assert "no such tokenizer" in capsys.readouterr().err


def test_a_walk_that_is_about_to_start_keeps_others_from_its_store(walker, monkeypatch, capsys):
    """It has measured and claimed nothing yet: it sets up its loggers, or trains nano."""
    show, statuses = pythia.print_overview, []

    def another_first(*arguments):
        monkeypatch.setattr(pythia, "print_overview", show)
        statuses.append(walker.main("--steps", "2", "--k", "3"))
        show(*arguments)

    monkeypatch.setattr(pythia, "print_overview", another_first)
    assert walker.main("--steps", "1") == 0
    assert statuses == [2] and "(k was [4, 8], now [3])" in capsys.readouterr().err
    assert walker.store.steps() == [1] and not list(walker.store.units.glob(".*"))
