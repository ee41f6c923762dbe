"""Tests of the grid: trained in turn in this process, and by Ray in processes that are killed."""

import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.support import processes
from tests.support.vit_trainings import (
    GRID_STEPS,
    STAYS,
    TINY,
    assert_same_training,
    grid_arguments,
)
from tracker.common.files import Lock
from vit import cells, grid, overview
from vit.analysis import main as analyse
from vit.recipe import RECIPES
from vit.results import read_grid

CELLS = [f"wd{decay}_sd{rate}_seed0" for decay, rate in product(("0.01", "0.1"), ("0", "0.1"))]


@pytest.fixture(scope="module")
def trained_grid(tmp_path_factory) -> Path:
    """Directory of a 2 x 2 grid that ran without interruption."""
    directory = tmp_path_factory.mktemp("grid")
    assert grid.main(grid_arguments(directory)) == 0
    return directory


@pytest.mark.slow
def test_finished_cells_are_not_run_again(trained_grid, capsys):
    out = trained_grid / "grid"
    assert sorted(path.name for path in out.iterdir()) == sorted(CELLS)
    assert "epoch 3/3" in (out / CELLS[1] / "log.txt").read_text()
    assert cells.read(out / CELLS[1], "result")["recipe"]["drop_path"] == 0.1
    files = [out / name / "result.json" for name in CELLS]
    times = [file.stat().st_mtime_ns for file in files]
    for jobs in (1, 2):
        arguments = grid_arguments(
            trained_grid, "--weight_decays", "0.1", "--drop_paths", "0", jobs=jobs
        )
        assert grid.main(arguments) == 0
        assert "1 cell, 1 already done" in capsys.readouterr().out
    assert times == [file.stat().st_mtime_ns for file in files]


@pytest.mark.slow
def test_analysis_reads_what_the_grid_wrote(trained_grid, capsys):
    out = trained_grid / "grid"
    ds, results = read_grid(out), [cells.read(out / name, "result") for name in sorted(CELLS)]
    assert ds.attrs["chance"] == results[0]["chance"]
    assert ds.k.values.tolist() == [2, 4] and ds.step.values[-1] == 9
    assert ds.accuracy.values.tolist() == [result["accuracy"] for result in results]
    assert analyse([str(out), "--k", "4"]) == 0
    page = out / "analysis" / "report.html"
    assert capsys.readouterr().out.strip() == str(page) and page.exists()


# Workers stay in mid-training: in the first epoch, after two measurements.
STAYING = (
    STAYS.format(step=2)
    + """
from vit import grid
train = grid.train_on_ray

def stay(recipe):
    Classifier.training_step = step_or_stay
    train(recipe)

grid.train_on_ray = stay
sys.exit(grid.main(sys.argv[2:]))
"""
)


@pytest.mark.slow(30)
def test_a_killed_driver_leaves_a_grid_that_trains_each_cell_once(trained_grid, tmp_path, capsys):
    """A worker that is killed alone: test_vit_cluster."""
    arguments, two = ("--drop_paths", "0"), CELLS[::2]
    given = grid_arguments(tmp_path, *arguments, jobs=2)
    process = processes.start("tests.support.statements", STAYING, *given)
    for name in two:
        measured = tmp_path / "grid" / name / "coupling" / "units" / "step00000001.nc"
        processes.wait_until(measured.exists)
    process.kill()
    process.communicate()
    for name in two:  # every worker ends with its driver
        lock = tmp_path / "grid" / name / ".lock"
        processes.wait_until(lambda lock=lock: (taken := Lock.take(lock)) and [taken.release()])
    assert grid.main(grid_arguments(tmp_path, *arguments)) == 0
    assert "2 cells, 0 already done" in capsys.readouterr().out
    for name in two:
        assert_same_training(trained_grid / "grid" / name, tmp_path / "grid" / name)


@pytest.mark.slow
def test_failing_cells_do_not_stop_the_others(tmp_path, capsys):
    """The first cell's checkpoint is damaged; all others diverge at a learning rate of 1e30."""
    first = tmp_path / "grid" / CELLS[0]
    first.mkdir(parents=True)
    (first / "last.ckpt").write_bytes(b"damaged")
    cells.write(first, "failed", {"reason": "of an earlier run"})
    assert grid.main(grid_arguments(tmp_path, "--retries", "0", lr=1e30)) == 1
    err = capsys.readouterr().err
    assert f"{CELLS[0]}: crashed: ValueError: " in err and "last.ckpt can't be read" in err
    assert all(f"{name}: diverged: the training loss" in err for name in CELLS[1:])
    assert "Traceback" in cells.read(first, "failed")["error"]


def test_a_failed_cell_is_tried_again_and_its_failure_recorded_if_that_is_possible(
    tmp_path, monkeypatch, capsys
):
    tried = []

    def fail(recipe):
        tried.append(recipe.seed)
        if recipe.seed or len(tried) == 1:
            raise RuntimeError("no memory")

    monkeypatch.setattr("vit.training.train_cell", fail)
    recipes = [replace(TINY, seed=seed, out=tmp_path / str(seed)) for seed in range(3)]
    recipes[2].directory.write_text("a file where the directory should be")
    for recipe, error in grid.train_in_turn(recipes, 1):
        cells.record_failure(recipe, error)
    assert tried == [0, 0, 1, 1, 2, 2]
    with pytest.raises(RuntimeError, match="no memory"):
        grid.train_on_ray(recipes[1])
    failed = [cells.read(recipe.directory, "failed") for recipe in recipes]
    assert failed[0] is failed[2] is None and failed[1]["reason"] == "RuntimeError: no memory"
    assert f"{recipes[2].cell}: RuntimeError: no memory" in capsys.readouterr().err


def test_a_cell_that_another_process_trains_is_waited_for(tmp_path, monkeypatch, capsys):
    def finish(recipe):
        with cells.claim(recipe):
            cells.write(recipe.directory, "result", {})

    monkeypatch.setattr("vit.training.train_cell", finish)
    monkeypatch.setattr(grid, "PATIENCE", 0.05)
    recipes = [replace(TINY, seed=seed, out=tmp_path / str(seed)) for seed in range(2)]
    driver, printed = threading.Thread(target=lambda: list(grid.train_in_turn(recipes, 0))), []
    with cells.claim(recipes[0]):
        driver.start()
        processes.wait_until(
            lambda: printed.append(capsys.readouterr().out) or "waiting for it" in "".join(printed)
        )
        assert cells.is_done(recipes[1].directory)
    assert "".join(printed).startswith(f"{recipes[0].cell}: trained by another process")
    driver.join(300)
    assert cells.is_done(recipes[0].directory)


class TestUsage:
    @pytest.mark.parametrize(
        "more, message",
        [
            (["--weight_decays", "0.1,0.2,0.10"], "0.1 is given twice"),
            (["--drop_paths", "0,0.5,1"], "--drop_path 1.0; it must be at least 0 and below 1"),
            (["--seeds", "1,two"], "--seeds '1,two'; give numbers"),
            (["--jobs", "0"], "at least 1 job"),
            (["--devices", "2"], "each cell of a grid trains on one device"),
            (["--train_size", "9999"], "fewer training images: give at most 1437"),
            (["--address", "auto"], "--address auto --jobs 1; one cell at a time is trained here"),
            (["--rand_augment", "m9"], "--rand_augment 'm9': give timm's notation"),
            (["--accelerator", "gpu"], "--accelerator gpu; PyTorch finds no GPU"),
        ],
    )
    def test_bad_usage_prints_one_message_and_starts_nothing(
        self, more, message, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
        assert grid.main([*grid_arguments(tmp_path), *more]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1 and not (tmp_path / "grid").exists()

    def test_other_settings_are_refused(self, tmp_path, capsys):
        first = replace(TINY, measure_at=GRID_STEPS, weight_decay=0.01, drop_path=0.0)
        directory = tmp_path / "grid" / first.cell
        directory.mkdir(parents=True)
        cells.write(directory, "recipe", first.identity)
        assert grid.main([*grid_arguments(tmp_path), "--epochs", "5"]) == 2
        assert "epochs was 3, now 5" in capsys.readouterr().err


def test_default_grid_and_sweep_file_have_the_papers_cells():
    recipes = grid.cells(grid.GridCommand(), TINY)
    assert len(recipes) == 64 == len({recipe.cell for recipe in recipes})
    sweep = yaml.safe_load((RECIPES.parent / "sweep.yaml").read_text())
    values = [sweep["parameters"][name]["values"] for name in ("weight_decay", "drop_path")]
    assert sorted(set(product(*values))) == sorted((r.weight_decay, r.drop_path) for r in recipes)
    assert sweep["method"] == "grid" and "vit.train" in sweep["command"]


@pytest.mark.parametrize(
    "name, content, state",
    [
        ("result", b'{"status": "finished", "accuracy": 0.875}', "0.8750"),
        ("history", b"[{}, {}]", "2/3"),
        ("failed", b'{"reason": "no memory: none"}', "crashed: no memory: none"),
        ("history", b"\xff\xfe", "not started"),  # no text
    ],
)
def test_the_state_of_a_cell_is_its_accuracy_epochs_or_failure(name, content, state, tmp_path):
    (tmp_path / f"{name}.json").write_bytes(content)
    assert overview.state_of(replace(TINY, out=tmp_path)) == state
