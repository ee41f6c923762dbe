"""Runs of Lightning that are not trainings of their own: development runs, the Tuner's, tests, predictions."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.support import watch as watches
from tests.support.lightning_runs import Classifier, Noisy, fit, trainer
from tests.support.refused import refused
from tracker.store import Store

Watch = partial(watches.Watch, measures="trajectory")


class Tuned(Classifier):
    """A module with what the Tuner changes, and loaders of its own."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-2, 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        return DataLoader(Noisy(), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Noisy(), self.batch_size)

    def test_step(self, batch, index):
        self.validation_step(batch, index)

    def predict_step(self, batch, index):
        return self(batch[0])


@pytest.mark.slow
@pytest.mark.parametrize("batches", [True, 3])
def test_a_development_run_writes_no_store(tmp_path, batches):
    watch = Watch(2, save_dir=tmp_path / "store")
    fit(trainer([watch], fast_dev_run=batches))
    assert list(watch.units) == sorted({0, int(batches), *range(0, int(batches), 2)})
    assert not any(tmp_path.iterdir())
    watch.units.clear()
    fit(trainer([watch], max_steps=2))
    assert list(watch.units) == [0, 2] == Store(tmp_path / "store").steps()
    fit(trainer([Watch(2, save_dir=tmp_path / "store", probe=None)], fast_dev_run=True))
    assert Store(tmp_path / "store").steps() == [0, 2]


def test_a_development_run_shows_errors():
    with refused("no metric is named"):
        fit(trainer([Watch(2, log=["miscoupling/no_such"])], fast_dev_run=True))


def tuned(find):
    """Return a training before which a Tuner tries others, of which nothing is left."""

    def train(watch, directory):
        runner, module = trainer([watch], max_steps=4, default_root_dir=directory), Tuned()
        find(Tuner(runner), module)
        assert not watch.units and watch.probe is None and not (directory / "store").exists()
        runner.fit(module)

    return train


def beside(*finders, order: int = 1, **options):
    """Return a training with other callbacks, listed after this one or before, and with options that set others."""
    return lambda watch, directory: trainer(
        [watch, *finders][::order], max_steps=4, default_root_dir=directory, **options
    ).fit(Tuned())


TRAININGS = {
    "lr_find": tuned(lambda tuner, module: tuner.lr_find(module, num_training=5)),
    "scale_batch_size": tuned(lambda tuner, module: tuner.scale_batch_size(module, max_trials=2)),
    "LearningRateFinder": beside(LearningRateFinder(num_training_steps=5)),
    "BatchSizeFinder": beside(BatchSizeFinder(max_trials=2), order=-1),
    "overfit": beside(overfit_batches=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAININGS)
def test_a_training_with_other_runs_is_measured_once(tmp_path, case):
    watch = Watch(2, probe=None, save_dir=tmp_path / "store")
    TRAININGS[case](watch, tmp_path)
    assert list(watch.units) == [0, 2, 4] == Store(tmp_path / "store").steps()


def test_validation_tests_and_predictions_alone(tmp_path):
    watch, module = Watch(2, probe=None, save_dir=tmp_path / "store"), Tuned()
    for run in ("validate", "test", "predict"):
        getattr(trainer([watch]), run)(module, DataLoader(Noisy(), 8))
    assert not watch.units and watch.probe is None and not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("of_checkpoint", [True, False])
def test_a_test_does_not_disturb_a_training_that_goes_on(tmp_path, of_checkpoint):
    watch, module = Watch(2, probe=None, save_dir=tmp_path / "store"), Tuned()
    runner = trainer([watch], max_steps=4, keep=tmp_path)
    runner.fit(module)
    probe, tester = watch.probe, runner if of_checkpoint else trainer([watch])
    tester.test(
        module,
        DataLoader(Noisy(), 8),
        ckpt_path=tmp_path / "step=2.ckpt" if of_checkpoint else None,
    )
    runner.fit_loop.epoch_loop.max_steps = 6
    runner.fit(module)
    assert list(watch.units) == [0, 2, 4, 6] == Store(tmp_path / "store").steps()
    assert watch.probe[0] is probe[0]
