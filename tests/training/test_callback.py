"""Tests of the callback in real Lightning runs: its steps, probes, weights and ranks; units equal those of `tracker.measure`."""

import re
import warnings
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import tracker
from checkpoints import nano
from checkpoints.fetch import cached_snapshot
from checkpoints.load import load
from tests.conftest import TINY, USUAL
from tests.support.draws import normal
from tests.support.lightning_runs import (
    Classifier,
    EncoderModule,
    Noisy,
    TwoOptimizers,
    fit,
    trainer,
)
from tests.support.refused import refused
from tests.support.units import assert_same_units
from tests.support.watch import PROBE, Watch
from tracker.analysis.curves import scalars
from tracker.store import Store
from tracker.training.callback import CouplingCallback

# What a test asserts in on_measure must fail the test.
pytestmark = pytest.mark.filterwarnings("error:.*on_measure failed")


# The unit of step s equals the measurement of the checkpoint of step s.


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_live_equals_the_checkpoint(tmp_path, precision):
    watch = Watch(3)
    fit(trainer([watch], keep=tmp_path, precision=precision), Classifier)
    for step, unit in watch.units.items():
        if step:
            module = Classifier.load_from_checkpoint(tmp_path / f"step={step}.ckpt")
            assert_same_units(unit, tracker.measure(module, PROBE, k=2).assign_coords(step=step))
    assert list(watch.units) == [0, 3, 6, 8]


@pytest.mark.slow
def test_live_equals_walked(suite, walker, tmp_path, monkeypatch):
    """Train the suite again, with the callback: the weights are the same, and the units are those of the walk."""
    assert walker.main(*USUAL) == 0
    walked = walker.store
    prompts = [line.replace("\\n", "\n") for line in walker.prompts.read_text().splitlines()]
    _, tokenizer = load(cached_snapshot(nano.REPO, "step0", suite))
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "again"))
    watch = Watch(k=(4, 8), probe=prompts, tokenizer=tokenizer, save_dir=tmp_path / "live")
    nano.train(recipe=TINY, callbacks=[watch])
    assert walked.steps() == Store(tmp_path / "live").steps() == list(TINY.steps)
    for step in walked.steps():
        assert_same_units(Store(tmp_path / "live").read(step), walked.read(step).drop_vars("score"))


@pytest.mark.slow
def test_averaged_weights_are_those_of_the_checkpoint(tmp_path):
    """Checkpoints of a run with averaging contain the averaged weights."""
    raw, averaged = Watch(3), Watch(3, weights="averaged")
    fit(
        trainer([raw, EMAWeightAveraging(decay=0.5), averaged], keep=tmp_path),
        Classifier,
    )
    for step in (3, 6):
        module = Classifier.load_from_checkpoint(tmp_path / f"step={step}.ckpt")
        expected = tracker.measure(module, PROBE, k=2).assign_coords(step=step)
        assert_same_units(averaged.units[step], expected)
        assert not np.allclose(raw.units[step].miscoupling, expected.miscoupling)


def test_averaged_weights_without_averaging():
    with refused("list one before this CouplingCallback"):
        fit(trainer([Watch(weights="averaged"), EMAWeightAveraging()]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "averaging", [EMAWeightAveraging(), StochasticWeightAveraging(1e-2, swa_epoch_start=1)]
)
def test_the_last_step_is_not_measured_after_averaging(averaging):
    watch = Watch(5)
    with pytest.warns(UserWarning, match="list CouplingCallback before"):
        fit(trainer([averaging, watch]))
    assert list(watch.units) == [0, 5]


# Schedules.

SCHEDULES = {
    "every_n_steps": (dict(every_n_steps=3), [0, 3, 6, 8]),
    "steps": (dict(steps=[2, 5, 99]), [0, 2, 5, 8]),
    "default": ({}, [0, 1, 2, 4, 8]),
}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_count_optimizer_steps(accumulate):
    watches = {name: Watch(**options, name=name) for name, (options, _) in SCHEDULES.items()}
    fit(trainer(watches.values(), accumulate_grad_batches=accumulate))
    assert {name: list(watch.units) for name, watch in watches.items()} == {
        name: expected for name, (_, expected) in SCHEDULES.items()
    }


@pytest.mark.slow
def test_every_n_epochs():
    watch = Watch(every_n_epochs=2)
    fit(trainer([watch], max_steps=-1, max_epochs=5))  # of 8 batches
    assert list(watch.units) == [0, 16, 32, 40]


def test_two_optimizers_step_on_one_batch():
    """Each batch makes two steps: a scheduled step between batches is measured after the next batch."""
    watch = Watch(steps=[3, 6])
    fit(trainer([watch]), TwoOptimizers)
    assert list(watch.units) == [0, 4, 6, 8]


# Resumed runs.


def test_the_state_in_a_checkpoint_keeps_its_keys():
    """Checkpoints written before the callback was split resume as they did."""
    watch = CouplingCallback(probe=PROBE, name="val")
    assert watch.state_key == "CouplingCallback{'name': 'val', 'weights': 'raw'}"
    watch.load_state_dict({"served": 6, "measured": 4, "probe": PROBE})
    assert (watch.run.last_checked, watch.run.last_measured) == (6, 4) and watch.probe is PROBE
    assert watch.state_dict() == {"served": 6, "measured": 4, "probe": PROBE}


# Probes and targets.


@pytest.mark.slow
@pytest.mark.parametrize(("checked", "size"), [(True, 8), (False, 6)])
def test_the_probe_is_the_first_batch_of_the_sanity_check_or_of_the_training(checked, size):
    """Batches of validation have 8 samples."""
    watch, data = Watch(probe=None), Noisy(noise=0.0)
    runner = trainer([watch], max_steps=1, num_sanity_val_steps=int(checked))
    fit(runner, data=data, batch=6, shuffle=False)
    x, y = watch.probe
    assert torch.equal(x, data.x[:size]) and torch.equal(y, data.y[:size])
    assert watch.units[0].sizes["prompt"] == size


class BatchForward(EncoderModule):
    def forward(self, batch, temperature, attention_mask=None):
        return self.model(batch["x"]) / temperature


def mappings():
    x = normal(16, 6, 8, seed=2)
    return torch.utils.data.DataLoader([{"x": part, "label": 0} for part in x], 8)


class CompiledPart(EncoderModule):
    """Makes and compiles its encoder where Lightning lets a module build itself."""

    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = torch.compile(Classifier(), backend="eager")


PARTS = {
    "child with a forward": (EncoderModule, {}),
    "compiled": (CompiledPart, {}),
    "compiled, named": (CompiledPart, {"blocks": "model.stages"}),
    "forward given": (
        BatchForward,
        {"forward": lambda module, batch: module(batch, temperature=2.0)},
    ),
    "probe of a function": (
        EncoderModule,
        {"probe": lambda trainer, module: next(iter(trainer.train_dataloader))},
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_the_part_that_runs_by_itself_on_a_batch(case):
    make, options = PARTS[case]
    watch = Watch(4, **{"probe": None, **options})
    lightning.seed_everything(0, verbose=False)
    module = make()
    trainer([watch], max_steps=2).fit(module, mappings())
    assert set(watch.probe) == {"x", "label"}
    expected = tracker.measure(module.model, {"x": watch.probe["x"]}, k=2).assign_coords(step=2)
    assert_same_units(watch.units[2], expected)
    names = watch.units[2].attrs["blocks"].replace("module.model.", "")
    assert names == "stages.0, stages.1, stages.2"


@pytest.mark.parametrize("probe", [None, dict.fromkeys(["x", "attention_mask"], torch.ones(2, 6))])
def test_batch_that_the_forward_does_not_accept_is_refused_before_the_first_step(probe):
    module = BatchForward()
    with refused(r"takes batch, temperature, .* and the batch contains x, .*; .*forward=lambda"):
        trainer([Watch(probe=probe)]).fit(module, mappings())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_unusable_probes():
    with refused(r"the probe, read as \(None\), contains no samples"):
        fit(trainer([Watch(probe=(object(),))]))
    with refused("no samples"):
        fit(trainer([Watch(probe=())]))


class NoForward(EncoderModule):
    def __init__(self):
        super().__init__()
        self.stages = self.model.stages
        self.model = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (NoForward, {}, "no forward of its own, and neither has 'stages'"),
        (Classifier, {"blocks": "layers"}, "no module named 'layers'"),
    ],
)
def test_refused_at_setup(module, options, message):
    with refused(message):
        trainer([Watch(**options)]).fit(module(), mappings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(every_n_steps=0), "every_n_steps=0; give a whole number"),
        (
            dict(every_n_epochs=2, steps=[1]),
            "several schedules given; give one of every_n_steps, every_n_epochs",
        ),
        (dict(steps=[]), "whole numbers from 0"),
        (dict(steps=[0.5]), "whole numbers from 0"),
        (dict(steps=[-1]), "whole numbers from 0"),
        (dict(probe="a prompt"), "tokenizer="),
        (dict(probe=["a prompt"], tokenizer=print, forward=print), "leave forward= out"),
        (dict(weights="ema"), "choose 'raw' or 'averaged'"),
        (dict(log="most"), "log='most'; choose 'headline'"),
        (dict(log=[]), "log="),
        (dict(max_overhead=1.5), "a share of the run's time"),
        (dict(probe="a prompt", tokenizer="gpt2"), "AutoTokenizer.from_pretrained('gpt2')"),
    ],
)
def test_bad_settings(options, message):
    with refused(re.escape(message)):
        CouplingCallback(**options)


# Loggers, metrics, stores.


@pytest.mark.slow
def test_early_stopping_and_checkpoints_monitor_metrics(tmp_path):
    watch, monitor = Watch(2), "miscoupling/mean_offdiag"
    # Nothing improves by 100, and the patience is one epoch
    stop = EarlyStopping(monitor, patience=1, min_delta=100.0)
    keep = ModelCheckpoint(tmp_path, "{step}-{miscoupling/mean_offdiag:.4f}", monitor=monitor)
    runner = trainer([watch, stop, keep], max_steps=-1, max_epochs=6, enable_checkpointing=True)
    fit(runner)
    assert runner.current_epoch == 2
    first, last = (
        scalars(watch.units[step])["miscoupling/miscoupling/k2/mean_offdiag"] for step in (8, 16)
    )
    assert float(runner.callback_metrics[monitor]) == pytest.approx(last, rel=1e-6)
    assert keep.best_model_score == pytest.approx(min(first, last), rel=1e-6)


def test_undefined_values_do_not_end_the_training():
    """The mis-coupling of blocks that are initialized as the identity is undefined."""

    def make():
        module = Classifier()
        for name, parameter in module.stages.named_parameters():
            if "out_proj" in name or "mlp.3" in name:
                nn.init.zeros_(parameter)
        return module

    watch = Watch(steps=[0])
    stop = EarlyStopping("miscoupling/mean_offdiag", check_finite=True, strict=False)
    runner = trainer([watch, stop], max_steps=-1, max_epochs=2)
    fit(runner, make)
    assert runner.global_step == 16 and watch.units[0].miscoupling.isnull().all()


@pytest.mark.slow
def test_csv_and_tensorboard(tmp_path):
    watch, csv = Watch(4, name="val", log="all"), CSVLogger(tmp_path)
    board = TensorBoardLogger(tmp_path)
    runner = trainer([watch], logger=[csv, board], log_every_n_steps=1)
    fit(runner)
    measured, costs = scalars(watch.units[4]), {"val/cost/seconds", "val/cost/share"}
    everything = {f"val/{name}" for name in measured}
    assert len(everything) > 90 and everything <= runner.callback_metrics.keys()
    events = EventAccumulator(board.log_dir).Reload()
    for name in everything | costs:
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert set(logged) == {0, 4, 8}
        if name in everything:
            value = measured[name.removeprefix("val/")]
            assert logged[4] == pytest.approx(value, rel=1e-6, nan_ok=True)
    assert {e.step for e in events.Images("val/miscoupling/heatmap/k2")} == {0, 4, 8}
    columns = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(columns) == everything | costs | {"epoch", "step", "loss", "val_loss"}


@pytest.mark.slow
def test_the_overhead_warning_appears_once():
    with warnings.catch_warnings(record=True, action="always") as caught:
        fit(trainer([Watch()]))
    assert len([w for w in caught if "more than max_overhead=0.05" in str(w.message)]) == 1
