"""A walk stops at an error of the device: the process could not measure another revision on it."""

import pytest
import torch

from tracker import pythia
from tracker.results import Store

ERRORS = {
    "device": torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"
    ),
    "memory": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize(("kind", "measured"), [("device", [0, 1]), ("memory", [0, 1, 4])])
def test_errors_of_one_revision(walker, monkeypatch, capsys, kind, measured):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(walker.cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    measure, store = pythia.measure_checkpoint, Store(walker.directory / "out")

    def failing(plan, checkpoint, directory):
        if checkpoint.step == 2:
            raise ERRORS[kind]
        return measure(plan, checkpoint, directory)

    command = walker.arguments("--steps", "0,1,2,4")
    with monkeypatch.context() as patch:
        patch.setattr(pythia, "measure_checkpoint", failing)
        assert pythia.main(command) == 1
    said = capsys.readouterr().err
    if kind == "device":
        assert said.endswith(
            "error: step 2: the device failed (CUDA error: an illegal memory access was encountered), and this process can't "
            "use it any more; finished revisions are kept, and the same command continues with the rest\n"
        )
    else:
        assert "failed: step 2: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED" in said
    assert store.steps() == measured
    assert pythia.main(command) == 0 and store.steps() == [0, 1, 2, 4]
