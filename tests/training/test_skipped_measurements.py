"""Measurements that fail do not end the training, nor change it; errors of the device do end it."""

import gc
import json
import warnings

import pytest
import torch

import tracker
from tests.support.lightning_runs import ON_PRETEND_DEVICE, Classifier, fit, trainer
from tests.support.models import neox, tokens
from tests.support.watch import Watch
from tracker import measurement
from tracker.jacobians.rows import Jacobians
from tracker.skipped import Skipped
from tracker.store import Store
from tracker.training.claim import claim

NO_HANDLE = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ERRORS = {
    "runtime": RuntimeError("no kernel for this shape"),
    "memory": RuntimeError(NO_HANDLE),
}


def trained(**options):
    """Train on the pretend device; return the losses and everything that the training left."""
    runner = trainer(**ON_PRETEND_DEVICE, **options)
    module = fit(runner, lambda: Classifier(drop=0.2))
    state = [tensor.cpu() for tensor in module.state_dict().values()]
    return module.losses, [
        *state,
        torch.get_rng_state(),
        torch.get_device_module("pretend").get_rng_state(),
    ]


def assert_trained_alike(one, other):
    assert one[0] == other[0] and len(one[0]) == 8
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)


def failing_at(monkeypatch, step, error, watch):
    """Let a measurement raise at one step, after it has recorded the model and drawn random numbers."""
    real = Jacobians.__call__

    def planted(*arguments):
        if watch.run.last_checked == step:
            torch.rand(3, device=arguments[0].replica.device)
            raise type(error)(*error.args)  # `error` itself lives on, and would keep its frames
        return real(*arguments)

    monkeypatch.setattr(Jacobians, "__call__", planted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_a_skipped_measurement_does_not_change_the_training(pretend, monkeypatch, kind):
    error, watch = ERRORS[kind], Watch(2)
    plain = trained()
    failing_at(monkeypatch, 2, error, watch)
    with pytest.warns(UserWarning, match="step 2 is not measured") as caught:
        watched = trained(callbacks=[watch])
    assert_trained_alike(plain, watched)
    assert len([w for w in caught if "not measured" in str(w.message)]) == 1
    assert list(watch.units) == [0, 4, 6, 8] and list(watch.skipped.reasons) == [2]
    (reason,) = watch.skipped.reasons.values()
    assert str(error) in reason and reason.startswith(
        "OutOfMemoryError" if "memory" in kind else type(error).__name__
    )


@pytest.mark.slow
def test_each_attempt_starts_with_the_same_memory(pretend, monkeypatch):
    """What a failed attempt allocated is free before the next, although its frames form cycles."""
    real, watch, budgets = measurement.measure_samples, Watch(steps=[0, 1]), []
    starts, peaks = [], []

    def scarce(*arguments):
        budgets.append(arguments[3].memory_budget)
        if len(starts) < 2:  # what other tests left; between attempts the callback collects
            gc.collect()
        starts.append(pretend.live_bytes())
        pretend.reset_peak()
        limit = starts[1] + peaks[0] // 4 if peaks else 1 << 40
        try:
            with pretend.memory_limit(limit):
                return real(*arguments)
        except torch.OutOfMemoryError as error:
            failure = error
            failure.held = torch.empty(5000, device=pretend.device)
        finally:
            peaks.append(pretend.peak_bytes() - starts[-1])
        raise failure  # whose frames include this one, which holds it: a cycle

    monkeypatch.setattr(measurement, "measure_samples", scarce)
    with pytest.warns(UserWarning, match="step 1 is not measured .OutOfMemoryError"):
        trained(callbacks=[watch], max_steps=1)
    assert list(watch.units) == [0]
    assert budgets[1:] == [budgets[0], budgets[0] // 2, budgets[0] // 4]
    assert len(starts) == 4 and len(set(starts[1:])) == 1
    assert min(peaks[1:]) > 20_000  # each attempt has allocated more than what its error holds


@pytest.mark.slow
def test_a_skipped_measurement_holds_no_memory(pretend, monkeypatch):
    """Its error's frames hold the tensors, and are part of a cycle; the training may need the memory."""
    real, watch, starts = measurement.measure_samples, Watch(2), []

    def recording(*arguments):
        if not starts:
            gc.collect()  # what other tests left
        starts.append(pretend.live_bytes())
        return real(*arguments)

    monkeypatch.setattr(measurement, "measure_samples", recording)
    failing_at(monkeypatch, 4, RuntimeError("no kernel for this shape"), watch)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="step 4 is not measured"):
            trained(callbacks=[watch])
    finally:
        gc.enable()
    assert list(watch.units) == [0, 2, 6, 8] and len(starts) == 5
    assert len(set(starts[1:])) == 1  # from the second step on, the optimizer has its state


CONTINUES = "step {} is {} (RuntimeError: planted); {}training continues"
NONE_YET = "no step has results yet; "
# Where steps fail, which, and what is said
ENDINGS = {
    "all": (
        (measurement, "measure_samples"),
        [0, 1, 2],
        [
            CONTINUES.format(0, "not measured", NONE_YET),
            "this run has no results; skipped: 3 steps (0, 1, 2), the last: RuntimeError: planted",
        ],
    ),
    "one": ((measurement, "measure_samples"), [1], [CONTINUES.format(1, "not measured", "")]),
    "not stored": (
        (Store, "write"),
        [0, 1, 2],
        [
            CONTINUES.format(0, "measured but not stored", NONE_YET),
            "this run has no results; skipped: 3 steps (0, 1, 2), the last: not stored: RuntimeError: planted",
        ],
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_what_a_run_says_of_skipped_steps(case, monkeypatch, tmp_path):
    (place, name), failing, expected = ENDINGS[case]
    real, model = getattr(place, name), neox()

    def planted(*arguments):
        if watch.run.last_checked in failing:
            raise RuntimeError("planted")
        return real(*arguments)

    monkeypatch.setattr(place, name, planted)
    options, logged = {"k": 2, "probe": tokens(), "save_dir": str(tmp_path)}, []
    with warnings.catch_warnings(record=True, action="always") as caught:
        with tracker.Watch(1, log_to=lambda row, _: logged.append(row), **options) as watch:
            for step in range(3):
                watch(step, model)
    assert [str(w.message) for w in caught if "step" in str(w.message)] == expected
    assert list(watch.skipped.reasons) == failing == list(Store(tmp_path).skipped())
    assert logged[-1]["diagnostics/skipped"] == len(failing)
    assert Store(tmp_path).steps() == [step for step in range(3) if step not in failing]


def test_a_resumed_run_forgets_later_skips(tmp_path):
    """Later units: test_drivers."""
    store = Store(tmp_path)
    claim(store, {}, 0, resumed=False, again=False)
    skipped = Skipped(store, pytest.fail)
    skipped.add(3, "RuntimeError: first")
    skipped.add(7, "RuntimeError: second")
    claim(store, {}, 5, resumed=True, again=False)
    assert store.skipped() == {3: "RuntimeError: first"}
    store.file(3).touch()  # measured after all
    assert store.skipped() == {}
    assert json.loads((tmp_path / "skipped.json").read_text()) == {"3": "RuntimeError: first"}


@pytest.mark.slow
def test_a_training_without_float64_is_measured_on_the_cpu(pretend):
    watch = Watch(4)
    plain = trained()
    with pretend.without_float64():
        watched = trained(callbacks=[watch])
    assert_trained_alike(plain, watched)
    assert [unit.attrs["device"] for unit in watch.units.values()] == ["cpu"] * 3
