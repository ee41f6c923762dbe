"""The three ways to measure a training give the same units, stores and metrics of W&B, whichever program runs it."""

from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
import wandb
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import tracker
from tests.support.lightning_runs import fit, trainer
from tests.support.models import neox, tokens
from tests.support.ranks import assert_store_is_like_any_other
from tests.support.refused import refused
from tests.support.trainer import STEPS, data, make
from tests.support.wandb_runs import of, offline_run, records
from tracker.analysis.curves import scalars
from tracker.store import Store

AXIS = "training/step"
PROBE = {"input_ids": tokens(3) % 50}
HEADLINES = set(
    """miscoupling/mean_offdiag miscoupling/mean_offdiag_null coupling/miscoupling_coupling/k2/mean_offdiag
    coupling/offdiag_normalized_coupling/k2/mean_offdiag miscoupling/miscoupling/k2/mean_adjacent
    miscoupling/offdiag_normalized/k2/mean_offdiag miscoupling/offdiag_normalized_null/k2/mean_offdiag
    trajectory/lss/median trajectory/expodistance/median trajectory/alpha_mean/median
    trajectory/update_ratio/median""".split()
)
COST = {"cost/seconds", "cost/share"}
HEAT_MAPS = {"miscoupling/heatmap/k2", "miscoupling/heatmap/k4"}


class Module(lightning.LightningModule):
    """The model of transformers' Trainer, in Lightning."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def in_lightning(directory, runner, **options):
    logger = lightning.pytorch.loggers.WandbLogger(save_dir=directory, offline=True)
    callback = tracker.CouplingCallback(**options)
    program = trainer([callback], max_steps=STEPS, logger=logger, log_every_n_steps=1)
    program.fit(Module(runner.model), DataLoader(data(), 4))


def in_transformers(directory, runner, **options):
    wandb.init(mode="offline", dir=directory)
    runner.add_callback(tracker.TransformersCallback(trainer=runner, **options))
    runner.train()
    history = [row for row in runner.state.log_history if "val/miscoupling/mean_offdiag" in row]
    assert [row["step"] for row in history] == [0, 2, 4, 6] and 12 <= len(history[0]) < 20


def in_a_loop(directory, runner, **options):
    run = wandb.init(mode="offline", dir=directory)
    with tracker.Watch(log_to=run, **options) as watch:
        for step in range(STEPS + 1):
            watch(step, runner.model, force=step == STEPS)
            run.log({"loss": 1.0 + step})


DOORS = {"lightning": in_lightning, "transformers": in_transformers, "watch": in_a_loop}


@pytest.fixture(scope="module", params=DOORS)
def trained(request, tmp_path_factory) -> SimpleNamespace:
    """What a run of one of the three has measured and written, and its model."""
    directory, units = tmp_path_factory.mktemp(request.param), {}
    runner = make(directory, report_to=["wandb"], logging_steps=1)
    options = {
        "every_n_steps": 2,
        "probe": PROBE,
        "k": (2, 4),
        "name": "val",
        "save_dir": directory / "store",
        "max_overhead": None,
        "on_measure": lambda unit: units.update({int(unit.step): unit}),
    }
    try:
        DOORS[request.param](directory, runner, **options)
    finally:
        wandb.finish()
    return SimpleNamespace(directory=directory, units=units, model=runner.model)


def test_a_callback_of_the_other_trainer_names_its_own(tmp_path):
    with refused("Lightning takes tracker.CouplingCallback"):
        fit(trainer([tracker.TransformersCallback()]))
    runner = make(tmp_path)
    runner.add_callback(tracker.CouplingCallback)
    with refused("transformers' Trainer takes tracker.TransformersCallback"):
        runner.train()


@pytest.mark.slow
def test_units_are_those_of_measure(trained, tmp_path):
    store = Store(trained.directory / "store")
    assert list(trained.units) == [0, 2, 4, 6] == store.steps()
    for step, model in {0: make(tmp_path).model, 6: trained.model}.items():
        expected = tracker.measure(model, PROBE, k=(2, 4))
        np.testing.assert_array_equal(trained.units[step].miscoupling, expected.miscoupling)
        np.testing.assert_array_equal(store.read(step).miscoupling, expected.miscoupling)
    assert_store_is_like_any_other(store.path, store.steps())


@pytest.mark.slow
def test_wandb_has_the_same_metrics_over_the_same_axes(trained):
    """By default 13 numbers, of the smallest K, and the heat maps, all of which the automatic workspace shows."""
    found = records(offline_run(trained.directory))
    rows = [row["item"] for row in of("history", found)]
    rows = [row for row in rows if any(name.startswith("val/") for name in row)]
    assert [row[AXIS] for row in rows] == [0, 2, 4, 6]
    metrics = {metric["name"]: metric for metric in of("metric", found) if "name" in metric}
    assert metrics[AXIS]["options"]["hidden"]
    ours = {name.removeprefix("val/") for name in metrics if name.startswith("val/")}
    assert ours == HEADLINES | COST | HEAT_MAPS and len(HEADLINES | COST) == 13
    for name in ours:
        metric = metrics[f"val/{name}"]
        assert metric["step_metric"] == AXIS and "hidden" not in metric["options"], name
    assert metrics["val/miscoupling/mean_offdiag"]["summary"] == {"min": True, "last": True}
    for row in rows:
        logged = {name for name in row if "val/" in name}
        pictures = {name for name in logged if "heatmap" in name}
        assert logged - pictures == {f"val/{name}" for name in HEADLINES | COST}
        measured = scalars(trained.units[row[AXIS]])
        for name in HEADLINES:
            assert row[f"val/{name}"] == pytest.approx(measured[name], rel=1e-12), name
        assert all(row[f"val/{name}._type"] == "image-file" for name in HEAT_MAPS)


@pytest.mark.slow
def test_the_prefix_of_a_logger_of_lightning(tmp_path):
    logger = lightning.pytorch.loggers.WandbLogger(save_dir=tmp_path, offline=True, prefix="mine")
    with tracker.Watch(1, k=2, probe=tokens(1), log_to=logger) as watch:
        watch(0, neox())
    wandb.finish()
    metrics = {
        metric.get("name"): metric for metric in of("metric", records(offline_run(tmp_path)))
    }
    assert (
        metrics["mine-miscoupling/mean_offdiag"]["step_metric"]
        == metrics["mine-miscoupling/heatmap/k2"]["step_metric"]
        == AXIS
    )


@pytest.mark.parametrize("kind", [lightning.fabric.loggers.TensorBoardLogger, SummaryWriter])
def test_tensorboard_in_a_loop(kind, tmp_path):
    logger = kind(tmp_path)
    with tracker.Watch(1, k=2, probe=tokens(1), log_to=logger) as watch:
        watch(0, neox())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = getattr(logger, "experiment", logger)
    writer.close()
    events = EventAccumulator(str(writer.log_dir)).Reload().Tags()
    assert events["images"] == ["miscoupling/heatmap/k2"]
    assert "miscoupling/mean_offdiag" in events["scalars"]


@pytest.mark.parametrize("target", [wandb, 3, object()], ids=["module", "number", "object"])
def test_what_takes_no_metrics_is_refused(target):
    with refused(r"log_to=.*give the run that wandb.init returns"):
        tracker.Watch(1, probe=tokens(), log_to=target)
