"""A training that is measured in each of the three ways: its store through runs that are resumed, fail and begin again."""

import numpy as np
import pytest
import torch
import wandb

import tracker
from tests.support.drivers import DRIVERS, OUT_OF_MEMORY, in_a_loop, in_lightning
from tests.support.files import contents
from tests.support.ranks import assert_store_is_like_any_other
from tests.support.refused import refused
from tests.support.stores import assert_same_results
from tests.support.wandb_runs import of, offline_run, records
from tracker.analysis.curves import scalars
from tracker.loggers.wandb import AXIS
from tracker.measures.registry import headline_names
from tracker.store import Store

pytestmark = pytest.mark.slow

ANOTHER = "holds the units of another run|belongs to another training"
COST = {"cost/seconds", "cost/share"}
PICTURES = {"miscoupling/heatmap/k2", "miscoupling/heatmap/k4"}


@pytest.fixture(params=DRIVERS)
def train(request):
    return DRIVERS[request.param]


def test_results_are_those_of_measure_in_the_store_and_in_wandb(train, tmp_path):
    """By default W&B has 13 numbers, of the smallest K, and the heat maps, all of which the automatic workspace shows."""
    units, options = [], {"k": (2, 4), "measures": "coupling,trajectory"}
    watched = {"every": 2, "name": "val", "max_overhead": None, "on_measure": units.append}
    try:
        trained = train(tmp_path, 6, logs=True, **options, **watched)
    finally:
        wandb.finish()
    store, expected = Store(tmp_path / "store"), tracker.measure(*trained, **options)
    assert [int(unit.step) for unit in units] == [0, 2, 4, 6]
    for unit in (units[-1], store.read(6)):
        np.testing.assert_array_equal(unit.miscoupling, expected.miscoupling)
    assert_store_is_like_any_other(store.path, [0, 2, 4, 6])

    found = records(offline_run(tmp_path))
    rows = [row["item"] for row in of("history", found)]
    rows = [row for row in rows if any(name.startswith("val/") for name in row)]
    assert [row[AXIS] for row in rows] == [0, 2, 4, 6]
    metrics = {metric["name"]: metric for metric in of("metric", found) if "name" in metric}
    assert metrics[AXIS]["options"]["hidden"]
    ours = {name.removeprefix("val/") for name in metrics if name.startswith("val/")}
    numbers = ours - COST - PICTURES
    assert len(numbers) == 11 and numbers < {*headline_names(2)} and ours > COST | PICTURES
    for name in ours:
        metric = metrics[f"val/{name}"]
        assert metric["step_metric"] == AXIS and "hidden" not in metric["options"], name
    assert metrics["val/miscoupling/mean_offdiag"]["summary"] == {"min": True, "last": True}
    for row, unit in zip(rows, units, strict=True):
        logged = {name for name in row if "val/" in name and "heatmap" not in name}
        assert logged == {f"val/{name}" for name in numbers | COST}
        measured = scalars(unit)
        for name in numbers:
            assert row[f"val/{name}"] == pytest.approx(measured[name], rel=1e-12), name
        assert all(row[f"val/{name}._type"] == "image-file" for name in PICTURES)


def test_a_resumed_run_continues_its_store(train, tmp_path):
    """Its units are those of a whole run; those beyond its checkpoint are set aside, and another run is refused."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(whole, 6)
    train(run, 5)
    train(run, 6, resume=3)
    store = Store(run / "store")
    assert [*contents(store.path / "superseded")] == ["step00000004.nc", "step00000005.nc"]
    assert store.steps() == [0, 1, 2, 3, 4, 5, 6]
    assert_same_results(store.path, whole / "store")
    with refused(ANOTHER):
        train(run, 6)


def test_a_run_is_resumed_beyond_a_damaged_unit(train, tmp_path):
    """What was measured, and how, is read from the last whole unit; the damaged one stays."""
    train(tmp_path, 4)
    store = Store(tmp_path / "store")
    half = store.file(4).read_bytes()[:5000]
    store.file(4).write_bytes(half)
    train(tmp_path, 5, resume=4)
    assert store.steps() == [0, 1, 2, 3, 4, 5] and store.file(4).read_bytes() == half


def test_a_run_that_fails_begins_again(train, tmp_path):
    """What is measured may depend on the size of the batch."""
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, 4, error=torch.OutOfMemoryError(OUT_OF_MEMORY))
    with refused(r"k was \[2\], now \[3\].*never mixed"):
        train(tmp_path, 4, k=3)
    store = Store(tmp_path / "store")
    measured = store.steps()
    with pytest.warns(UserWarning, match=f"the run begins again: its {len(measured)} units so far"):
        train(tmp_path, 4, samples=2)
    assert store.steps() == [0, 1, 2, 3, 4] and measured in ([0, 1, 2], [0, 1])
    assert len(contents(store.path / "superseded")) == len(measured)
    assert not (store.path / ".training").exists()


@pytest.mark.parametrize("train", [in_lightning, in_a_loop])
def test_a_run_that_the_user_stops_keeps_its_units(train, tmp_path):
    """Transformers' Trainer does not say why a run has ended."""
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(tmp_path, 4, error=KeyboardInterrupt())
    store = Store(tmp_path / "store")
    measured = store.steps()
    with refused(ANOTHER):
        train(tmp_path, 4)
    assert store.steps() == measured != []
