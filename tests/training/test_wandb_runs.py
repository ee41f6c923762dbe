"""A training logs the same metrics over the same axes to Weights & Biases, whichever program runs it."""

import lightning
import pytest
import torch
import wandb
from torch.utils.data import DataLoader

import tracker
from tests.lightning_runs import trainer
from tests.models import neox, tokens
from tests.training.test_transformers import STEPS, data, make
from tests.wandb_runs import of, offline_run, records
from tracker.common.errors import UsageError

OPTIONS = {"every_n_steps": 2, "k": (2, 4), "name": "val", "max_overhead": None}
AXIS = "training/step"


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


def in_lightning(directory, model, probe):
    logger = lightning.pytorch.loggers.WandbLogger(save_dir=directory, offline=True)
    callback = tracker.CouplingCallback(probe=probe, **OPTIONS)
    runner = trainer([callback], max_steps=STEPS, logger=logger, log_every_n_steps=1)
    runner.fit(Module(model), DataLoader(data(), 4))


def in_transformers(directory, model, probe):
    wandb.init(mode="offline", dir=directory)
    runner = make(directory, report_to=["wandb"], logging_steps=1)
    runner.add_callback(tracker.TransformersCallback(trainer=runner, probe=probe, **OPTIONS))
    runner.train()
    history = [row for row in runner.state.log_history if "val/miscoupling/mean_offdiag" in row]
    assert [row["step"] for row in history] == [0, 2, 4, 6]


def in_a_loop(directory, model, probe):
    run = wandb.init(mode="offline", dir=directory)
    with tracker.Watch(probe=probe, log_to=run, **OPTIONS) as watch:
        for step in range(STEPS + 1):
            watch(step, model, force=step == STEPS)
            run.log({"loss": 1.0 + step})


def logged(train, directory) -> tuple[dict, list[dict]]:
    """Train; return the definition of each metric that is measured, and the rows that have one."""
    directory.mkdir()
    try:
        train(directory, make(directory / "model").model, {"input_ids": tokens(3) % 50})
    finally:
        wandb.finish()
    found = records(offline_run(directory))
    rows = [row["item"] for row in of("history", found)]
    ours = [row for row in rows if any(name.startswith("val/") for name in row)]
    metrics = {metric["name"]: metric for metric in of("metric", found) if "name" in metric}
    kept = ("step_metric", "options", "summary")
    axes = {
        name: {key: metric.get(key) for key in kept}
        for name, metric in metrics.items()
        if name.startswith("val/")
    }
    return axes | {AXIS: metrics[AXIS]["options"]}, ours


@pytest.mark.slow
def test_the_three_log_the_same_metrics_over_the_same_axes(tmp_path):
    programs = {"lightning": in_lightning, "transformers": in_transformers, "watch": in_a_loop}
    found = {name: logged(train, tmp_path / name) for name, train in programs.items()}
    axes, rows = found["watch"]
    assert {f"val/miscoupling/heatmap/k{k}" for k in (2, 4)} | {
        "val/miscoupling/mean_offdiag",
        "val/cost/share",
    } < axes.keys()
    assert (
        all(axis["step_metric"] == AXIS for name, axis in axes.items() if name != AXIS)
        and len(axes) == 16
    )
    for name, (other_axes, other_rows) in found.items():
        assert other_axes == axes, name
        assert [row[AXIS] for row in other_rows] == [0, 2, 4, 6], name
        for row, other in zip(rows, other_rows, strict=True):
            measured = {key for key in row if key.startswith(("val/", AXIS))}
            assert {key for key in other if key.startswith(("val/", AXIS))} == measured, name
            assert not any(key.startswith("train/val") for key in other), name
        first = rows[0]["val/miscoupling/mean_offdiag"]
        other = other_rows[0]["val/miscoupling/mean_offdiag"]
        assert first == pytest.approx(other, rel=1e-5), name


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


def test_a_logger_of_lightning_in_a_loop(tmp_path):
    logger = lightning.fabric.loggers.TensorBoardLogger(tmp_path)
    with tracker.Watch(1, k=2, probe=tokens(1), log_to=logger) as watch:
        watch(0, neox())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload().Tags()
    assert (
        events["images"] == ["miscoupling/heatmap/k2"]
        and "miscoupling/mean_offdiag" in events["scalars"]
    )


@pytest.mark.parametrize("target", [wandb, 3, object()], ids=["module", "number", "object"])
def test_what_takes_no_metrics_is_refused(target):
    with pytest.raises(UsageError, match=r"log_to=.*give the run that wandb.init returns"):
        tracker.Watch(1, probe=tokens(), log_to=target)
