"""`Watch` in a plain training loop: the training is unchanged, it resumes its store, and two ranks share the probe."""

import numpy as np
import pytest
import torch
import wandb
from lightning.fabric import Fabric
from lightning.pytorch.demos import Transformer
from lightning.pytorch.loggers import WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import tracker
from tests.support.drivers import CHEAP
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tests.support.wandb_runs import of, offline_run, records
from tracker.loggers.wandb import AXIS
from tracker.store import Store

K = 2


def test_what_a_call_returns():
    model = neox()
    with tracker.Watch(steps=[4], k=K, probe=tokens()) as watch:
        assert int(watch(0, model).step) == 0, "the first call measures"
        assert watch(np.int64(3), model) is None
        assert int(watch(5, model).step) == 5, "step 4 is due, and was jumped over"
        assert watch(5, model, force=True) is None, "it is measured already"
        assert int(watch(6, model, force=True).step) == 6
        with refused("step 2 after step 6"):
            watch(2, model)


@pytest.mark.slow
@pytest.mark.parametrize("measures", ["coupling", "entropy"])
def test_the_summary_of_the_store_is_printed_at_the_end(tmp_path, capsys, measures):
    """With what can be pasted, and without colours that a name might set."""
    model, path = neox(), f"{tmp_path}/my run\x1b[31m (2)"
    with tracker.Watch(1, probe=tokens(3), k=K, save_dir=path, measures=measures) as watch:
        for step in range(3):
            watch(step, model)
    printed, shown = capsys.readouterr().out, path.replace("\x1b", r"\x1b")
    stored = f"stored in {shown}: tracker.plot('{shown}'), python -m tracker.report '{shown}'\n"
    assert printed == (f"{tracker.summary(path)!r}\n{stored}" if measures == "coupling" else "")


def test_a_warning_of_each_measurement_is_given_once_in_a_run():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4)
    for _ in range(2):
        with pytest.warns(UserWarning, match="norms") as given:
            with tracker.Watch(1, k=K, probe=torch.randn(2, 5, 16)) as watch:
                watch(0, encoder)
                watch(1, encoder)
        assert ["norms" in str(warning.message) for warning in given].count(True) == 1


def test_a_store_that_is_damaged_meanwhile_does_not_stop_the_end_of_a_training(tmp_path):
    with pytest.warns(UserWarning, match="step 1 is measured but not summarised .*damaged"):
        with tracker.Watch(1, probe=tokens(1), k=K, save_dir=str(tmp_path)) as watch:
            watch(0, neox())
            watch(1, neox())
            Store(tmp_path).file(0).write_bytes(b"no results")


def test_a_store_is_continued_as_it_was_measured(tmp_path):
    model, store = neox(), Store(tmp_path)
    with tracker.Watch(1, k=K, probe=tokens(), save_dir=str(tmp_path)) as watch:
        unit = watch(0, model)
    assert unit.attrs["final_norm"] == "include"
    store.write(0, unit.assign_attrs(store.read(0).attrs | {"final_norm": "exclude"}))
    with refused("measured other inputs"):
        tracker.Watch(1, k=K, probe=tokens(1), save_dir=str(tmp_path))(1, model)
    again = tracker.Watch(1, k=K, probe=tokens(), save_dir=str(tmp_path))
    assert again(1, model).attrs["final_norm"] == "exclude"


@pytest.mark.parametrize(
    "step, model, message",
    [
        (0.5, neox(), r"the step is 0.5 \(float\); give the number .* whole number from 0 on"),
        (-1, neox(), r"the step is -1 \(int\)"),
        (neox(), 3, r"the step is GPTNeoX.* \(GPTNeoXForCausalLM\).*: watch\(step, model\)"),
    ],
)
def test_what_a_call_refuses(tmp_path, step, model, message):
    with refused(message):
        tracker.Watch(1, probe=tokens(), save_dir=tmp_path)(step, model)
    with refused(message):
        Store(tmp_path).file(step)


def test_a_probe_is_needed():
    with refused("probe=None; give the samples to measure"):
        tracker.Watch(probe=None)


DEMO = dict.fromkeys(("inputs", "target"), tokens())


@pytest.mark.parametrize(
    "model, probe, blocks",
    [(neox(), tokens(), None), (Transformer(ninp=16), DEMO, "transformer.decoder.layers")],
)
def test_a_model_that_fabric_has_set_up(model, probe, blocks):
    """Compiled; one is a model that Lightning itself defines, with a forward."""
    wrapped = Fabric(accelerator="cpu", devices=1).setup(torch.compile(model, backend="eager"))
    unit = tracker.Watch(1, k=K, probe=probe, blocks=blocks)(0, wrapped)
    expected = tracker.measure(model, probe, k=K, blocks=blocks)
    np.testing.assert_array_equal(unit.miscoupling, expected.miscoupling)


def test_a_run_that_fails_begins_again_with_the_same_watch_alone(tmp_path):
    watch, model = tracker.Watch(1, **CHEAP, probe=tokens(), save_dir=tmp_path), neox()
    with pytest.raises(MemoryError), watch:
        watch(0, model)
        raise MemoryError
    with pytest.warns(UserWarning, match="begins again: its 1 units so far"):
        watch(0, model)
    del watch
    with refused("holds the units of another run"):
        tracker.Watch(1, **CHEAP, probe=tokens(), save_dir=tmp_path)(0, model)
    assert Store(tmp_path).steps() == [0]


# Where its metrics go.


@pytest.mark.slow
def test_the_prefix_of_a_logger_of_lightning(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, offline=True, prefix="mine")
    tracker.Watch(1, k=2, probe=tokens(1), log_to=logger)(0, neox())
    wandb.finish()
    metrics = of("metric", records(offline_run(tmp_path)))
    axes = {metric.get("name"): metric.get("step_metric") for metric in metrics}
    for name in ("mean_offdiag", "heatmap/k2"):
        assert axes[f"mine-miscoupling/{name}"] == AXIS


def test_tensorboard_in_a_loop(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        tracker.Watch(1, k=2, probe=tokens(1), log_to=writer)(0, neox())
    events = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert events["images"] == ["miscoupling/heatmap/k2"]
    assert "miscoupling/mean_offdiag" in events["scalars"]


@pytest.mark.parametrize("target", [wandb, 3, object()], ids=["module", "number", "object"])
def test_what_takes_no_metrics_is_refused(target):
    with refused(r"log_to=.*give the run that wandb.init returns"):
        tracker.Watch(1, probe=tokens(), log_to=target)
