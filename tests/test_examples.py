"""Tests of the examples, run offline in an empty directory."""

import os
import runpy
import sys

import pytest

import tracker
from tests.conftest import ROOT
from tests.support import processes
from tracker import curves

EXAMPLES = ROOT / "examples"
STEPS = {
    "transformer_encoder": [0, 1, 2, 4, 8, 16, 32, 64, 128, 256],
    "finetune_lm": [0, 20, 40, 60, 80, 100],
    "plain_loop": [0, 16, 32, 48, 64],
}


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch):
    """Let a script import what is beside it, as `python examples/NAME.py` does."""
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("name", [*STEPS, "when"])
def test_help_explains_the_example_and_runs_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    how = "python -m examples.when" if name == "when" else f"python examples/{name}.py"
    assert how in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_example(name, tmp_path):
    example = str(EXAMPLES / f"{name}.py")
    code = (
        f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.argv = [{example!r}]; "
        f"runpy.run_path({example!r}, run_name='__main__')"
    )
    process = processes.run(
        "tests.support.statements",
        code,
        env={**os.environ, "TRACKER_CACHE": str(tmp_path)},
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    (directory,) = (tmp_path / "results" / name).iterdir()
    results = tracker.open_results(directory)
    assert list(results.step) == STEPS[name] and results.diagnostics_sliced.all()
    assert (directory / "report.html").exists()
    if name == "plain_loop":  # its printed lines show the findings
        k = int(results.k[0])
        apart = curves(results).sel(k=k, pairs="mean_offdiag")
        coupling = (apart.miscoupling_null - apart.miscoupling).values
        assert abs(coupling[0]) < 0.02 and (coupling[1:] > 0.3).all()
        for trajectory in (results.lss, results.expodistance):
            of_step = trajectory.median([d for d in trajectory.dims if d != "step"]).values
            assert of_step[-1] < 0.7 * of_step[0]
