"""A walk stops at an error of the device: the process could not measure another revision on it."""

import gc

import pytest
import torch

from tests.conftest import USUAL
from tracker import measurement, pythia
from tracker.jacobians.rows import Jacobians
from tracker.walk import units

pytestmark = pytest.mark.slow


def test_an_error_of_the_device_ends_the_walk(walker, monkeypatch, capsys):
    measure, store = units.measure_checkpoint, walker.store
    lost = "CUDA error: an illegal memory access was encountered"

    def failing(plan, checkpoint, directory):
        if checkpoint.step == 2:
            raise torch.AcceleratorError(f"{lost}\nCUDA kernel errors might be")
        return measure(plan, checkpoint, directory)

    command = walker.arguments("--steps", "0,1,2,4")
    with monkeypatch.context() as patch:
        patch.setattr(units, "measure_checkpoint", failing)
        assert pythia.main(command) == 1
    assert capsys.readouterr().err.endswith(
        f"error: step 2: the device failed ({lost}), and this process can't use it any more; finished revisions are kept, and "
        "the same command continues with the rest\n"
    )
    assert store.steps() == [0, 1]
    assert pythia.main(command) == 0 and store.steps() == [0, 1, 2, 4]


def test_a_revision_that_fails_leaves_its_memory_to_the_next(pretend, walker, monkeypatch, capsys):
    measure, form, starts = units.measure_checkpoint, Jacobians.__call__, {}

    def recording(plan, checkpoint, directory):
        starts[checkpoint.step] = pretend.live_bytes()
        return measure(plan, checkpoint, directory)

    def failing(*arguments):
        Js = form(*arguments)
        if list(starts)[-1] == 2:
            error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            error.held = Js
            raise error
        return Js

    def failing_in_a_cycle(*arguments):
        try:
            return failing(*arguments)
        except torch.OutOfMemoryError as error:
            kept = error
        raise kept  # whose frames include this one, which holds it

    monkeypatch.setattr(units, "measure_checkpoint", recording)
    monkeypatch.setattr(Jacobians, "__call__", failing_in_a_cycle)
    command = walker.arguments(
        "--steps", "0,1,2,4", "--device", "pretend", "--memory_budget", "50MB", *USUAL
    )
    gc.collect()  # what other tests left
    gc.disable()
    try:
        assert pythia.main(command) == 1
    finally:
        gc.enable()
    assert capsys.readouterr().err == (
        "failed: step 2: memory runs out with a budget of 50 MB beside the weights (CUDA out of memory. Tried to allocate "
        "2.00 GiB); give a smaller --memory_budget\n"
    )
    assert walker.store.steps() == [0, 1, 4]
    assert list(starts) == [0, 1, 2, 4] and len(set(starts.values())) == 1


def test_a_walk_ends_if_memory_runs_out_for_the_first_three_revisions(walker, monkeypatch, capsys):
    calls = []

    def scarce(settings, *arguments, **options):
        calls.append(settings.memory_budget)
        raise MemoryError("Unable to allocate 8.00 GiB")

    monkeypatch.setattr(measurement, "measure_with", scarce)
    assert walker.main("--steps", "0,1,2,4", "--memory_budget", "50MB") == 2
    assert calls == [50_000_000] * 3
    assert capsys.readouterr().err == (
        "error: memory runs out with a budget of 50 MB beside the weights (Unable to allocate 8.00 GiB); give a smaller "
        "--memory_budget\n"
    )
