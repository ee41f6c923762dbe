"""Runs of `pytorch_lightning`, the same Lightning under its other package name, measure what those of `lightning` do."""

from types import SimpleNamespace

import lightning
import lightning.pytorch.callbacks
import pytest
import pytorch_lightning
import wandb

import tracker
from tests.support import processes
from tests.support.lightning_runs import Classifier, fit
from tests.support.refused import refused
from tests.support.units import assert_same_units
from tests.support.watch import Watch
from tracker.loggers.lightning import TensorBoard, classes, logger_of
from tracker.loggers.protocol import FunctionLogger
from tracker.loggers.wandb import OpenRun
from tracker.store import Store

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


class OtherClassifier(pytorch_lightning.LightningModule):
    """`Classifier`, as a module of the other package."""

    def __init__(self):
        super().__init__()
        same = Classifier()
        self.embed, self.stages, self.head = same.embed, same.stages, same.head
        self.checkpointing, self.losses = False, []

    forward = Classifier.forward
    training_step = Classifier.training_step
    validation_step = Classifier.validation_step
    configure_optimizers = Classifier.configure_optimizers


MODULES = {"lightning": Classifier, "pytorch_lightning": OtherClassifier}


def train(package: str, callbacks, make=None, **options):
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    options = {"accelerator": "cpu", "max_steps": 8, **quiet, **options}
    return fit(PACKAGES[package].Trainer(callbacks=callbacks, **options), make or MODULES[package])


@pytest.mark.slow
def test_both_packages_measure_the_same(tmp_path):
    plain, watches = train("pytorch_lightning", []), {}
    for package in PACKAGES:
        watches[package] = Watch(3, probe=None, save_dir=tmp_path / package)
        module = train(package, [watches[package]])
        assert module.losses == plain.losses
    units, expected = (watches[package].units for package in ("pytorch_lightning", "lightning"))
    assert list(units) == [0, 3, 6, 8] == Store(tmp_path / "pytorch_lightning").steps()
    for step, unit in units.items():
        assert_same_units(unit, expected[step])
    assert_same_units(
        units[8], tracker.measure(module, watches["lightning"].probe[0], k=2).assign_coords(step=8)
    )


def test_weights_in_flattened_pieces_are_refused():
    runner = SimpleNamespace(
        strategy=object.__new__(pytorch_lightning.strategies.FSDPStrategy), callbacks=[]
    )
    with refused("FSDPStrategy keeps weights in flattened pieces"):
        Watch().check_readable(runner)


def test_loggers_of_both_packages_are_known(tmp_path):
    for package in PACKAGES.values():
        made = {
            TensorBoard: package.loggers.TensorBoardLogger(tmp_path),
            FunctionLogger: package.loggers.CSVLogger(tmp_path),
            OpenRun: package.loggers.WandbLogger(save_dir=tmp_path, offline=True),
        }
        assert [type(logger_of(logger)) for logger in made.values()] == [*made]
    wandb.finish()
    assert classes("Callback") == (lightning.pytorch.Callback, pytorch_lightning.Callback)
    assert classes("callbacks.NoSuchClass", "no_such_module.Callback") == ()


@pytest.mark.slow
def test_a_run_of_lightning_imports_no_other_package():
    code = (
        "import sys; from tests.support.lightning_runs import fit, trainer; import tracker;"
        "fit(trainer([tracker.CouplingCallback(2, k=2)], max_steps=1)); assert 'pytorch_lightning' not in sys.modules"
    )
    ran = processes.run("tests.support.statements", code)
    assert ran.returncode == 0, ran.stderr
