"""Tests of the command line of the grid: real processes, killed and resumed, with and without Ray."""

import json
import os
import signal
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.vit.test_vit_train import TINY, assert_same_training, start, write_config
from vit import cells, grid, overview
from vit.analysis import main as analyse
from vit.recipe import RECIPES
from vit.results import read_grid

CELLS = [f"wd{decay}_sd{rate}_seed0" for decay, rate in product(("0.01", "0.1"), ("0", "0.1"))]


def arguments(directory: Path, engine: str = "processes", **recipe) -> list[str]:
    return [
        *("--config", write_config(directory, **recipe), "--weight_decays", "0.01,0.1", "--drop_paths", "0,0.1"),
        *("--out", str(directory / "grid"), "--engine", engine),
    ]


def run(directory: Path, *more: str, **options) -> tuple[int, str, str]:
    process = start(*arguments(directory, **options), *more, module="vit.grid", cold=True)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def trained_grid(tmp_path_factory) -> Path:
    """Directory of a 2 x 2 grid that ran without interruption."""
    directory = tmp_path_factory.mktemp("grid")
    status, out, err = run(directory)
    assert status == 0, err
    assert "4 cells, 0 already done; processes" in out and "[4/4] " in out
    return directory


@pytest.mark.slow
def test_cell_equals_a_single_training(trained_grid, tmp_path):
    assert sorted(path.name for path in (trained_grid / "grid").iterdir()) == sorted(CELLS)
    from vit.training import train

    train(replace(TINY, weight_decay=0.01, drop_path=0.1, out=tmp_path / "one"))
    assert_same_training(trained_grid / "grid" / "wd0.01_sd0.1_seed0", tmp_path / "one")


@pytest.mark.slow
def test_finished_cells_are_not_run_again(trained_grid):
    times = {name: (trained_grid / "grid" / name / "result.json").stat().st_mtime_ns for name in CELLS}
    status, out, err = run(trained_grid)
    assert status == 0 and "4 cells, 4 already done" in out, err
    assert times == {name: (trained_grid / "grid" / name / "result.json").stat().st_mtime_ns for name in CELLS}


@pytest.mark.slow
def test_analysis_reads_what_the_grid_wrote(trained_grid, capsys):
    ds = read_grid(trained_grid / "grid")
    assert ds.sizes["cell"] == 4 and ds.k.values.tolist() == [2, 4] and ds.step.values[-1] == 9
    for i, name in enumerate(sorted(CELLS)):
        assert float(ds.accuracy[i]) == cells.read(trained_grid / "grid" / name, "result")["accuracy"]
    assert analyse([str(trained_grid / "grid"), "--k", "4"]) == 0
    page = trained_grid / "grid" / "analysis" / "report.html"
    assert capsys.readouterr().out.strip() == str(page) and "4 vision transformers" in page.read_text()
    assert analyse([str(trained_grid / "grid"), "--k", "3"]) == 2
    assert "--k 3 was not measured; choose from 2, 4" in capsys.readouterr().err


def wait_for(condition, process):
    while not condition() and process.poll() is None:
        time.sleep(0.02)


def workers_of(out: Path) -> set[int]:
    """Return the ids of the processes that keep a cell's lock file open."""
    workers = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd).startswith(str(out)) and fd.exists() for fd in (process / "fd").iterdir()):
                workers.add(int(process.name))
        except OSError:
            continue
    return workers


@pytest.mark.slow
def test_resuming_after_a_killed_driver_trains_each_cell_once(trained_grid, tmp_path):
    process = start(*arguments(tmp_path), module="vit.grid", cold=True)
    second = tmp_path / "grid" / CELLS[1]
    wait_for((second / "history.json").exists, process)
    process.kill()
    process.communicate()
    deadline = time.time() + 20
    while workers_of(tmp_path / "grid") and time.time() < deadline:
        time.sleep(0.1)
    assert not workers_of(tmp_path / "grid")  # every worker ends with its driver
    assert cells.is_done(tmp_path / "grid" / CELLS[0]) and not cells.is_done(second)
    status, out, err = run(tmp_path)
    assert status == 0 and "1 already done" in out, err
    for name in CELLS:
        assert_same_training(trained_grid / "grid" / name, tmp_path / "grid" / name)


@pytest.mark.slow
def test_killed_worker_is_retried_or_recorded(trained_grid, tmp_path):
    def kill_first_worker(*more: str):
        process = start(*arguments(tmp_path), *more, module="vit.grid", cold=True)
        first = tmp_path / "grid" / CELLS[0]
        # A killed cell leaves units behind, so the new training has started only if a worker exists too.
        worker: list[int] = []

        def is_measured_by_a_worker() -> bool:
            worker[:] = workers_of(first)
            return bool(worker) and (first / "coupling" / "units" / "step00000001.nc").exists()

        wait_for(is_measured_by_a_worker, process)
        os.kill(worker[0], signal.SIGKILL)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    status, out, err = kill_first_worker("--retries", "0")
    assert status == 1 and f"{CELLS[0]}: crashed: the process was killed by SIGKILL" in err
    assert [cells.is_done(tmp_path / "grid" / name) for name in CELLS] == [False, True, True, True]
    status, out, err = kill_first_worker("--retries", "1")
    assert status == 0 and "3 already done" in out, err
    for name in CELLS:
        assert_same_training(trained_grid / "grid" / name, tmp_path / "grid" / name)


@pytest.mark.slow
def test_failing_cells_do_not_stop_the_others(trained_grid, tmp_path):
    """The first cell's checkpoint is damaged; all others diverge at a learning rate of 1e30."""
    first = tmp_path / "grid" / CELLS[0]
    first.mkdir(parents=True)
    (first / "last.ckpt").write_bytes(b"damaged")
    status, _, err = run(tmp_path, "--retries", "0", lr=1e30)
    assert status == 1
    assert f"{CELLS[0]}: crashed: " in err and all(f"{name}: diverged: the training loss" in err for name in CELLS[1:])
    assert analyse([str(tmp_path / "grid")]) == 2


@pytest.mark.slow
def test_ray_trains_the_same_cells(trained_grid, tmp_path):
    status, out, err = run(tmp_path, engine="ray")
    assert status == 0 and "; ray; " in out and "[4/4]" in out, err
    for name in CELLS:
        assert_same_training(trained_grid / "grid" / name, tmp_path / "grid" / name)
    status, out, err = run(tmp_path, engine="processes")
    assert status == 0 and "4 already done" in out, err


class TestUsage:
    @pytest.mark.parametrize(
        "more, message",
        [
            (["--weight_decays", "0.1,0.2,0.10"], "0.1 is given twice"),
            (["--drop_paths", "0,0.5,1"], "--drop_path 1.0; it must be at least 0 and below 1"),
            (["--seeds", "1,two"], "--seeds '1,two'; give numbers"),
            (["--jobs", "0"], "at least 1 job"),
            (["--train_size", "9999"], "1437 training images"),
            (["--batch_size", "33", "--mixup", "0.8"], "even number"),
            (["--address", "auto"], "a cluster needs Ray"),
            (["--model", "vgg11"], "--drop_path 0.1: vgg11 has no stochastic depth; give 0"),
        ],
    )
    def test_bad_usage_prints_one_message_and_starts_nothing(self, more, message, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(grid.processes, "start_server", lambda: None)  # it imports for 10 s, beside other tests
        assert grid.main([*arguments(tmp_path), *more]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "grid").exists()

    def test_other_settings_are_refused(self, tmp_path, capsys):
        decays, rates = "0.01,0.1", "0,0.1"
        first = grid.cells(grid.Grid(weight_decays=decays, drop_paths=rates, out=tmp_path / "grid"), TINY)[0]
        first.directory.mkdir(parents=True)
        cells.write(first.directory, "recipe", first.identity)
        assert grid.main([*arguments(tmp_path), "--epochs", "5"]) == 2
        assert "epochs was 3, now 5" in capsys.readouterr().err


def test_default_grid_and_sweep_file_have_the_papers_cells():
    recipes = grid.cells(grid.Grid(), TINY)
    assert len(recipes) == 64 == len({recipe.cell for recipe in recipes})
    sweep = yaml.safe_load((RECIPES.parent / "sweep.yaml").read_text())
    values = [sweep["parameters"][name]["values"] for name in ("weight_decay", "drop_path")]
    assert sorted(set(product(*values))) == sorted((r.weight_decay, r.drop_path) for r in recipes)
    assert sweep["method"] == "grid" and "vit.train" in sweep["command"]
    # W&B agents and the grid use the same directories, so each can finish the other's cells.
    assert {str(r.directory) for r in recipes} == {
        str(replace(TINY, weight_decay=r.weight_decay, drop_path=r.drop_path).directory) for r in recipes
    }


def test_table_shows_accuracies_epochs_and_crashes(tmp_path):
    from rich.console import Console

    recipes = grid.cells(grid.Grid(weight_decays="0.01,0.1", drop_paths="0,0.1", out=tmp_path), TINY)
    states = [
        ("result", {"status": "finished", "accuracy": 0.875}),
        ("history", [{}, {}]),
        ("failed", {"reason": "no memory: none"}),
    ]
    for recipe, (name, content) in zip(recipes, states, strict=False):
        recipe.directory.mkdir()
        (recipe.directory / f"{name}.json").write_text(json.dumps(content))
    console = Console(width=60, record=True, file=open(os.devnull, "w"))
    console.print(overview.table(recipes, "about 3.2 h left"))
    text = console.export_text()
    for shown in ("0.8750", "2/3", "crashed", "·", "about 3.2 h left"):
        assert shown in text
