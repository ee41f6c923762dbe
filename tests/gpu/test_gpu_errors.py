"""Errors of the device's kernels keep their type; they end the process's use of the GPU, so they have a process each."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.accelerators import on_each

OUTSIDE_THE_VOCABULARY = """
import tracker
from tests.support.models import build

model, inputs = build("gpt_neox")
model.get_input_embeddings().register_forward_pre_hook(lambda embeddings, given: (given[0] + 10_000,))
try:
    tracker.measure(model.to("cuda"), inputs, k=4)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("accelerator", on_each(pretend=()), indirect=True)
def test_an_error_of_a_kernel_is_raised_as_such(accelerator):
    command = [sys.executable, "-c", OUTSIDE_THE_VOCABULARY]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.stdout.split() == ["AcceleratorError"], done.stderr[-2000:]
