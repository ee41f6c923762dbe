"""Walks on an accelerator: what stays on it, what is copied, and that results and fingerprints are those of the CPU."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import tracker
from benchmarks import shapes
from checkpoints import integrity
from checkpoints.load import load_model
from checkpoints.suites import find_suite
from tests.conftest import USUAL, Walker
from tests.support.suite import copied
from tests.support.units import assert_same
from tracker import measurement
from tracker.blocks.find import find_blocks
from tracker.common.errors import CheckpointError
from tracker.model.weights import weights_memory
from tracker.walk import plan, units
from tracker.walk.command import parse

GB = 10**9
BUDGET = 50_000_000
FLAGS = ("--memory_budget", "50MB", "--svd", "full", *USUAL)


@pytest.fixture(scope="module")
def runs(suite, tmp_path_factory) -> Path:
    """A directory of two checkpoints."""
    directory = tmp_path_factory.mktemp("runs")
    for step in (1, 8):
        copied(suite, step, directory / f"step{step}")
    return directory


@pytest.fixture(scope="module")
def on_cpu(runs, suite, tmp_path_factory):
    """The results of the walk on the CPU."""
    walker = Walker(suite, tmp_path_factory.mktemp("cpu"))
    assert walker.main(*FLAGS, model=str(runs)) == 0
    return tracker.open_results(walker.out).load()


@pytest.mark.slow
def test_walk_on_a_device_that_holds_all_weights_and_on_one_that_does_not(
    pretend, walker, runs, on_cpu
):
    names = ("miscoupling", "singular_value", "lss")
    stored, before = {}, pretend.live_bytes()
    for where, room in (("on the device", 20 * GB), ("in a copy of their files", BUDGET)):
        out = walker.directory / where.replace(" ", "_")
        with pretend.memory_limit(before + room), pretend.count() as counts:
            flags = (*FLAGS, "--device", str(pretend.device), "--out", str(out))
            assert walker.main(*flags, model=str(runs)) == 0
        found = stored[where] = tracker.open_results(out).load()
        assert found.attrs["weights_kept"] == where and found.attrs["memory_budget"] == "50 MB"
        assert found.attrs["device"] == "pretend" and counts.launches > 0
        np.testing.assert_array_equal(found.fingerprint, on_cpu.fingerprint)
        assert_same(found, on_cpu, names, rtol=2e-4, atol=1e-5)
    assert_same(stored["on the device"], stored["in a copy of their files"], names)
    gc.collect()
    assert pretend.live_bytes() <= before


@pytest.fixture
def checkpoint(pretend, walker, runs):
    """What `measure_checkpoint` takes: a plan for the device, a checkpoint and its directory."""
    walk = parse(walker.arguments(*FLAGS, "--device", str(pretend.device), model=str(runs)))
    made = plan.make_plan(walk, find_suite(walk.model))
    last = made.selection.checkpoints[-1]
    return made, last, Path(last.source)


@pytest.mark.slow
def test_weights_stay_on_the_device_if_they_and_the_budget_fit_what_is_free(pretend, checkpoint):
    model = load_model(checkpoint[-1])
    weights = weights_memory(model, find_blocks(model), torch.float32)
    del model
    kept = {}
    for lacking in (0, 1):
        # Storages of earlier tests: freed later, they would leave more room than the limit says
        gc.collect()
        limit = pretend.live_bytes() + weights + BUDGET - lacking
        with pretend.memory_limit(limit):
            kept[lacking] = units.measure_checkpoint(*checkpoint).attrs["weights_kept"]
    assert kept == {0: "on the device", 1: "in a copy of their files"}


def test_fingerprint_is_computed_while_the_device_measures(checkpoint, monkeypatch):
    measuring, hashed = threading.Event(), threading.Event()
    fingerprint, measure = integrity.fingerprint, measurement.measure_with

    def hash_meanwhile(*tensors_and_buffers):
        assert measuring.wait(300), "the measurement waits for the fingerprint"
        found = fingerprint(*tensors_and_buffers)
        hashed.set()
        return found

    def measure_meanwhile(*arguments, **options):
        measuring.set()
        assert hashed.wait(300), "the fingerprint waits for the measurement"
        return measure(*arguments, **options)

    monkeypatch.setattr(integrity, "fingerprint", hash_meanwhile)
    monkeypatch.setattr(measurement, "measure_with", measure_meanwhile)
    measured = units.measure_checkpoint(*checkpoint)
    assert measured.fingerprint.item() == fingerprint(
        load_model(checkpoint[-1]).state_dict().items()
    )


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_are_not_finite_are_named_whatever_the_measurement_makes_of_them(
    checkpoint, monkeypatch, fails
):
    reported = threading.Event()

    def measure(*arguments):
        reported.set()
        if fails:
            raise FloatingPointError("block 1 gives values that are not finite")
        return "never stored", True

    def fingerprint(*tensors_and_buffers):
        assert reported.wait(300)
        raise CheckpointError("NaN or infinite weights in a tensor")

    monkeypatch.setattr(integrity, "fingerprint", fingerprint)
    monkeypatch.setattr(units, "_measure", measure)
    with pytest.raises(CheckpointError, match="NaN or infinite weights"):
        units.measure_checkpoint(*checkpoint)


def test_what_the_measurement_raises_is_raised_where_the_weights_are_finite(pretend, checkpoint):
    with pretend.failing("aten::mm"), pytest.raises(RuntimeError, match="CUDA error"):
        units.measure_checkpoint(*checkpoint)


@pytest.fixture(scope="module")
def pythia_12b():
    """Pythia 12b in float16, without values."""
    return shapes.model("12b", None, "meta", vocabulary=50688).half()


@pytest.mark.parametrize(
    ("total", "budget", "stays"),
    [
        (80, 40, True),
        (48, 16.15, True),  # what the weights leave
        (32, 16, False),  # they would leave less than an eighth
    ],
)
def test_12b_stays_on_a_device_beside_the_default_budget(
    monkeypatch, pythia_12b, total, budget, stays
):
    device = torch.device("cuda")
    monkeypatch.setattr(plan, "_free_and_total", lambda device: (total * GB * 0.99, total * GB))
    weights = weights_memory(pythia_12b, find_blocks(pythia_12b), torch.float32)
    # In float16, and in float32 what is outside the blocks, and one block
    assert 23.7 * GB < weights < 27.5 * GB
    found = plan.default_budget(device, weights)
    assert found == pytest.approx(budget * GB, rel=0.01)
    assert plan.stays_on_device(device, weights, found) == stays
