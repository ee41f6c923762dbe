"""Tests of a walk's summaries: each unit is read at most once, and the page equals the page made from the store."""

import gc
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import tracker
from tests.models import neox, tokens
from tests.stores import unit
from tests.test_results import unit as trajectory_unit
from tests.walk.test_walk import commit, snapshots
from tracker import pythia
from tracker.analysis.reduction import reduced
from tracker.analysis.statistics import scalars
from tracker.loggers.protocol import Row
from tracker.report import write_report
from tracker.report.contents import contents
from tracker.report.notes import provenance
from tracker.report.quantize import carried
from tracker.results import Store
from tracker.walk.summaries import Summaries


def large_unit(step: int) -> xr.Dataset:
    """Return a unit of 1.4 MB, with prompts of thousands of tokens."""
    made = unit(step, layers=4, ks=(4,), prompts=3, matrices=False, seed=0, positions=3000).drop_dims("task")
    return made.assign_coords(revision=f"step{step}", fingerprint=str(step), tokens_seen=1000.0 * step)


class Units:
    """Counter of the reads of each unit, and of the whole units in memory at the same time."""

    def __init__(self):
        self.reads: Counter[int] = Counter()
        self.alive: list[list[weakref.ref]] = []
        self.most = 0

    def count_alive(self, whole: xr.Dataset) -> xr.Dataset:
        gc.collect()
        large = [whole[name].variable.data for name in whole.data_vars if whole[name].nbytes > 100_000]
        self.most = max(self.most, 1 + sum(any(array() is not None for array in unit) for unit in self.alive))
        self.alive.append([weakref.ref(array) for array in large])
        return whole


@pytest.fixture
def units(monkeypatch) -> Units:
    units, read = Units(), Store.read

    def counted(store, step):
        units.reads[step] += 1
        return units.count_alive(read(store, step))

    monkeypatch.setattr(Store, "read", counted)
    return units


@pytest.fixture
def walk(walker, units, suite, tmp_path, monkeypatch):
    """A function that walks four checkpoints, each measured as a large unit of generated numbers."""

    def measured(plan, checkpoint, directory):
        said = {"weights_kept": "in memory", "memory_budget": "1 GB", "settings_sha256": plan.output.settings_sha256}
        return units.count_alive(large_unit(checkpoint.step).assign_attrs(said))

    monkeypatch.setattr(pythia, "measure_checkpoint", measured)
    for step in range(1, 5):
        shutil.copytree(snapshots(suite) / commit(suite, 8), tmp_path / "steps" / f"step{step}")
        (tmp_path / "steps" / f"step{step}" / "scores.json").unlink(missing_ok=True)

    def walk(*more: str) -> tuple[dict[int, int], int]:
        """Return the number of reads of each unit, and the largest number of units in memory."""
        units.__init__()
        arguments = walker.arguments("--allow_suspect", "true", *more, model=str(tmp_path / "steps"))
        assert pythia.main(arguments) == 0
        return dict(units.reads), units.most

    return walk


@pytest.mark.slow
def test_walk_keeps_one_unit_in_memory_and_reads_each_at_most_once(walk, tmp_path):
    """Its page also equals the page made from the store."""
    out = tmp_path / "out"
    assert walk() == ({}, 1)  # units measured by this walk are not read
    Store(out).file(2).unlink()
    assert walk() == ({1: 1, 3: 1, 4: 1}, 1)
    assert_page_of_the_store(out)
    scores = tmp_path / "scores.csv"
    scores.write_text("step,arc\n1,0.1\n2,0.2\n3,0.3\n4,0.4\n")
    assert walk("--scores", str(scores)) == ({1: 2, 2: 2, 3: 2, 4: 2}, 1)  # read again under the claim, to be rewritten
    assert tracker.open_results(out).score.values.tolist() == [[0.1], [0.2], [0.3], [0.4]]
    assert_page_of_the_store(out)


def peak(work, *arguments) -> int:
    """Return the peak number of bytes allocated during a call."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work(*arguments)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_units(tmp_path):
    store, size = Store(tmp_path), large_unit(1).nbytes
    store.check_settings({})
    for step in range(4):
        store.write(step, large_unit(step))
    few, many = (Summaries(store, with_rows=True) for _ in range(2))
    grown = peak(read, many, range(4)) - peak(read, few, range(2))
    assert grown < size / 2, grown / size
    rows = [many.row(step) for step in range(4)]
    assert [row and row.step for row in rows] == list(range(4)) and many.row(0) is None


def read(measured: Summaries, steps: Iterable[int]) -> None:
    for step in steps:
        measured.read(step)


def assert_page_of_the_store(out: Path) -> None:
    """Assert that the walk's page equals one made from the store, except for the time, and has the numbers of whole units."""
    made = (out / "report.html").read_text()
    rewritten = write_report(out, out.parent / "rewritten.html").read_text()
    time = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+")
    assert time.sub("", made) == time.sub("", rewritten) and len(time.findall(made)) == 1
    assert numbers(made) == json.loads(json.dumps(contents(reduced(tracker.open_results(out)))))


def numbers(page: str) -> dict:
    """Return the data that the page's scripts draw for its one store, with the arrays inserted."""
    data, arrays = (json.loads(page.split(f'id="{name}">')[1].split("</script>")[0]) for name in ("data", "arrays"))
    for array in carried(data):
        array["codes"] = arrays[array["codes"]]
    (model,) = data["models"]
    del model["name"]
    return model


@pytest.mark.slow
def test_page_is_the_same_from_memory_and_from_files(tmp_path):
    """Units of all measures give the same page from memory and when read back."""
    store = Store(tmp_path)
    store.check_settings({})
    measured, from_files = (Summaries(store, with_rows=True) for _ in range(2))
    for step in (1, 2):
        torch.manual_seed(step)
        made = tracker.measure(neox(), tokens(2), k=[2, 4], measures="all,tokenwise", pair_tokens=3)
        sources = ("prompt", ["web", "a book"])
        measured.write(step, made.assign_coords(step=step, revision=f"step{step}", prompt_source=sources))
        from_files.read(step)
        xr.testing.assert_identical(measured.by_step[step], from_files.by_step[step])
        rows = [of.row(step) for of in (measured, from_files)]
        assert rows[0] and rows[1] and rows[0].scalars == pytest.approx(rows[1].scalars, rel=0, abs=0, nan_ok=True)
        xr.testing.assert_equal(rows[0].matrices, rows[1].matrices)
    first, second = (of.reader.read(tmp_path) for of in (measured, from_files))
    assert contents(first) == contents(second) == contents(reduced(tracker.open_results(tmp_path)))
    assert provenance(first, store) == provenance(second, store)


@pytest.mark.slow
def test_unit_replaced_by_another_walk_is_read_again(tmp_path):
    store = Store(tmp_path)
    store.check_settings({})
    measured = Summaries(store, with_rows=False)
    for step in (1, 2):
        measured.write(step, large_unit(step))
    store.write(2, large_unit(2).assign(lss=lambda ds: ds["lss"] + 1))  # of the same size
    assert contents(measured.reader.read(tmp_path)) == contents(reduced(tracker.open_results(tmp_path)))


@pytest.mark.slow
def test_steps_share_equal_texts_of_their_prompts(tmp_path):
    store = Store(tmp_path)
    store.check_settings({})
    measured = Summaries(store, with_rows=False)
    for step in (1, 2, 3):
        texts = ["a", "b", "c"] if step < 3 else ["a", "b", "d"]
        store.write(step, large_unit(step).assign_coords(prompt_text=("prompt", texts)))
        measured.read(step)
    first, second, third = (measured.by_step[step]["prompt_text"] for step in (1, 2, 3))
    assert np.shares_memory(first.values, second.values) and not np.shares_memory(first.values, third.values)
    assert second.values.tolist() == ["a", "b", "c"] and third.values.tolist() == ["a", "b", "d"]


def test_row_has_the_values_of_the_whole_unit():
    whole = large_unit(3).assign_coords(suspect="doubted")
    row = Row.from_unit(whole)
    assert row.scalars == scalars(whole) and row.checkpoint == {"training/suspect": 1, "training/tokens": 3000}
    assert row.matrices.nbytes < whole.nbytes / 20
    assert Row.from_unit(whole, reduced(whole)).scalars == row.scalars
    for name in ("miscoupling", "offdiag_normalized"):
        expected = whole[name].mean(("prompt", "token"))
        xr.testing.assert_equal(row.matrices[name].mean(("prompt", "token")), expected)


REMEASURE = """
import sys
from tests.test_results import unit
from tracker.walk.summaries import Summaries
from tracker.results import Store

measured = Summaries(Store(sys.argv[1]), with_rows=False)
sys.stdin.readline()
for step in measured.store.steps():
    measured.read_or_remove(step)
    if step not in measured.by_step and (claim := measured.store.claim(step)):
        if not measured.store.has(step):
            measured.write(step, unit(step))
            print(step)
        claim.release(remove=True)
"""
ADD_SCORES = """
import sys
from types import SimpleNamespace
from tracker import pythia
from tracker.walk.summaries import Summaries
from tracker.results import Store

store, task = Store(sys.argv[1]), sys.argv[2]
measured = Summaries(store, with_rows=False)
for step in store.steps():
    measured.read(step)
sys.stdin.readline()
for step in store.steps():
    pythia._rescore(SimpleNamespace(store=store, scores={step: {task: float(step)}}), measured, step)
"""


def run_together(code: str, *arguments: list[str]) -> list[str]:
    """Run processes that start working together, at their first line of input; return their outputs."""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    processes = [subprocess.Popen([sys.executable, "-c", code, *given], text=True, **pipes) for given in arguments]
    outputs = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


@pytest.fixture
def small(tmp_path) -> Store:
    store = Store(tmp_path)
    store.check_settings({})
    for step in range(12):
        store.write(step, trajectory_unit(step).assign_coords(revision=f"step{step}"))
    return store


@pytest.mark.slow
def test_walks_that_find_the_same_damage_measure_each_unit_once(small):
    steps = small.steps()
    for step in steps:
        content = small.file(step).read_bytes()
        small.file(step).write_bytes(content[: len(content) // 2])
    outputs = run_together(REMEASURE, *[[str(small.path)]] * 3)
    assert sorted(int(step) for out in outputs for step in out.split()) == steps
    assert [int(small.read(step)["step"]) for step in steps] == steps


@pytest.mark.slow
def test_walks_with_different_scores_add_all_of_them(small):
    run_together(ADD_SCORES, *([str(small.path), task] for task in ("arc", "piqa", "sciq")))
    for step in small.steps():
        scored = small.read(step)["score"]
        assert sorted(scored["task"].values) == ["arc", "piqa", "sciq"] and (scored == step).all()
    assert not list(small.units.glob(".*"))
