"""Pickles and copies of the three classes that measure, before, during and after a training."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import neox, tokens
from tests.support.trainer import make
from tests.support.watch import PROBE
from tracker.store import Store


def through_pickle(given):
    return pickle.loads(pickle.dumps(given))


COPIES = {"pickle": through_pickle, "deepcopy": deepcopy}


@pytest.mark.slow
def test_of_a_run_of_transformers(tmp_path):
    """A copy has neither the Trainer, whose model it would copy, nor its loggers."""
    run, copies = make(tmp_path / "run", max_steps=2), []
    callback = tracker.TransformersCallback(
        1, k=2, trainer=run, on_measure=lambda _: copies.append(deepcopy(callback))
    )
    copies.append(deepcopy(callback))
    run.add_callback(callback)
    run.train()
    assert len(copies) == 4
    for made in copies:
        assert made.trainer is None and not made.run.loggers
        assert made.run.schedule.args == callback.run.schedule.args
    assert any("miscoupling/mean_offdiag" in entry for entry in run.state.log_history)


@pytest.mark.slow
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_of_a_loop(tmp_path, copy):
    model, options = neox(), {"k": 2, "probe": tokens()}
    watch = copy(tracker.Watch(2, save_dir=tmp_path, **options))
    watch(0, model)
    again = copy(watch)
    unit, expected = again(2, model), tracker.Watch(2, **options)(0, model)
    assert Store(tmp_path).steps() == [0, 2]
    np.testing.assert_array_equal(unit["miscoupling"], expected["miscoupling"])
    again.close()
    assert copy(again).run.last_measured == 2


def test_a_copy_holds_no_model_that_was_measured():
    class Local(torch.nn.TransformerEncoderLayer):
        """A class that no other process finds."""

    layers = (Local(8, 2, 16, batch_first=True, norm_first=True) for _ in range(2))
    watch = tracker.Watch(1, k=2, probe=torch.randn(2, 4, 8), blocks=["0", "1"])
    net = torch.nn.Sequential(*layers).eval()
    for step in range(2):
        watch(step, net)
    for copy in COPIES.values():  # of which one pickles
        assert copy(watch)(2, net).attrs["witness"].startswith("agrees")


SCHEDULES = [{}, {"every_n_steps": 3}, {"every_n_epochs": 2}, {"steps": [0, 3, 7]}]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_pickle_has_the_schedule_and_the_settings(schedule):
    """As `strategy="ddp_spawn"` sends it to its processes."""
    options = {"probe": PROBE, "log": ["trajectory/*"], "on_measure": print}
    watch = tracker.CouplingCallback(**schedule, **options)
    copy = through_pickle(watch)
    due, expected = ([one.run.schedule(step) for step in range(3000)] for one in (copy, watch))
    assert due == expected
    assert copy.run.settings == watch.run.settings and copy.state_key == watch.state_key
