"""Tests of the time that trainings and grids take: what a dry run states, and what a training and a grid show of it."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support import processes
from tests.support.vit_trainings import TINY, grid_arguments
from tracker.common.text import duration
from vit import cells, grid, overview, training


@pytest.fixture
def clock(monkeypatch):
    """The time of the bar of a grid, which stands still."""
    clock = SimpleNamespace(now=1000.0)
    standing = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(overview, "time", standing)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


@pytest.fixture
def seconds_of_step(monkeypatch):
    monkeypatch.setattr(overview, "seconds_of_step", lambda recipe, weights: 2.0)


def test_a_dry_run_adds_up_the_cells(seconds_of_step, tmp_path):
    three = [replace(TINY, seed=seed, out=tmp_path / str(seed)) for seed in range(3)]
    three[0].directory.mkdir()
    cells.write(three[0].directory, "history", [{}])
    first, *_ = overview.describe(three, three, 96, 10).splitlines()
    # 2 + 3 + 3 epochs of 3 steps
    assert first.split("about ")[1].startswith("48 s for the steps of all, one cell at a time")


def test_a_step_takes_six_operations_for_each_weight_and_token(monkeypatch):
    machine = SimpleNamespace(rate=1e9)
    monkeypatch.setattr("tracker.measures.cost.this_machine", lambda device: machine)
    recipe = replace(TINY, image_size=32, patch_size=8, batch_size=32)
    assert overview.seconds_of_step(recipe, 1000) == 6 * 1000 * 17 * 32 / (overview.SHARE * 1e9)


def test_a_dry_run_states_what_the_papers_grid_cannot_answer_and_which_answers_all(
    seconds_of_step, tmp_path
):
    of_one, of_three = (
        grid.cells(grid.GridCommand(seeds=seeds, out=tmp_path), TINY) for seeds in ("0", "0,1,2")
    )
    text = " ".join(overview.describe(of_one, of_one, 96, 10).split())
    assert text.count("questions ") == 1 and "Accuracy" not in text
    assert "Coupling rises with stochastic depth; coupling rises with" in text
    smallest = "all questions: 8 weight decays x 8 rates x 2 seeds, 128 cells, about"
    assert text.endswith(f"{smallest} {duration(128 * 9 * 2.0)}")
    assert "questions" not in overview.describe(of_three, of_three, 96, 10)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("output, has_bar", [(Terminal, True), (io.StringIO, False)])
def test_each_epoch_has_a_line_and_a_terminal_has_lightning_s_bar(
    output, has_bar, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.stdout", shown := output())
    training.train(replace(TINY, measure_at="off", out=tmp_path), show=True)
    line = r"epoch (\d)/3: loss [\d.]+, test accuracy 0\.\d{4}  \([\d.]+ s, about ([\d.]+) s left\)"
    lines = re.findall(line, shown.getvalue())
    assert [number for number, _ in lines] == ["1", "2", "3"]
    assert float(lines[-1][1]) == 0
    assert ("Epoch " in shown.getvalue()) == has_bar


@pytest.fixture
def six(tmp_path):
    """Cells of 10 epochs, of which the first has 5 and the second 2 from an earlier process."""
    six = [replace(TINY, seed=seed, epochs=10, out=tmp_path / str(seed)) for seed in range(6)]
    for cell in six:
        cell.directory.mkdir()
    train_to(six[0], 5)
    train_to(six[1], 2)
    return six


def train_to(cell, epochs):
    cells.write(cell.directory, "history", [{}] * epochs)


def fail(cell):
    cells.write(cell.directory, "failed", {"reason": "no memory"})


def finish(cell):
    train_to(cell, cell.epochs)
    cells.write(cell.directory, "result", {"status": "finished", "accuracy": 0.5})


def test_lines_of_a_grid_state_the_time_left_once_an_epoch_is_trained(
    six, clock, monkeypatch, capsys
):
    monkeypatch.setattr(overview, "SECONDS", 0.01)
    with overview.shown(six):
        fail(six[5])  # before it trained anything
        printed = []
        processes.wait_until(lambda: printed.append(capsys.readouterr().out) or "".join(printed))
        clock.now += 60.0
        finish(six[0])
    assert ("".join(printed) + capsys.readouterr().out).splitlines() == [
        f"[1/6] {six[5].cell}: crashed: no memory",
        f"[2/6] {six[0].cell}: 0.5000  about 7.6 min left",  # 8 + 3 * 10 epochs of 12 s
    ]


def test_the_bar_of_a_grid_counts_epochs_and_states_the_same_time_left(six, clock, monkeypatch):
    monkeypatch.setattr(overview, "SECONDS", 1e6)  # looked at once, at the end
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    with overview.shown(six):
        clock.now += 60.0
        finish(six[0])
        fail(six[5])
    printed = terminal.getvalue()
    assert "| 7/60 epochs, ? left" in printed
    assert "| 12/60 epochs, 09:36 left" in printed  # 8 + 4 * 10 epochs of 12 s
    assert f"[1/6] {six[0].cell}: 0.5000  about 9.6 min left" in printed
    assert "| 12/50 epochs, 07:36 left" in printed
    assert f"[2/6] {six[5].cell}: crashed: no memory  about 7.6 min left" in printed


def test_a_history_that_is_written_anew_leaves_the_time_unknown(six, clock, monkeypatch, capsys):
    """As where the checkpoint of an earlier process is missing."""
    monkeypatch.setattr(overview, "SECONDS", 1e6)
    with overview.shown(six):
        clock.now += 60.0
        train_to(six[0], 1)
        train_to(six[2], 1)
        fail(six[2])
    assert capsys.readouterr().out == f"[1/6] {six[2].cell}: crashed: no memory\n"


@pytest.mark.slow
def test_a_dry_run_states_cells_time_memory_and_disk_and_keeps_nothing(tmp_path, capsys):
    done = tmp_path / "grid" / "wd0.01_sd0_seed0"
    done.mkdir(parents=True)
    cells.write(done, "result", {"status": "finished"})
    assert grid.main(grid_arguments(tmp_path, "--dry_run", "true", jobs=2)) == 0
    first, out = capsys.readouterr().out.split("\n", 1)
    assert first.startswith("4 cells, 1 already done; results would be in ")
    for text in (
        "time         about",
        "kept after training:",
        "8 weight decays x 2 rates x 4 seeds",
    ):
        assert text in out
    assert [*(tmp_path / "grid").rglob("*")] == [done, done / "result.json"]
