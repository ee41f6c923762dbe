"""Training on the device is bit for bit the same with the callback."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import tracker
from tests.support.accelerators import on_each
from tests.support.lightning_runs import fit, trainer
from tests.support.vit_trainings import HARD
from vit.training import train


@pytest.fixture(autouse=True)
def switched_back():
    """Lightning leaves deterministic algorithms on."""
    yield
    torch.use_deterministic_algorithms(False)


PRECISIONS = [("32-true",), ("16-mixed",), ("bf16-mixed",), ("bf16-true",)]


@pytest.mark.parametrize(
    "accelerator, precision",
    on_each(pretend=[("32-true",), ("bf16-true",)], cuda=PRECISIONS),
    indirect=["accelerator"],
)
def test_training_is_bit_identical(accelerator, precision):
    runs, steps = [], []
    for watch in (
        [],
        [tracker.CouplingCallback(2, k=2, on_measure=lambda unit: steps.append(int(unit.step)))],
    ):
        runner = trainer(watch, deterministic=True, precision=precision, **accelerator.trainer)
        trained = fit(runner)
        states = [*trained.state_dict().values()]
        for optimizer in runner.optimizers:
            states += [
                v for state in optimizer.state_dict()["state"].values() for v in state.values()
            ]
        runs.append((trained.losses, [torch.as_tensor(tensor).cpu() for tensor in states]))
    (losses, states), (watched_losses, watched_states) = runs
    assert losses == watched_losses and steps == [0, 2, 4, 6, 8]
    assert len(states) == len(watched_states) > 10
    assert all(torch.equal(a, b) for a, b in zip(states, watched_states, strict=True))


@pytest.mark.slow  # compiles kernels
@pytest.mark.parametrize("accelerator", on_each(pretend=()), indirect=True)
def test_a_compiled_vit_is_measured_and_trains_as_uncompiled(accelerator, tmp_path):
    recipe, losses = replace(HARD, accelerator="cuda", precision="32-true"), []
    counters.clear()
    for compile in (True, False):
        result = train(replace(recipe, compile=compile, out=tmp_path / str(compile)))
        losses += [[row["train/loss"] for row in result["history"]]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["inductor"]["cudagraph_skips"]
