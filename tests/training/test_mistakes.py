"""A forward pass that fails at the first measurement is a mistake of the call: it ends the run, and names what cures it."""

from types import SimpleNamespace

import pytest
import torch

import tracker
from tests.support.drivers import OUT_OF_MEMORY
from tests.support.lightning_runs import Classifier, fit, trainer
from tests.support.models import neox
from tests.support.refused import refused
from tests.support.watch import PROBE, Watch
from tracker.model.records import describe


class Failing(Classifier):
    """A module whose forward raises an error in evaluation mode, at some steps."""

    def __init__(self, error: Exception, steps: range):
        super().__init__()
        self.error, self.steps = error, steps

    def forward(self, x):
        step = self.trainer.global_step if self.__dict__.get("_trainer") else 0
        if not self.training and step in self.steps:
            raise type(self.error)(*self.error.args)
        return super().forward(x)


def test_an_error_of_the_forward_pass_ends_the_run_at_first(tmp_path):
    with refused("the forward of Failing fails on the probe, float32 .5, 6, 8.: ") as raised:
        fit(
            trainer([Watch(2, save_dir=tmp_path)]),
            lambda: Failing(KeyError("planted"), range(9)),
            validate=False,
        )
    assert "KeyError: 'planted'. If the training step" in str(raised.value)
    assert str(raised.value).endswith("forward=lambda module, batch: ...")
    assert type(raised.value.__cause__) is KeyError
    assert raised.value.__notes__ == [
        "while CouplingCallback measured step 0; the training can't continue"
    ]


def test_a_run_may_begin_at_any_step(tmp_path):
    """A loop that counts from 1, or that continues: nothing of this training is lost yet."""
    with refused("the forward of Failing fails on the probe"):
        with tracker.Watch(every_n_steps=1, probe=PROBE, save_dir=tmp_path) as watch:
            for step in (3, 4):
                watch(step, Failing(KeyError("planted"), range(9)).eval())
    assert step == 3


SKIPPED = {
    "later": (4, KeyError("planted"), "step 4 is not measured .KeyError.*; training continues"),
    "memory": (
        0,
        torch.OutOfMemoryError(OUT_OF_MEMORY),
        "step 0 is not measured .OutOfMemoryError.*no step has results yet",
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_an_error_later_or_of_memory_skips_a_step(case):
    watch, (step, error, message) = Watch(2), SKIPPED[case]
    with pytest.warns(UserWarning, match=message):
        fit(trainer([watch]), lambda: Failing(error, range(step, step + 1)), validate=False)
    assert set(watch.units) == {0, 2, 4, 6, 8} - {step}


def test_an_error_of_the_device_in_the_first_forward_pass_is_raised_as_it_is():
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError, match="^CUDA error"):
        fit(trainer([Watch(2)]), lambda: Failing(lost, range(1)), validate=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"probe": PROBE, "forward": lambda model, batch: model(batch["ids"])},
            "given as forward= fails .*TypeError",
        ),
        (
            {"probe": {"input_ids": torch.zeros(2, 5)}},
            "GPTNeoXForCausalLM fails .* {input_ids: float32 .2, 5.}: ",
        ),
        (
            {"probe": tracker.prompts(), "tokenizer": lambda text, **_: int(text)},
            "on the probe, 16 texts: ValueError",
        ),
    ],
    ids=["forward=", "dtype", "tokenizer"],
)
def test_mistakes_of_other_kinds(options, message):
    with refused(f"(?s){message}.*forward=lambda"):
        tracker.Watch(1, k=2, **options)(0, neox())


def test_a_probe_that_is_not_finite():
    """What the model is given is not the cause."""
    with refused(r"float32 \(5, 6, 8\): FloatingPointError: (?!.*forward=).*not finite"):
        fit(trainer([Watch(2, probe=PROBE * float("nan"))]))


def test_what_a_batch_holds():
    batch = SimpleNamespace(ids=torch.zeros(2, 3), texts=["a", "b"])
    held = "SimpleNamespace(ids: float32 (2, 3), texts: 2 texts)"
    assert describe(batch) == held
    assert describe((torch.arange(2), [batch, None])) == f"(int64 (2,), [{held}, None])"
    arrays = {"ids": torch.zeros(2).numpy(), "other": object()}
    assert describe(arrays) == "{ids: float32 (2,), other: object}"
