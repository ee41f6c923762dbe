"""The augmentation and the trainer on an accelerator: same results as on the CPU, and no waits of the host."""

import re
from dataclasses import replace
from unittest.mock import patch

import lightning
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.overrides import TorchFunctionMode

import tracker
from tests.support.lightning_runs import ON_PRETEND_DEVICE
from tests.support.photographs import MEAN, photographs
from tests.support.vit_trainings import HARD, TINY, assert_same_training, weights
from vit import cells, training
from vit.augment import augment, erase
from vit.data import load
from vit.module import Classifier
from vit.recipe import Recipe
from vit.training import train

DEVICE = {"accelerator": "pretend", "precision": "32-true"}
COMPILED = {"compile": True}


@pytest.fixture(autouse=True)
def strategy(monkeypatch):
    """Lightning chooses no strategy for the pretend device by itself."""
    make = training.make_trainer

    def with_strategy(recipe, *arguments, **options):
        if recipe.accelerator == "pretend":
            options["strategy"] = ON_PRETEND_DEVICE["strategy"]
        return make(recipe, *arguments, **options)

    monkeypatch.setattr(training, "make_trainer", with_strategy)


@pytest.fixture
def without_kernels(monkeypatch):
    """Graphs are traced, differentiated and partitioned, and run by PyTorch's own kernels, which no compiler has to make."""
    compile = torch.compile
    backend = {"backend": "aot_eager_decomp_partition", "options": None}
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile(f, **more | backend))


class FromHost(TorchFunctionMode):
    """Records of every copy to the pretend device whether it came from pinned memory."""

    def __init__(self):
        super().__init__()
        self.pinned = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            function is torch.Tensor.to
            and args[0].device.type == "cpu"
            and result.device.type == "pretend"
        ):
            self.pinned.append(args[0].is_pinned())
        return result


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_changed_as_on_the_cpu(pretend, seed):
    """Erasing: of the same pixels, by other noise."""
    data = load(TINY)

    def changed(images):
        torch.manual_seed(seed)
        augmented = augment(images, Recipe(), MEAN.to(images.device))
        erased = erase(torch.full(images.shape, 9.0, device=images.device), 0.5) != 9
        return augmented, erased, data.normalise(images)

    images = photographs(33)  # no multiple of the size of a number
    expected = changed(images)
    for here, there in zip(expected, changed(images.to(pretend.device)), strict=True):
        assert torch.equal(there.cpu(), here)
    assert 0.05 < expected[1].float().mean() < 0.3


class Budget(lightning.Callback):
    """Counts from the end of a training batch to the end of the next, from the second one on."""

    def __init__(self, pretend):
        self.pretend, self.counting, self.batches = pretend, None, []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.stop()
        if index + 1 < trainer.num_training_batches:
            self.counting = self.pretend.count()
            self.batches.append(self.counting.__enter__())

    def stop(self):
        if self.counting:
            self.counting.__exit__(None, None, None)
        self.counting = None


@pytest.mark.slow
def test_a_training_batch_does_not_wait_for_the_device(pretend, tmp_path, monkeypatch):
    budget, make = Budget(pretend), training.make_trainer
    recipe = replace(HARD, **DEVICE, out=tmp_path, epochs=2, train_size=192, measure_at="off")

    def with_budget(*arguments, **options):
        trainer = make(*arguments, **options)
        trainer.callbacks.append(budget)
        return trainer

    monkeypatch.setattr(training, "make_trainer", with_budget)
    with FromHost() as copies:
        train(recipe)
    assert len(budget.batches) == 2 * (192 // 32 - 1)
    for counts in budget.batches:
        assert counts.syncs == counts.to_host == 0
        # The statistics that normalise are there.
        assert counts.to_device <= 7  # images, labels, crop, flip, two operations, erasing
        assert counts.launches < 1000
    assert copies.pinned.count(True) >= 7 * 12


@pytest.mark.slow
@pytest.mark.parametrize("options", [DEVICE, COMPILED])
def test_run_resumed_on_a_device_equals_an_uninterrupted_run(
    options, pretend, without_kernels, tmp_path, monkeypatch
):
    recipe = replace(HARD, **options)
    result = train(replace(recipe, out=tmp_path / "whole"))
    assert result["environment"]["device"] == options.get("accelerator", "cpu")
    start = Classifier.on_train_epoch_start

    def stop_in_the_second_epoch(self):
        if self.current_epoch == 1:
            raise KeyboardInterrupt
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", stop_in_the_second_epoch)
        with pytest.raises(KeyboardInterrupt):
            train(replace(recipe, out=tmp_path / "stopped"))
    assert not cells.is_done(tmp_path / "stopped")
    torch.rand(3, device=pretend.device)  # a resumed process has another random state
    train(replace(recipe, out=tmp_path / "stopped"))
    assert_same_training(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, options", [(replace(TINY, drop_path=0.0), DEVICE), (HARD, COMPILED)]
)
def test_training_on_a_device_equals_training_on_the_cpu(
    recipe, options, pretend, without_kernels, tmp_path
):
    """Without random numbers on the pretend device, which has its own; with those of a step where it is compiled, once."""
    counters.clear()
    here = train(replace(recipe, epochs=2, out=tmp_path / "cpu"))
    assert not counters["stats"]
    there = train(replace(recipe, epochs=2, **options, out=tmp_path / "device"))
    assert counters["stats"]["unique_graphs"] == (options is COMPILED)
    for one, other in zip(here["history"], there["history"], strict=True):
        for name in ("train/loss", "test/loss", "test/accuracy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4)
    assert [*weights(tmp_path / "cpu")] == [*weights(tmp_path / "device")]


@pytest.mark.slow
def test_the_graphs_of_a_step_have_at_most_500_launches(pretend, tmp_path):
    """Of two blocks, in C++ that is counted and not compiled, so nothing is computed; of twelve less than six times as many."""
    recipe = replace(TINY, **COMPILED, width=192, heads=3, precision="bf16-mixed", measure_at="off")
    with (
        patch.object(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        _, (forward, backward) = run_and_get_code(train, replace(recipe, out=tmp_path))
    call = r"^ +(?:\w+ = )?(?:cpp_fused|extern_kernels|torch\.ops\.aten)[\w.]*\("
    launches = re.findall(call, forward + backward, re.MULTILINE)
    assert 10 < len(launches) < 500 / 6


@pytest.mark.slow
def test_a_device_without_float64_trains_and_the_cpu_measures(pretend, tmp_path):
    """Augmentation, metrics and the loss at the measured steps are in float32, as MPS needs."""
    with pretend.without_float64():
        result = train(replace(HARD, **DEVICE, out=tmp_path, epochs=2))
    assert (result["status"], result["environment"]["device"]) == ("finished", "pretend")
    units = tracker.open_results(tmp_path / "coupling")
    assert units.attrs["device"] == "cpu"
    assert [row["step"] for row in cells.read(tmp_path, "progress")] == units.step.values.tolist()


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_is_recorded_as_such_and_without_a_compiler_goes_on(
    tmp_path, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # The optimizer would ask the driver, which is not there, whether it captures a graph.
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None
    )
    result = train(replace(TINY, **COMPILED, out=tmp_path, epochs=2, measure_at="off"))
    assert (result["status"], result["environment"]["device"]) == ("finished", "cpu")
    assert capsys.readouterr().err.count("goes on without torch.compile: no compiler\n") == 1
