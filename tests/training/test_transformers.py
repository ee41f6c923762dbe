"""`TransformersCallback` in transformers' Trainer: runs are resumed, the probe is its data, the last step its own."""

import numpy as np
import pytest
import torch
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support.refused import refused
from tests.support.trainer import STEPS, data, make

pytestmark = pytest.mark.slow

K = 2
CHEAP = {"k": K, "measures": "trajectory"}


def test_the_first_samples_are_measured_at_the_end_of_epochs(tmp_path):
    trainer, units = make(tmp_path, num_train_epochs=4, max_steps=-1), []
    probe = torch.stack([row["input_ids"] for row in data()[:8]])
    before = tracker.measure(trainer.model, probe, k=K)
    trainer.add_callback(
        tracker.TransformersCallback(every_n_epochs=2, k=K, on_measure=units.append)
    )
    trainer.train()
    assert [int(unit.step) for unit in units] == [0, 12, 24]
    np.testing.assert_array_equal(units[0].miscoupling, before.miscoupling)


def test_without_the_trainer_a_warning_says_where_metrics_do_not_go(tmp_path):
    trainer = make(tmp_path, report_to=["tensorboard"])
    trainer.add_callback(tracker.TransformersCallback(100, k=K))
    with pytest.warns(UserWarning, match="not sent to tensorboard.*trainer=trainer"):
        trainer.train()


def test_data_without_first_samples_needs_a_probe(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from data()

    for probe, message in (
        (None, "Endless, which can only be read in order; .*probe="),
        (data()[0]["input_ids"][None], ""),
    ):
        trainer = make(tmp_path)
        trainer.train_dataset = Endless()
        trainer.add_callback(tracker.TransformersCallback(100, k=K, probe=probe))
        if message:
            with refused(message):
                trainer.train()
        else:
            trainer.train()
            assert trainer.state.global_step == STEPS


def test_the_last_step_of_a_run_that_loads_its_best_is_measured_with_its_own_weights(tmp_path):
    trainer, units = make(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                          load_best_model_at_end=True, learning_rate=1.0), []  # fmt: skip
    trainer.add_callback(tracker.TransformersCallback(100, k=K, on_measure=units.append))
    last = {}
    trainer.add_callback(Keep(last))
    trainer.train()
    assert [int(unit.step) for unit in units] == [0, STEPS]
    trainer.model.load_state_dict(last["state"])
    own = tracker.measure(trainer.model, torch.stack([row["input_ids"] for row in data()[:8]]), k=K)
    np.testing.assert_allclose(units[-1].miscoupling, own.miscoupling, atol=1e-6)


class Keep(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self, kept: dict):
        self.kept = kept

    def on_step_end(self, args, state, control, **given):
        self.kept["state"] = {
            name: value.clone() for name, value in given["model"].state_dict().items()
        }
