"""Two ranks of a training (DDP): if a measurement fails on one, both train on, exactly as without the callback, or both end."""

import json
import os
import pickle
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import processes
from tests.training.failing_ranks import CONTINUED, ENDED, PROBE, STEPS
from tracker import CouplingCallback
from tracker.store import Store

SECONDS = 400  # some twenty are used; a rank that waits for another one would wait until then
LINE = r" (failing_ranks.py, line "


def run_ranks(directory: Path, *options: str) -> int:
    """Run the two ranks; return the exit status, negative if they had to be killed."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with (directory / "output").open("w") as output:
        streams = {"stdout": output, "stderr": output}
        module = "tests.training.failing_ranks"
        process = processes.start(
            module, directory, *options, env=environment, start_new_session=True, **streams
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # Lightning has started the other rank
        return process.wait()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found in each run; in those before one hung, if one did."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(directory)
    files = [directory / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), (directory / "output").read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_both_ranks_train_on_as_without_the_callback(ranks):
    for results in ranks:
        assert results["continued"]["error"] is None
        assert results["continued"]["state"] == results["plain"]["state"]
        losses, *tensors = results["plain"]["state"]
        assert len(losses) == STEPS and len(tensors) > 10
    # Each trains on its own batches
    assert ranks[0]["plain"]["state"][0] != ranks[1]["plain"]["state"][0]


@pytest.mark.slow
def test_a_failure_on_one_rank_is_recorded_on_both(ranks):
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
        skipped = results["continued"]["skipped"]
        assert {step: reason.partition(LINE)[0] for step, reason in skipped.items()} == reasons
        assert LINE in skipped["2"] and LINE in skipped["3"]  # where a mistake is
    # Rank 1 does not call on_measure
    assert {int(step) for step in reasons} == CONTINUED.keys() - {4}


@pytest.mark.slow
def test_only_what_failed_is_missing(ranks):
    first, second = (results["continued"] for results in ranks)
    assert first["stored"] == [0, 3, 4, 7, 10]
    assert first["on_measure"] == [0, 4, 5, 6, 7, 10] and second["on_measure"] == []
    assert first["metric"] == second["metric"]


@pytest.mark.slow
def test_one_warning_names_the_rank_the_step_and_the_reason(ranks):
    said, silent = (results["continued"]["warnings"] for results in ranks)
    assert len(said) == 8 and silent == []
    assert said[0] == "step 1 is not measured (RuntimeError on rank 0: planted); training continues"
    assert said[2].startswith(
        "step 3 is measured but on_measure failed (KeyError on rank 0: 'planted' ("
    )
    assert said[3].startswith("step 5 is measured but not stored (OSError on rank 0: [Errno 28]")


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDED)
def test_both_ranks_end_for_the_same_reason(ranks, case):
    step, place, (failing, error) = ENDED[case]
    doing = {"probe": "took the probe", "claim": "opened save_dir"}.get(
        place, f"measured step {step}"
    )
    for rank, results in enumerate(ranks):
        message, *notes = results[case]["error"]
        assert str(error) in message and (rank == failing or f" on rank {failing}: " in message)
        assert notes == [
            f"while CouplingCallback {doing} on rank {failing}; the training can't continue"
        ]
        assert results[case]["stored"] == list(range(step + (place == "on_measure")))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every_n_steps": 3},
        {"every_n_epochs": 2},
        {"steps": [0, 3, 7]},
    ],
    ids=str,
)
def test_every_schedule_can_be_pickled(options, tmp_path):
    watch = CouplingCallback(
        **options, probe=PROBE, save_dir=str(tmp_path), log=["trajectory/*"], on_measure=print
    )
    copy = pickle.loads(pickle.dumps(watch))
    assert [copy.run.schedule(step) for step in range(3000)] == [
        watch.run.schedule(step) for step in range(3000)
    ]
    assert copy.run.settings == watch.run.settings and copy.state_key == watch.state_key


@pytest.mark.slow
def test_a_spawned_training_is_measured(tmp_path):
    """`strategy="ddp_spawn"` pickles the callback."""
    ran = run_ranks(tmp_path, "--spawn")
    assert ran == 0, (tmp_path / "output").read_text()
    assert Store(tmp_path / "spawned").steps() == [0, 1, 2]
