"""`python -m vit.grid ... --dry_run`: what it prints, that it keeps nothing, and its estimate against a training's time."""

import json
import time
from dataclasses import replace

from tests.vit.test_vit_grid import arguments
from tests.vit.test_vit_train import TINY
from vit import dry_run, grid
from vit.data import load
from vit.training import train


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


def test_the_estimate_is_within_a_factor_of_four(tmp_path):
    recipe = replace(TINY, out=tmp_path / "one")
    data = load(recipe)
    trial = dry_run.try_cell(recipe, data)
    expected = trial.seconds(recipe, len(data.train))
    started = time.perf_counter()
    train(recipe)
    assert 1 / 4 < expected / (time.perf_counter() - started) < 4
    assert 0.5 < trial.checkpoint / (recipe.directory / "last.ckpt").stat().st_size < 2


def test_measurements_are_counted_by_the_schedule():
    recipe = replace(TINY, epochs=2, batch_size=10)
    assert dry_run.measurements(replace(recipe, measure_at="log2"), 80) == 6  # 0, 1, 2, 4, 8, 16
    assert dry_run.measurements(replace(recipe, measure_at="every:5"), 80) == 5  # 0, 5, 10, 15, 16
    assert dry_run.measurements(replace(recipe, measure_at="off"), 80) == 0
