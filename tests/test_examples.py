"""Tests of the examples, run offline in an empty directory."""

import os
import runpy
import shutil
import sys
from dataclasses import replace
from itertools import product

import pytest

import tracker
from checkpoints import nano
from examples import when
from tests.conftest import ROOT
from tests.support import processes
from tracker import curves
from tracker.analysis.regression import mean_interval

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


@pytest.mark.slow
def test_the_study_of_when_coupling_rises_reports_what_it_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "cache"))
    base = replace(
        when.BASE, layers=3, width=32, characters=100_000, vocabulary=300, batch=2, steps=(0, 2)
    )
    recipes = {"base": base, "4 blocks": replace(base, layers=4)}
    monkeypatch.setattr(when, "RECIPES", recipes)
    monkeypatch.setattr(when, "SEEDS", (0, 1))
    for name, seed in product(recipes, when.SEEDS):
        when.measure_text(name, seed, tmp_path)
    # Stands for a vision transformer's
    shutil.copytree(
        when.store("4 blocks", 1, tmp_path), tmp_path / "ViT, 4 blocks/c_seed5/coupling"
    )
    values = when.values(tmp_path)
    numbers = values.set_index(["recipe", "seed", "step"])
    assert len(numbers) == 2 * 2 * 2 + 2
    model, tokenizer = nano.load(2, 1, base)
    ds = tracker.measure(model, tracker.prompts(), tokenizer=tokenizer, k=10)
    rows = tracker.summary(ds)
    found = numbers.loc["base", 1, 2]
    expected = rows.coupling["miscoupling", "all pairs"], rows.value["lss", "median of tokens"]
    assert (found["coupling"], found["line-shape score"]) == pytest.approx(expected, abs=1e-4)
    vit = numbers.loc["ViT, 4 blocks", 5, 2]
    assert vit["by eq. 14"] == numbers.loc["4 blocks", 1, 2]["by eq. 14"]
    when.draw(values, tmp_path / "when.png")
    assert (tmp_path / "when.png").stat().st_size > 10_000
    _, _, row, *others = when.table(values).splitlines()
    coupling = numbers["coupling"].unstack("step")
    low, high = mean_interval((coupling[2] - coupling[0])["base"].to_numpy())
    assert row.startswith("| base |") and f"[{low:z.3f}, {high:z.3f}]" in row
    assert len(others) == 2
