"""Tests of the examples, run offline in an empty directory."""

import os
import subprocess
import sys

import pytest

import tracker
from tests.conftest import ROOT

STEPS = {
    "transformer_encoder": [0, 1, 2, 4, 8, 16, 32, 64, 128, 256],
    "finetune_lm": [0, 20, 40, 60, 80, 100],
    "plain_loop": [0, 50, 100, 150, 200],
}


@pytest.mark.parametrize("name", STEPS)
def test_help_explains_the_example_and_runs_nothing(name, tmp_path):
    command = [sys.executable, ROOT / "examples" / f"{name}.py", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and f"python examples/{name}.py" in process.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_example(name, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKER_CACHE": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    results = tracker.open_results(tmp_path / "results" / name)
    assert list(results.step) == STEPS[name] and results.diagnostics_sliced.all()
    assert (tmp_path / "results" / name / "report.html").exists()
