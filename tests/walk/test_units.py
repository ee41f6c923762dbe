"""Tests of the units of a walk: few are in memory at once, and damaged ones are measured again."""

import re
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import xarray as xr
from torch import nn

import tracker
from checkpoints.suites import Checkpoint
from tests.support.models import neox, tokens
from tests.support.stores import stored, unit
from tests.support.suite import copied
from tracker import pythia
from tracker import store as results
from tracker.analysis.curves import scalars
from tracker.analysis.reduction import read_reduced, reduced
from tracker.common.errors import CheckpointError
from tracker.common.text import UNTRAINED
from tracker.loggers.protocol import Row
from tracker.report import write_report
from tracker.report.contents import contents
from tracker.report.texts import provenance
from tracker.store import Store
from tracker.walk import units
from tracker.walk.units import Units


def generated(step: int, layers: int = 4, positions: int = 3000) -> xr.Dataset:
    """Return a unit, of 1.4 MB by default, with prompts of thousands of tokens."""
    made = unit(
        step, layers, ks=(4,), prompts=3, matrices=False, seed=0, positions=positions
    ).drop_dims("task")
    return made.assign_coords(
        revision=f"step{step}", fingerprint=str(step), tokens_seen=1000.0 * step
    )


small_unit = partial(generated, layers=2, positions=12)


def test_causal_masks_are_no_fault_of_the_weights():
    """Two modules hold one mask."""
    model, device = nn.Sequential(nn.Linear(2, 2), nn.Identity()), torch.device("cpu")
    mask = torch.full((2, 2), -torch.inf).triu(1)
    for part in model:
        part.register_buffer("mask", mask)
    with units._fingerprint(model, device) as found:
        assert found.result()
    nn.init.constant_(model[0].bias, -torch.inf)
    with (
        pytest.raises(CheckpointError, match=r"infinite weights in 0\.bias;"),
        units._fingerprint(model, device),
    ):
        pass


def test_prompts_that_the_model_does_not_take_may_be_cut(walker, monkeypatch, capsys):
    monkeypatch.setattr("transformers.GPTNeoXModel.forward", lambda *_, **__: 1 / 0)
    assert walker.main("--steps", "0") == 2
    said = "fails on the inputs, 3 texts, which --max_tokens can cut: ZeroDivisionError"
    assert said in capsys.readouterr().err


@pytest.fixture
def reads(monkeypatch) -> Counter[int]:
    """Return how often each unit was read in full."""
    reads, read = Counter[int](), Store._content

    def counted(store, step, names=None, like=None):
        reads[step] += names is None
        return read(store, step, names, like)

    monkeypatch.setattr(Store, "_content", counted)
    return reads


@pytest.fixture
def walk(walker, reads, suite, tmp_path, monkeypatch):
    """A function that walks four checkpoints, each measured as a large unit of generated numbers."""

    def measured(plan, checkpoint, directory):
        said = {
            "weights_kept": "in memory",
            "memory_budget": "1 GB",
            "settings_sha256": plan.output.settings_sha256,
        }
        return generated(checkpoint.step).assign_attrs(said)

    monkeypatch.setattr(units, "measure_checkpoint", measured)
    for step in range(1, 5):
        copied(suite, 8, tmp_path / "steps" / f"step{step}")
        (tmp_path / "steps" / f"step{step}" / "scores.json").unlink(missing_ok=True)

    def walk(*more: str) -> list[int]:
        """Return how often units 1 to 4 were read."""
        reads.clear()
        arguments = walker.arguments(
            "--allow_suspect", "true", *more, model=str(tmp_path / "steps")
        )
        assert pythia.main(arguments) == 0
        return [reads[step] for step in range(1, 5)]

    return walk


@pytest.mark.slow
def test_walk_reads_each_unit_at_its_start_and_for_its_page(walk, tmp_path):
    """Its page also equals the page made from the store."""
    out = tmp_path / "out"
    assert walk() == [1, 1, 1, 1]
    Store(out).file(2).unlink()
    assert walk() == [2, 1, 2, 2]
    assert_page_of_the_store(out)
    scores = tmp_path / "scores.csv"
    scores.write_text("step,arc\n1,0.1\n2,0.2\n3,0.3\n4,0.4\n")
    # Read again under the claim, and before they are replaced.
    assert walk("--scores", str(scores)) == [4, 4, 4, 4]
    assert tracker.open_results(out).score.values.tolist() == [[0.1], [0.2], [0.3], [0.4]]
    assert_page_of_the_store(out)
    assert walk("--scores", str(scores)) == [2, 2, 2, 2]


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
def test_memory_does_not_grow_with_the_number_of_units(tmp_path, monkeypatch):
    size = generated(1).nbytes
    monkeypatch.setattr(results, "AT_ONCE", size)
    store = stored(tmp_path / "many", {step: generated(step) for step in range(6)})
    few, many = (Units(store) for _ in range(2))
    few.read([0, 1])
    grown = peak(many.read, list(range(6))) - peak(few.read, [0, 1])
    assert grown < size / 2, grown / size
    assert [known.row.step for known in many.known.values()] == list(many.known) == list(range(6))
    two = stored(tmp_path / "few", {step: generated(step) for step in (0, 1)})
    pages = [peak(read_reduced, path) for path in (store.path, two.path)]
    assert pages[0] - pages[1] < size / 2, (pages[0] - pages[1]) / size


def assert_page_of_the_store(out: Path):
    """Assert that the walk's page equals one made from the store, except for the time."""
    made = (out / "report.html").read_text()
    rewritten = write_report(out, out.parent / "rewritten.html").read_text()
    time = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+")
    assert time.sub("", made) == time.sub("", rewritten) and len(time.findall(made)) == 1


@pytest.mark.slow
def test_rows_are_the_same_measured_and_read_together(tmp_path):
    """The page, whose units are reduced one by one, has the numbers of the whole store."""
    store = Store(tmp_path)
    store.check_settings({})
    measured, from_files = Units(store), Units(store)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        made = tracker.measure(neox(), tokens(2), k=[2, 4], measures="all,tokenwise", pair_tokens=3)
        made = made.assign_coords(
            step=step, revision=f"step{step}", prompt_source=("prompt", ["web", "a book"])
        )
        measured.add(step, *measured.prepare(made))
    from_files.read([1, 2, 3])
    assert measured.known == from_files.known
    for step in (1, 2, 3):
        rows = [of.known[step].row for of in (measured, from_files)]
        assert rows[0].scalars == pytest.approx(rows[1].scalars, rel=1e-14, nan_ok=True)
        assert rows[0].headline == rows[1].headline and rows[0].checkpoint == rows[1].checkpoint
        xr.testing.assert_allclose(
            *(row.miscoupling.reset_coords(drop=True) for row in rows), rtol=1e-14
        )
    whole = reduced(tracker.open_results(tmp_path))
    read = read_reduced(tmp_path)
    assert contents(read) == contents(whole) and provenance(read, store) == provenance(whole, store)


def test_row_has_the_values_of_the_whole_unit():
    whole = generated(3).assign_coords(suspect="doubted")
    row = Row.from_unit(whole)
    assert row.scalars == scalars(whole) and row.checkpoint == {
        "training/suspect": 1,
        "training/tokens": 3000,
    }
    assert row.miscoupling.nbytes < whole.nbytes / 20 and row.miscoupling.name == "miscoupling"
    expected = whole["miscoupling"].astype(float).mean(("prompt", "token"))
    xr.testing.assert_equal(row.miscoupling, expected)


def test_scores_join_those_of_a_unit_and_an_untrained_model_has_none():
    scored = units.with_scores(small_unit(1), {"arc": 0.5, "piqa": 0.1}, "a.csv")
    scored = units.with_scores(scored, {"piqa": 0.25}, "b.csv")
    assert scored.score.to_series().to_dict() == {"arc": 0.5, "piqa": 0.25}
    assert scored.attrs["scores_from"] == "a.csv; b.csv"
    untrained = small_unit(0).assign_coords(revision=f"{UNTRAINED}3")
    assert "score" not in units.with_scores(untrained, {"arc": 0.5}, "a.csv")


def test_changed_are_weights_of_another_hash_where_both_are_known(tmp_path):
    measured = Units(Store(tmp_path))
    for step, digest in enumerate(("a", "a", "a", "")):
        measured.known[step] = SimpleNamespace(files_sha256=digest)
    now = dict(enumerate(("a", "b", "", "b", "b")))
    selection = SimpleNamespace(
        checkpoints=[Checkpoint(step, "runs", None) for step in now], digest=lambda c: now[c.step]
    )
    assert measured.changed(selection) == [1]


def add_scores(path: Path, task: str, ready: Barrier):
    store = Store(path)
    measured = Units(store)
    measured.read(store.steps())
    ready.wait()
    for step in store.steps():
        scores = {step: {task: float(step)}}
        output = SimpleNamespace(store=store, scores=scores, scores_from=f"{task}.csv")
        pythia._rescore(output, measured, step)


@pytest.mark.slow
def test_walks_with_different_scores_add_all_of_them(tmp_path):
    store, ready = stored(tmp_path, {step: small_unit(step) for step in range(12)}), Barrier(3)
    tasks = ["arc", "piqa", "sciq"]
    with ThreadPoolExecutor(3) as pool:
        added = [pool.submit(add_scores, tmp_path, task, ready) for task in tasks]
    assert [work.result() for work in added] == [None] * 3
    for step in store.steps():
        unit = store.read(step)
        scored = unit["score"]
        assert set(unit.attrs["scores_from"].split("; ")) == {f"{task}.csv" for task in tasks}
        assert sorted(scored["task"].values) == tasks and (scored == step).all()
    assert not list(store.units.glob(".*"))
