"""Pickles and copies of the three classes that measure, before, during and after a training."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support.lightning_runs import fit, trainer
from tests.support.models import neox, tokens
from tests.support.trainer import make
from tests.support.watch import PROBE
from tracker.store import Store


def through_pickle(given):
    return pickle.loads(pickle.dumps(given))


COPIES = {"pickle": through_pickle, "deepcopy": deepcopy}


class CopyInTrainer(TrainerCallback):
    def __init__(self, callback, copy):
        self.callback, self.copy, self.made = callback, copy, []

    def on_step_end(self, *_, **__):
        self.made.append(self.copy(self.callback))


@pytest.mark.slow
def test_of_a_run_of_transformers(tmp_path):
    copy = deepcopy
    run = make(tmp_path / "run", max_steps=2)
    callback = tracker.TransformersCallback(1, k=2, trainer=run, save_dir=tmp_path / "store")
    during = CopyInTrainer(callback, copy)
    before = copy(callback)
    run.add_callback(callback)
    run.add_callback(during)
    run.train()
    for made in (before, *during.made, copy(callback)):
        assert made.trainer is None, "a copy has no copy of the model"
        of_copy, schedule = made.run.schedule, callback.run.schedule
        assert (of_copy.func, of_copy.args) == (
            schedule.func,
            schedule.args,
        ) and not made.run.loggers
    assert any("miscoupling/mean_offdiag" in entry for entry in run.state.log_history)


@pytest.mark.slow
@pytest.mark.parametrize("copy", COPIES)
def test_of_a_loop(tmp_path, copy):
    copy, model = COPIES[copy], neox()
    watch = copy(tracker.Watch(2, k=2, probe=tokens(), save_dir=tmp_path))
    watch(0, model)
    again = copy(watch)
    unit = again(2, model)
    assert Store(tmp_path).steps() == [0, 2]
    np.testing.assert_array_equal(
        unit["miscoupling"], tracker.measure(model, tokens(), k=2)["miscoupling"]
    )
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
def test_a_pickle_has_the_schedule_and_the_settings(schedule, tmp_path):
    """As `strategy="ddp_spawn"` sends it to its processes."""
    watch = tracker.CouplingCallback(
        **schedule, probe=PROBE, save_dir=str(tmp_path), log=["trajectory/*"], on_measure=print
    )
    copy = through_pickle(watch)
    due, expected = ([one.run.schedule(step) for step in range(3000)] for one in (copy, watch))
    assert due == expected
    assert copy.run.settings == watch.run.settings and copy.state_key == watch.state_key
    fit(trainer([copy], max_steps=1))
    assert Store(tmp_path).steps() == [0, 1]
