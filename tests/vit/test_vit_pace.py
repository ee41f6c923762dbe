"""Tests of the time that trainings and grids take: parts, estimates, the bar, and what a grid prints of it."""

import time
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from tests.vit.test_vit_grid import arguments
from tests.vit.test_vit_train import TINY
from vit import cells, grid, overview, training
from vit.data import load
from vit.overview import Forecast
from vit.pace import TIMED, WARM_UP, Bar, Pace, Parts

PARTS = Parts(step=2.0, epoch=0.5, test=7.0, measurement=3.0)


@pytest.mark.parametrize(
    "step, test_every, expected",
    [
        (0, 1, 30 * 2 + 10 * 0.5 + 10 * 7 + 7 * 3),  # measured at 0, 1, 2, 4, 8, 16 and 30
        (0, 0, 30 * 2 + 10 * 0.5 + 1 * 7 + 7 * 3),
        (0, 5, 30 * 2 + 10 * 0.5 + 2 * 7 + 7 * 3),
        (15, 5, 15 * 2 + 5 * 0.5 + 1 * 7 + 2 * 3),
        (30, 0, 0),
    ],
)
def test_what_is_left_is_counted_by_the_recipe(step, test_every, expected):
    recipe = replace(TINY, epochs=10, test_every=test_every)
    assert PARTS.seconds_left(recipe, 96, step) == expected


def test_measurements_are_counted_by_the_schedule():
    recipe, parts = replace(TINY, epochs=2, batch_size=10), Parts(0, 0, 0, measurement=1)
    assert parts.seconds_left(replace(recipe, measure_at="log2"), 80) == 6  # 0, 1, 2, 4, 8, 16
    assert parts.seconds_left(replace(recipe, measure_at="every:5"), 80) == 5  # 0, 5, 10, 15, 16
    assert parts.seconds_left(replace(recipe, measure_at="off"), 80) == 0


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """Train 40 steps on a clock that only the parts of the training advance; return the callback and what it wrote.

    A step takes 1 s, a test 20 s, a measurement 100 s and a checkpoint 3 s.
    """
    from tracker.measures import calls  # noqa: F401  (imported before the clock is replaced)

    recipe = replace(
        TINY, epochs=10, batch_size=24, test_every=0, measure_at="30", out=tmp_path_factory.mktemp("timed")
    )
    data, clock, written = load(recipe), SimpleNamespace(now=0.0), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit.pace.time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now))
        patch.setattr("tracker.training.schedule.time", SimpleNamespace(perf_counter=lambda: clock.now))
        patch.setattr("vit.pace.write", lambda directory, name, content: written.append((name, content)))
        for target, seconds in (
            ("vit.module.Classifier.training_step", 1.0),
            ("vit.module.Classifier.on_validation_epoch_end", 20.0),
            ("vit.training.TrainingLoss.record", 100.0),
            ("vit.module.Classifier.on_save_checkpoint", 3.0),
        ):
            patch.setattr(target, advancing(clock, seconds, resolve_name(target)))
        trainers, make = [], training.make_trainer
        patch.setattr(training, "make_trainer", lambda *a, **k: trainers.append(make(*a, **k)) or trainers[-1])
        training.train(recipe)
    (pace,) = [callback for callback in trainers[0].callbacks if isinstance(callback, Pace)]
    return recipe, len(data.train), pace, written


def advancing(clock, seconds, function):
    def call(*arguments):
        clock.now += seconds
        return function(*arguments)

    return call


@pytest.mark.slow
def test_parts_are_timed_apart(timed):
    _, _, pace, _ = timed
    assert pace.parts == Parts(step=1.0, epoch=3.0, test=20.0, measurement=100.0)
    assert pace.times == {"start": 1, "step": 40 - WARM_UP, "epoch": 9, "test": 1}


@pytest.mark.slow
def test_what_is_left_is_written_after_the_first_steps(timed):
    """A test that was not timed yet is taken to be a third of a step for as many images."""
    recipe, images, _, written = timed
    name, first = written[0]
    untimed = 1.0 / 3 * 360 / 24
    assert name == "pace" and first["written"] == 100 + WARM_UP + TIMED + 5 * 3
    parts = Parts(1.0, 3.0, untimed, 100.0)
    assert first["left"] == parts.seconds_left(recipe, images, WARM_UP + TIMED)
    assert first["whole"] == parts.seconds_left(recipe, images)


def test_the_file_is_removed_after_the_training(tmp_path):
    recipe = replace(TINY, epochs=8, out=tmp_path, measure_at="off")
    training.train(recipe)
    assert cells.is_done(tmp_path) and not (tmp_path / "pace.json").exists()


def test_the_bar_shows_loss_accuracy_and_time_left():
    loss = SimpleNamespace(update_count=2, mean_value=torch.tensor(6.0), weight=torch.tensor(4.0))
    module = SimpleNamespace(train_loss=loss, history=[{"test/accuracy": 0.5}, {"train/loss": 1.0}])
    pace = SimpleNamespace(left=lambda step: 100.0 * step)
    trainer = SimpleNamespace(global_step=60)
    bar = Bar(pace)
    assert bar.get_metrics(trainer, module) == {"loss": 1.5, "accuracy": 0.5, "left": "1.7 h"}
    trainer.global_step = 0  # the loss is read once a second
    assert bar.get_metrics(trainer, module)["left"] == "1.7 h"


@pytest.fixture
def six(tmp_path):
    return [replace(TINY, seed=seed, epochs=10, out=tmp_path / str(seed)) for seed in range(6)]


def pace(cell, whole, left, written=None):
    content = {"written": time.time() if written is None else written, "whole": whole, "left": left}
    cells.write(cell.directory, "pace", content)


def test_the_time_left_is_that_of_running_and_waiting_cells(six):
    for cell in six:
        cell.directory.mkdir()
    forecast, on_ray = Forecast(six, jobs=2), Forecast(six, jobs=None)
    assert forecast.left() is None and forecast.cost() is None
    pace(six[0], 1000.0, 400.0), pace(six[1], 2000.0, 600.0)
    pace(six[5], 9.0, 9.0, written=forecast.started - 10)  # of an earlier process
    cells.write(six[4].directory, "history", [{}] * 5)
    assert forecast.left() == pytest.approx((400 + 600 + 3 * 1500 + 1500 / 2) / 2, abs=60)
    assert on_ray.left() == pytest.approx(forecast.left(), abs=60)  # two are seen
    assert forecast.cost().startswith(
        "about 25 min per cell and 52 min in all, 2 at a time, from the first steps; Ctrl-C"
    )
    for cell in six[1:5]:
        cells.write(cell.directory, "result", {})
    cells.write(six[5].directory, "failed", {})
    assert forecast.left() == pytest.approx(400, abs=60)  # one cell alone
    cells.write(six[0].directory, "result", {})
    assert forecast.left() == 0


def test_a_grid_prints_its_cost_once_and_goes_on(six, monkeypatch, capsys):
    monkeypatch.setattr(overview, "SECONDS", 0.05)
    with overview.shown(six, six, jobs=3):
        for cell in six:
            cell.directory.mkdir()
        pace(six[0], 120.0, 60.0)
        printed, deadline = "", time.monotonic() + 300
        while "from the first steps" not in printed and time.monotonic() < deadline:
            time.sleep(0.01)
            printed += capsys.readouterr().out
        cells.write(six[0].directory, "result", {"status": "finished", "accuracy": 0.5})
    lines = (printed + capsys.readouterr().out).splitlines()
    assert lines[0].startswith("about 2.0 min per cell and 3.7 min in all, 3 at a time, from the first steps")
    assert lines[1] == f"[1/6] {six[0].cell}: 0.5000  about 3.3 min left" and len(lines) == 2


@pytest.mark.slow
def test_a_dry_run_states_cells_time_memory_and_disk_and_keeps_nothing(tmp_path, capsys):
    done = tmp_path / "grid" / "wd0.01_sd0_seed0"
    done.mkdir(parents=True)
    cells.write(done, "result", {"status": "finished"})
    assert grid.main(arguments(tmp_path, "--dry_run", "true", jobs=2)) == 0
    first, out = capsys.readouterr().out.split("\n", 1)
    assert first.startswith("4 cells, 1 already done; results would be in ")
    for text in ("per cell     about", "with 2 at a time", "kept after training:", "measurements of"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80
    assert [path.name for path in (tmp_path / "grid").iterdir()] == [done.name] and len(list(done.iterdir())) == 1


@pytest.mark.alone
@pytest.mark.slow
def test_the_estimate_is_within_a_factor_of_two(tmp_path):
    """Of the steps, tests and measurements of a training of 60 steps; loading and set-up are timed with them."""
    recipe = replace(TINY, epochs=20, test_every=5, measure_at="every:10", out=tmp_path / "one")
    started = time.perf_counter()
    data = load(recipe)
    loading = time.perf_counter() - started
    trial = training.try_cell(recipe, data, loading)
    expected = trial.seconds(recipe, len(data.train))
    started = time.perf_counter()
    training.train(recipe)
    assert 1 / 2 < expected / (time.perf_counter() - started) < 2
    assert trial.start > loading and 0.5 < trial.checkpoint / (recipe.directory / "last.ckpt").stat().st_size < 2
