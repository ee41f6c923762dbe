"""Two ranks of a training: both train on exactly as without a measurement, whatever fails on one of them, or both end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tracker
from tests.support import plain_loop, rank_runs, trainer
from tests.support.lightning_runs import Classifier
from tests.support.models import neox
from tests.support.rank_runs import CONTINUED, ENDED, PROBE, STEPS, TOKENS
from tests.support.ranks import run_on_two_ranks
from tests.support.units import assert_same_units
from tracker.store import Store

pytestmark = pytest.mark.slow

LINE = r" (rank_runs.py, line "


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Directory of the runs, with what each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(rank_runs.__name__, directory)
    return directory


@pytest.fixture(scope="module")
def ranks(directory) -> list[dict]:
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ("transformers", trainer.STEPS),
        ("watch", plain_loop.STEPS),
        ("lightning", STEPS),
        ("sharded", STEPS),
    ],
)
def test_both_ranks_train_on_as_without_the_callback(ranks, way, steps):
    """Also after measurements that failed on one of them; each trains on its own batches."""
    for results in ranks:
        assert results[way]["state"] == results[f"{way}, plain"]["state"]
        losses, *tensors = results[way]["state"]
        assert len(losses) == steps and len(tensors) > 10
    assert ranks[0][way]["state"][0] != ranks[1][way]["state"][0]


def test_units_are_those_of_one_process(directory):
    """The probe is shared; a rank may have no sample of it, or a part of the weights."""
    for way, probe in (("lightning", PROBE), ("one sample", PROBE[:1]), ("sharded", PROBE)):
        module = Classifier()
        module.load_state_dict(torch.load(directory / way / "rank0.pt"))
        expected = tracker.measure(module, probe, k=2, dtype="float64").assign_coords(step=STEPS)
        assert_same_units(Store(directory / way / "store").read(STEPS), expected, 1e-7)
    for way, make in (("transformers", lambda: trainer.make(directory).model), ("watch", neox)):
        torch.manual_seed(0)
        store, alone = Store(directory / way / "store"), tracker.measure(make(), TOKENS, k=2)
        assert store.steps() == [0, 3, trainer.STEPS]
        np.testing.assert_allclose(store.read(0).miscoupling, alone.miscoupling, atol=1e-6)


def test_a_failure_on_one_rank_is_recorded_on_both(ranks, directory):
    reasons = {
        "1": "RuntimeError on rank 0: planted",
        "2": "KeyError on rank 1: 'planted'",
        "3": "on_measure failed: KeyError on rank 0: 'planted'",
        "5": "not stored: OSError on rank 0: [Errno 28] No space left on device",
        "6": "not stored: RuntimeError on rank 0: planted",
        "7": "not logged: ConnectionError on rank 0: planted",
        "8": "MemoryError on rank 1: planted",
        "9": "OutOfMemoryError on rank 1: planted",
    }
    for results in ranks:
        skipped = results["lightning"]["skipped"]
        assert {step: reason.partition(LINE)[0] for step, reason in skipped.items()} == reasons
        assert LINE in skipped["2"] and LINE in skipped["3"]  # where a mistake is
        assert results["sharded"]["skipped"] == {"4": "RuntimeError on rank 1: planted"}
    # Rank 1 does not call on_measure
    assert {int(step) for step in reasons} == CONTINUED.keys() - {4}
    stored = Store(directory / "sharded" / "store")
    assert stored.steps() == [0, 8, STEPS]
    assert stored.skipped() == {4: "RuntimeError on rank 1: planted"}


def test_only_what_failed_is_missing(ranks, directory):
    """One warning names the rank, the step and the reason."""
    first, second = (results["lightning"] for results in ranks)
    assert Store(directory / "lightning" / "store").steps() == [0, 3, 4, 7, 10]
    assert first["on_measure"] == [0, 4, 5, 6, 7, 10] and second["on_measure"] == []
    assert first["metric"] == second["metric"]
    said = first["warnings"]
    assert len(said) == 8 and second["warnings"] == []
    assert said[0] == "step 1 is not measured (RuntimeError on rank 0: planted); training continues"
    assert said[2].startswith("step 3 is measured but on_measure failed (KeyError on rank 0: ")
    assert said[3].startswith("step 5 is measured but not stored (OSError on rank 0: [Errno 28]")


DOING = {"probe": "took the probe", "claim": "opened save_dir"}


@pytest.mark.parametrize("case", ENDED)
def test_both_ranks_end_for_the_same_reason(ranks, case, directory):
    ((step, (place, failing, error)),) = ENDED[case].items()
    mistake = "the function given as forward= fails on the probe, float32 (3, 6, 8): RuntimeError: "
    of_all = place == "forward"
    doing, which = (
        DOING.get(place, f"measured step {step}"),
        "all ranks" if of_all else f"rank {failing}",
    )
    for rank, results in enumerate(ranks):
        message, *notes = results[case]["error"]
        named = mistake if of_all else f" on rank {failing}: "
        assert str(error) in message and (named in message or not of_all and rank == failing)
        assert notes == [f"while CouplingCallback {doing} on {which}; the training can't continue"]
    measured = list(range(step + (place == "on_measure")))
    assert Store(directory / case / "store").steps() == measured
