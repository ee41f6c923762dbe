"""`TransformersCallback` in transformers' Trainer: runs are resumed, the probe is its data, the last step its own."""

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support import lightning_runs
from tests.support.drivers import CHEAP, OUT_OF_MEMORY
from tests.support.refused import refused
from tests.support.trainer import STEPS, data, make
from tracker.store import Store

pytestmark = pytest.mark.slow

K = 2


def test_the_first_samples_are_measured_at_the_end_of_epochs(tmp_path):
    trainer, units = make(tmp_path, num_train_epochs=4, max_steps=-1), []
    probe = torch.stack([row["input_ids"] for row in data()[:8]])
    before = tracker.measure(trainer.model, probe, k=K)
    callback = tracker.TransformersCallback(every_n_epochs=2, k=K, on_measure=units.append)
    trainer.add_callback(callback)
    trainer.callback_handler.processing_class = str.split
    trainer.train()
    assert callback.run.tokenizer is str.split, "it states the special tokens of ids"
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
    """Its best is that of the largest loss, not the last."""
    units, every = [], {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2}
    trainer = make(
        tmp_path, load_best_model_at_end=True, greater_is_better=True, save_steps=2, **every
    )
    trainer.add_callback(tracker.TransformersCallback(100, k=K, on_measure=units.append))
    trainer.train()
    assert [int(unit.step) for unit in units] == [0, STEPS]
    last, best = (
        GPT2LMHeadModel.from_pretrained(place)
        for place in (tmp_path / f"checkpoint-{STEPS}", trainer.state.best_model_checkpoint)
    )
    probe = torch.stack([row["input_ids"] for row in data()[:8]])
    own, others = (tracker.measure(model, probe, k=K).miscoupling for model in (last, best))
    np.testing.assert_allclose(units[-1].miscoupling, own, atol=1e-6)
    assert not np.allclose(own, others, atol=1e-3)


class Scarce(TrainerCallback):
    """Runs out of memory after a step, if the batch is larger than 3 samples."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and state.train_batch_size > 3:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def test_the_trainer_finds_a_batch_size(tmp_path):
    """It calls the same callback again, whose model has other weights at step 0."""
    units, store = [], Store(tmp_path / "store")
    trainer = make(tmp_path / "run", auto_find_batch_size=True)
    given = {**CHEAP, "save_dir": store, "on_measure": units.append}
    trainer.add_callback(tracker.TransformersCallback(2, **given))
    trainer.add_callback(Scarce())
    with pytest.warns(UserWarning, match="the run begins again: its 2 units"):
        trainer.train()
    assert store.steps() == [0, 2, 4, 6] == [int(unit.step) for unit in units[2:]]
    for unit in units[2:]:
        np.testing.assert_array_equal(store.read(int(unit.step)).lss, unit.lss)
    assert not np.array_equal(units[0].lss, units[2].lss)


def test_a_callback_of_the_other_trainer_names_its_own(tmp_path):
    with refused("Lightning takes tracker.CouplingCallback"):
        lightning_runs.fit(lightning_runs.trainer([tracker.TransformersCallback()]))
    runner = make(tmp_path)
    runner.add_callback(tracker.CouplingCallback)
    with refused("transformers' Trainer takes tracker.TransformersCallback"):
        runner.train()
