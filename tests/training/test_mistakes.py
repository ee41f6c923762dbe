"""A forward pass that fails at the first measurement is a mistake of the call: it ends the run, and names what cures it."""

from dataclasses import dataclass

import pytest
import torch

import tracker
from tests.support.lightning_runs import Classifier, fit, trainer
from tests.support.models import neox
from tests.support.refused import refused
from tests.support.watch import PROBE, Watch
from tracker.model.records import describe

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


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


ERRORS = [
    RuntimeError("planted"),
    ValueError("planted"),
    KeyError("planted"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_forward_pass_ends_the_run_at_first(tmp_path, error):
    with refused("the forward of Failing fails on the probe, float32 .5, 6, 8.: ") as raised:
        fit(
            trainer([Watch(2, save_dir=tmp_path)]), lambda: Failing(error, range(9)), validate=False
        )
    assert f"{type(error).__name__}: {error}. If the training step" in str(raised.value)
    assert str(raised.value).endswith("forward=lambda module, batch: ...")
    assert type(raised.value.__cause__) is type(error)
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


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_same_error_later_skips_a_step(error):
    watch = Watch(2)
    with pytest.warns(
        UserWarning, match=f"step 4 is not measured .{type(error).__name__}.*; training continues"
    ):
        fit(trainer([watch]), lambda: Failing(error, range(4, 5)), validate=False)
    assert list(watch.units) == [0, 2, 6, 8]


def test_memory_that_runs_out_in_the_first_forward_pass_skips_the_step():
    watch = Watch(4)
    with pytest.warns(
        UserWarning, match="step 0 is not measured .OutOfMemoryError.*no step has results yet"
    ):
        fit(
            trainer([watch]),
            lambda: Failing(torch.OutOfMemoryError(OUT_OF_MEMORY), range(1)),
            validate=False,
        )
    assert list(watch.units) == [4, 8]


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


@dataclass
class Sample:
    ids: torch.Tensor
    texts: list[str]


def test_what_a_batch_holds():
    batch = Sample(torch.zeros(2, 3), ["a", "b"])
    assert describe(batch) == "Sample(ids: float32 (2, 3), texts: 2 texts)"
    assert (
        describe((torch.zeros(2, dtype=torch.long), [batch, None]))
        == f"(int64 (2,), [{describe(batch)}, None])"
    )
    assert (
        describe({"ids": torch.zeros(2).numpy(), "other": object()})
        == "{ids: float32 (2,), other: object}"
    )
