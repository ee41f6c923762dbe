"""`python -m vit.grid ... --dry_run`: what it prints, that it keeps nothing, and its estimate against a training's time."""

import json
import time
from dataclasses import replace

import pytest

from tests.vit.test_vit_grid import arguments
from tests.vit.test_vit_train import TINY
from vit import dry_run, grid
from vit.data import load
from vit.training import train


@pytest.mark.slow
def test_the_report_states_cells_time_memory_and_disk(tmp_path, capsys):
    done = tmp_path / "grid" / "wd0.01_sd0_seed0"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps({"status": "finished"}))
    assert grid.main([*arguments(tmp_path), "--jobs", "2", "--dry_run", "true"]) == 0
    out = capsys.readouterr().out
    for shown in (
        "3 to train, 1 done",
        "per cell     about",
        "with 2 at a time",
        "kept after training:",
        "measurements of",
    ):
        assert shown in out
    assert max(map(len, out.partition("dry run")[2].splitlines())) <= 80
    assert [path.name for path in (tmp_path / "grid").iterdir()] == [done.name] and len(list(done.iterdir())) == 1


@pytest.mark.slow
def test_the_parts_add_up_to_the_total(tmp_path):
    """With one test at the end, as with one after every epoch; `trial.start` is there once."""
    data = load(TINY)
    trial = dry_run.try_cell(TINY, data, loading=5.0)
    assert trial.start > 5.0
    for recipe in (TINY, replace(TINY, test_every=0), replace(TINY, measure_at="off")):
        shown = dict(dry_run._costs([recipe], trial, len(data.train), 1))["per cell"]
        total, _, parts = shown.removeprefix("about ").partition(": ")
        counted = [seconds(part.partition("(")[2] or part.rpartition(" of ")[2]) for part in parts.split(", ")[:-1]]
        assert seconds(total) == pytest.approx(sum(counted) + trial.start, rel=0.1)
        tests = recipe.epochs if recipe.test_every else 1
        assert "9 steps of " in parts and f"{tests} test{'s' if tests > 1 else ''} of " in parts
        assert ("6 measurements of" in parts) == (recipe.measure_at == "log2")


def seconds(text: str) -> float:
    value, unit = text.rstrip(")").split()
    return float(value) * {"s": 1, "min": 60, "h": 3600}[unit]


@pytest.mark.slow
def test_the_estimate_is_within_a_factor_of_two(tmp_path):
    """Of the steps, tests and measurements of a training of 60 steps; loading and set-up are timed with them."""
    recipe = replace(TINY, epochs=20, test_every=5, measure_at="every:10", out=tmp_path / "one")
    started = time.perf_counter()
    data = load(recipe)
    loading = time.perf_counter() - started
    trial = dry_run.try_cell(recipe, data, loading)
    expected = trial.seconds(recipe, len(data.train))
    started = time.perf_counter()
    train(recipe)
    assert 1 / 2 < expected / (time.perf_counter() - started) < 2
    assert 0.5 < trial.checkpoint / (recipe.directory / "last.ckpt").stat().st_size < 2
