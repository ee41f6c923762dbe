"""A run that begins again in its process, after lack of memory, say, is the same run: its earlier units are set aside."""

import warnings

import numpy as np
import pytest
import torch
from accelerate.utils import find_executable_batch_size
from transformers.trainer_callback import TrainerCallback

import tracker
from tests.support.drivers import CHEAP, OUT_OF_MEMORY
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tests.support.trainer import make
from tracker.store import Store

AGAIN = "the run begins again: its {} units so far are set aside in .*superseded"


class Scarce(TrainerCallback):
    """Runs out of memory after a step, if the batch is larger than 3 samples."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.step and state.train_batch_size > 3:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def superseded(store: Store) -> list[str]:
    return sorted(file.name for file in (store.path / "superseded").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_the_trainer_finds_a_batch_size(tmp_path, step):
    """The Trainer calls the same callback again; after some steps its model has other weights at step 0."""
    units = []
    runner = make(tmp_path / "run", auto_find_batch_size=True)
    runner.add_callback(
        tracker.TransformersCallback(
            2, **CHEAP, save_dir=str(tmp_path / "store"), on_measure=units.append
        )
    )
    runner.add_callback(Scarce(step))
    with pytest.warns(UserWarning, match=AGAIN.format(1 + step // 2)):
        runner.train()
    store, first = Store(tmp_path / "store"), 1 + step // 2
    assert store.steps() == [0, 2, 4, 6] == [int(unit.step) for unit in units[first:]]
    assert superseded(store) == [f"step0000000{i}.nc" for i in (0, 2)[:first]]
    for unit in units[first:]:
        np.testing.assert_array_equal(store.read(int(unit.step)).lss, unit.lss)
    assert not np.array_equal(units[0].lss, units[first].lss)


def loop(directory, batch_size: int, error: BaseException, probe=None):
    """Train for four steps; raise at step 2 if the batch is larger than 2."""
    model = neox()
    with tracker.Watch(
        1, **CHEAP, probe=tokens() if probe is None else probe, save_dir=str(directory)
    ) as watch:
        for step in range(4):
            watch(step, model)
            if step == 2 and batch_size > 2:
                raise error


def test_a_loop_that_runs_out_of_memory(tmp_path):
    @find_executable_batch_size(starting_batch_size=5)
    def train(batch_size):
        probe = torch.cat([tokens()] * 4)[:batch_size]  # what is measured may depend on the batch
        loop(tmp_path, batch_size, torch.OutOfMemoryError(OUT_OF_MEMORY), probe)

    with warnings.catch_warnings(record=True, action="always") as caught:
        train()
    # Of 5, 4 and 3 samples
    assert len([w for w in caught if "begins again: its 3 units" in str(w.message)]) == 3
    assert Store(tmp_path).steps() == [0, 1, 2, 3] and len(superseded(Store(tmp_path))) == 9
    assert not (tmp_path / ".training").exists()


def test_the_same_watch_again(tmp_path):
    watch, model = tracker.Watch(1, **CHEAP, probe=tokens(), save_dir=str(tmp_path)), neox()
    with pytest.raises(MemoryError), watch:
        watch(0, model)
        watch(1, model)
        raise MemoryError
    with pytest.warns(UserWarning, match=AGAIN.format(2)), watch:
        watch(0, model)
    assert Store(tmp_path).steps() == [0]


REFUSED = {
    "stopped by the user": lambda directory: loop(directory, 8, KeyboardInterrupt()),
    "dropped": lambda directory: tracker.Watch(1, **CHEAP, probe=tokens(), save_dir=directory)(
        0, neox()
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_run_after_one_that_did_not_fail(tmp_path, case):
    with pytest.raises(KeyboardInterrupt) if "user" in case else warnings.catch_warnings():
        REFUSED[case](tmp_path)
    stored = Store(tmp_path).steps()
    with refused("holds the units of another run"):
        loop(tmp_path, 2, MemoryError())
    assert Store(tmp_path).steps() == stored != []
