"""Training on the device is bit for bit the same with the callback."""

import pytest
import torch

import tracker
from tests.support.accelerators import on_each
from tests.support.lightning_runs import Classifier, fit, trainer


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
def test_a_compiled_model_is_measured_and_trains_on(accelerator):
    module = Classifier(drop=0.0).to(accelerator.device)
    x = torch.randn(4, 6, 8)
    expected = tracker.measure(module, x, k=2)
    compiled = torch.compile(module)
    y = compiled(x.to(accelerator.device))
    seen = tracker.measure(compiled, x, k=2)
    assert float(abs(seen.miscoupling - expected.miscoupling).max()) < 1e-5
    assert torch.equal(compiled(x.to(accelerator.device)), y)
