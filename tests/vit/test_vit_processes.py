"""Tests of the GPUs that a grid's cells get: without any, by the environment of the workers and the requests to Ray."""

import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vit import cells, grid, processes
from vit.recipe import Recipe

RECIPE = Recipe(data="digits", batch_size=32, wandb="off")


def report(recipe: Recipe) -> None:
    """Write the GPU of this process as the result of a cell, after all four cells have started."""
    cells.write(recipe.directory, "started", {"device": os.environ.get("CUDA_VISIBLE_DEVICES")})
    deadline = time.monotonic() + 60
    while len(list(recipe.directory.parent.glob("*/started.json"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    cells.write(recipe.directory, "result", cells.read(recipe.directory, "started"))


@pytest.fixture
def fresh_server(monkeypatch):
    """A fork server of its own that imports nothing beforehand."""
    monkeypatch.setattr(processes.forkserver._forkserver, "_preload_modules", [])
    monkeypatch.setattr(processes.multiprocessing, "set_forkserver_preload", lambda modules: None)
    processes.forkserver._forkserver._stop()
    yield
    processes.forkserver._forkserver._stop()


@pytest.mark.parametrize("gpus, expected", [(["4", "GPU-7"], ["4", "4", "GPU-7", "GPU-7"]), ([], ["unchanged"] * 4)])
def test_cells_that_train_together_are_spread_over_the_gpus(gpus, expected, tmp_path, monkeypatch, fresh_server):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "unchanged")  # before the fork server starts, with PyTorch's modules
    monkeypatch.setattr(processes, "_train_cell", report)
    recipes = [replace(RECIPE, seed=seed, out=tmp_path / str(seed)) for seed in range(4)]
    for recipe in recipes:
        recipe.directory.mkdir()
    processes.run_cells(recipes, 4, 0, lambda recipe: None, gpus)
    assert sorted(cells.read(recipe.directory, "result")["device"] for recipe in recipes) == expected


def test_gpus_are_named_as_in_the_environment(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for named, expected in (("", ["0", "1"]), ("3,1", ["3", "1"]), ("GPU-a,GPU-b,none", ["GPU-a", "GPU-b"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert processes.visible_gpus() == expected


@pytest.mark.parametrize(
    "options, recipe, expected",
    [
        ({}, RECIPE, (3, ["0", "1", "2"])),
        ({"jobs": 5}, RECIPE, (5, ["0", "1", "2"])),
        ({"gpus_per_cell": 0.4}, RECIPE, (6, ["0", "1", "2"])),
        ({"gpus_per_cell": 0.142}, RECIPE, (21, ["0", "1", "2"])),
        ({"gpus_per_cell": 1.5}, RECIPE, (2, ["0", "1", "2"])),
        ({}, replace(RECIPE, accelerator="cpu"), (1, [])),
    ],
)
def test_one_job_for_each_gpu_by_default(options, recipe, expected, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(processes, "start_server", lambda: None)
    monkeypatch.setattr(processes, "visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr(processes, "run_cells", lambda cells, jobs, tries, end, gpus: given.append((jobs, gpus)))
    grid.run(grid.Grid(engine="processes", out=tmp_path, **options), recipe)
    assert given == [expected]


@pytest.fixture
def ray(monkeypatch):
    """Ray without machines; a function that gives it some, and what cells ask for."""
    tune = pytest.importorskip("vit.tune")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    requests, ended = [], []
    fake = SimpleNamespace(
        Tuner=lambda *_, **__: SimpleNamespace(fit=lambda: []),
        with_parameters=lambda *_, **__: None,
        with_resources=lambda _, request: requests.append(request),
        **{name: lambda *_, **__: None for name in ("grid_search", "RunConfig", "FailureConfig")},
    )
    monkeypatch.setattr(tune, "tune", fake)
    monkeypatch.setattr(tune.ray, "init", lambda **_: None)
    monkeypatch.setattr(tune.ray, "shutdown", lambda: ended.append(True))

    def machines(*resources):
        monkeypatch.setattr(tune.ray, "nodes", lambda: [{"Alive": True, "Resources": one} for one in resources])

    return SimpleNamespace(machines=machines, requests=requests, ended=ended, ray=tune.ray)


@pytest.mark.parametrize(
    "options, recipe, resources, expected",
    [
        ({}, RECIPE, {"CPU": 2.0, "GPU": 2.0}, 1.0),
        ({}, RECIPE, {"CPU": 8.0}, 0.0),
        ({}, replace(RECIPE, accelerator="cpu"), {"CPU": 2.0, "GPU": 2.0}, 0.0),
        ({"gpus_per_cell": 0.25}, RECIPE, {"CPU": 2.0, "GPU": 2.0}, 0.25),
    ],
)
def test_rays_machines_decide_on_gpus_not_the_driver(options, recipe, resources, expected, ray, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    ray.machines(resources)
    # The fake returns without a result, as Tune does when it is interrupted.
    assert grid.run(grid.Grid(engine="ray", out=tmp_path, **options), recipe) == 130
    assert ray.requests == [{"cpu": 1.0, "gpu": expected}] and ray.ended


def test_a_cluster_without_a_machine_for_a_cell_is_refused_before_data_is_loaded(ray, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vit.data.load", lambda recipe: pytest.fail("loaded"))
    ray.machines({"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0})
    run = grid.Grid(engine="ray", address="auto", gpus_per_cell=2.0, out=tmp_path / "grid")
    assert grid.run(run, RECIPE) == 2 and ray.ended
    assert "--gpus_per_cell 2; no machine has that" in capsys.readouterr().err

    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray.ray, "init", refuse)
    assert grid.run(run, RECIPE) == 2
    assert capsys.readouterr().err == "error: --address auto; Could not find any running Ray instance\n"


def fail(recipe: Recipe) -> None:
    raise SystemExit(3)


def test_a_cell_without_a_directory_does_not_end_the_others(tmp_path, monkeypatch, capsys, fresh_server):
    monkeypatch.setattr(processes, "_train_cell", fail)
    of = grid.Grid(weight_decays="0.1", drop_paths="0", seeds="0,1", engine="processes", retries=0, out=tmp_path)
    first, second = grid.cells(of, RECIPE)
    first.directory.write_text("a file where the directory should be")
    assert grid.run(of, RECIPE) == 1
    assert cells.read(second.directory, "failed")["reason"].startswith("exit status 3, without a log")
    assert f"{first.cell}: exit status 3, without a log" in capsys.readouterr().err


def claim(recipe: Recipe) -> None:
    try:
        with cells.claim(recipe.directory, recipe):
            cells.write(recipe.directory, "result", {"status": "finished"})
    except cells.BusyError:
        raise SystemExit(processes.BUSY) from None


@pytest.mark.slow
def test_a_cell_that_another_process_trains_is_waited_for(tmp_path, fresh_server, monkeypatch, capfd):
    monkeypatch.setattr(processes, "_train_cell", claim)
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    recipes = [replace(RECIPE, seed=seed, out=tmp_path / str(seed)) for seed in range(2)]
    ended: list[Recipe] = []
    driver = threading.Thread(target=processes.run_cells, args=(recipes, 1, 0, ended.append))
    with cells.claim(recipes[0].directory, recipes[0]):
        driver.start()
        deadline, printed = time.monotonic() + 60, ""
        while "trained by another process" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().out
        assert ended == recipes[1:] and printed.startswith(f"{recipes[0].cell}: trained by another process")
    driver.join(60)
    assert ended == [recipes[1], recipes[0]] and cells.read(recipes[0].directory, "failed") is None


def test_bytes_that_are_no_text_are_no_file(tmp_path):
    (tmp_path / "pace.json").write_bytes(b"\xff\xfe")
    assert cells.read(tmp_path, "pace") is None


def test_cells_that_failed_before_are_counted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "start_server", lambda: None)
    monkeypatch.setattr(processes, "run_cells", lambda *_: None)
    (recipe,) = grid.cells(grid.Grid(weight_decays="0.1", drop_paths="0", out=tmp_path), RECIPE)
    recipe.directory.mkdir(parents=True)
    cells.write(recipe.directory, "failed", {"reason": "of an earlier run"})
    grid.run(grid.Grid(weight_decays="0.1", drop_paths="0", engine="processes", out=tmp_path), RECIPE)
    assert cells.read(recipe.directory, "failed") is None
