"""The command for a GPU, with steps and tests that fail, crash and hang in place of the real ones."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import tracker
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import process, requirements, suite, summary, synchronizations
from benchmarks.gpu.steps import STEPS, Step
from tests.conftest import ROOT
from tests.models import build

SETUP = "import json, os, sys, time\nout = sys.argv[sys.argv.index('--out') + 1]\n"
WRITE = "json.dump({'counts': {'passed': 1}}, open(out, 'w'))\n"
MODULES = {
    "well": WRITE,
    "silent": "",
    "raising": WRITE + "raise MemoryError('no memory left')\n",
    "crashing": WRITE + "os.kill(os.getpid(), 11)\n",
    "hanging": WRITE + "time.sleep(600)\n",
}


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Replace the steps by the modules above."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(SETUP + text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = tuple(Step(name, f"the {name} one", name, limit=4, least=1) for name in MODULES)
    monkeypatch.setattr(command, "STEPS", made)
    monkeypatch.setattr(command, "BY_NAME", {step.name: step for step in made})
    return tmp_path / "gpu.json"


def run(out: Path, *arguments: str) -> tuple[int, dict]:
    code = command.main(["--device", "cpu", "--small", "--out", str(out), *arguments])
    return code, json.loads(out.read_text())["steps"] if out.exists() else {}


@pytest.mark.slow
def test_whatever_ends_a_step_the_others_run_and_results_so_far_are_kept(steps, capsys):
    code, found = run(steps)
    assert code == 1
    assert {name: step["status"] for name, step in found.items()} == {
        "well": "ok",
        "silent": "failed",
        "raising": "failed",
        "crashing": "crashed (SIGSEGV)",
        "hanging": "timed out",
    }
    assert all(step["result"]["counts"] for name, step in found.items() if name != "silent")
    assert "MemoryError: no memory left" in found["raising"]["output"]
    assert "hanging.py" in found["hanging"]["output"], "the stack at the end of the time limit"
    assert found["hanging"]["seconds"] < 8 and found["well"]["commit"]
    printed = capsys.readouterr().out
    assert "crashing          crashed (SIGSEGV)" in printed and "1 passed" in printed


@pytest.mark.slow
def test_the_same_command_continues_with_what_is_not_done(steps):
    assert run(steps, "--steps", "well,raising")[0] == 1
    before = json.loads(steps.read_text())["steps"]
    (steps.parent / "raising.py").write_text(SETUP + WRITE)
    code, found = run(steps, "--limit", "60")
    assert found["well"] == before["well"] and found["raising"]["status"] == "ok"
    assert list(found) == ["well", "raising", "silent", "crashing", "hanging"]
    assert found["raising"]["started"] >= found["hanging"]["started"], "what has not run goes first"
    _, again = run(steps, "--steps", "well")
    assert again["well"]["started"] > before["well"]["started"] and again["crashing"] == found["crashing"]


@pytest.mark.slow
def test_steps_for_which_no_time_is_left_are_recorded(steps, monkeypatch):
    slow = Step("hanging", "the hanging one", "hanging", limit=3, least=1)
    monkeypatch.setattr(command, "STEPS", (slow, *(step for step in command.STEPS if step.name != "hanging")))
    code, found = run(steps, "--limit", "4")
    assert code == 1 and found["hanging"]["status"] == "timed out"
    assert {step["status"] for name, step in found.items() if name != "hanging"} == {"not run"}
    assert run(steps, "--limit", "60", "--steps", "well")[1]["well"]["status"] == "ok"


@pytest.mark.slow
def test_an_interrupt_ends_the_step_and_keeps_the_results(steps):
    script = f"""
import sys
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.steps import Step
command.STEPS = tuple(Step(name, name, name, limit=60, least=1) for name in ("well", "hanging"))
sys.exit(command.main(["--device", "cpu", "--small", "--out", {str(steps)!r}]))
"""
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in driver.stdout:
        if line.startswith("well"):
            break
    time.sleep(1)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(20) == 130
    assert json.loads(steps.read_text())["steps"]["well"]["status"] == "ok"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "well,else"], "--steps well,else: 'else' is no step; choose from well, silent"),
        (["--wheels", "nowhere"], "--wheels nowhere can't be installed (there are no wheels in it)"),
    ],
)
def test_bad_usage_is_one_message(steps, arguments, message, capsys):
    assert run(steps, *arguments)[0] == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1, "device": "cuda", "small": false, "steps": {}}'])
def test_a_file_of_something_else_is_left_alone(steps, content, capsys):
    steps.write_text(content)
    assert command.main(["--device", "cpu", "--small", "--out", str(steps)]) == 2
    assert "give another --out" in capsys.readouterr().err and steps.read_text() == content


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_message_names_the_test_on_the_cpu(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "gpu.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no CUDA device") and "`--device cpu --small`" in error
    assert not (tmp_path / "gpu.json").exists()


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "PACKAGES", ("torch", "no_such_package"))
    assert requirements.main(["--device", "cpu"]) == 2
    assert "packages are missing: no_such_package; install them" in capsys.readouterr().out


@pytest.mark.slow
def test_wheels_are_installed_for_the_steps(steps, tmp_path):
    pytest.importorskip("pip")  # environments made by uv have none
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "value = 1\n")
        wheel.writestr("brought-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        wheel.writestr("brought-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.dist-info/RECORD", "")
    (tmp_path / "well.py").write_text(SETUP + "import brought\n" + WRITE)
    assert run(steps, "--steps", "well")[1]["well"]["status"] == "failed"
    assert run(steps, "--steps", "well", "--wheels", str(wheels))[1]["well"]["status"] == "ok"


@pytest.mark.slow
def test_a_step_ends_with_all_its_processes(tmp_path):
    started = tmp_path / "started"
    child = f"import pathlib, time; pathlib.Path({str(started)!r}).write_text(''); time.sleep(5); print('ran on')"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    outcome = process.run(["-c", script], 2, tmp_path, None)
    assert outcome["status"] == "timed out" and started.exists()
    time.sleep(5)
    assert "ran on" not in (tmp_path / "output").read_text()


TESTS = """
import os, time, pytest

def test_first(record_property):
    record_property("error", 1e-7)

def test_crash():
    os.kill(os.getpid(), 11)

def test_fail():
    assert 1 == 2

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_hang():
    time.sleep(600)

def test_last(): pass
"""


@pytest.mark.slow
def test_a_test_that_crashes_or_hangs_loses_itself_alone(tmp_path):
    (tmp_path / "test_planted.py").write_text(TESTS)
    out, tests = tmp_path / "out.json", {}
    assert suite.run([str(tmp_path)], out, tests, patience=6) == 1
    written = json.loads(out.read_text())
    assert written["tests"] == tests
    outcomes = {name.partition("::test_")[2]: test for name, test in tests.items()}
    assert {name: test["outcome"] for name, test in outcomes.items()} == {
        "first": "passed",
        "crash": "crashed",
        "fail": "failed",
        "skipped": "skipped",
        "hang": "timed out",
        "last": "passed",
    }
    assert outcomes["first"]["properties"] == {"error": 1e-7}
    assert outcomes["fail"]["message"].startswith("assert 1 == 2") and "SIGSEGV" in outcomes["crash"]["message"]
    assert written["counts"] == {"passed": 2, "crashed": 1, "failed": 1, "skipped": 1, "timed out": 1}

    (tmp_path / "test_planted.py").write_text(TESTS.replace("os.kill(os.getpid(), 11)", "pass").replace("600", "0"))
    kept = {name: test for name, test in tests.items() if test["outcome"] in suite.KEPT}
    assert suite.run([str(tmp_path)], out, kept) == 1
    assert len(kept) == 6 and sum(test["outcome"] == "passed" for test in kept.values()) == 4


UNUSABLE = """
import os
from benchmarks.gpu import outcomes

def test_error(record_property):
    record_property("process", os.getpid())
    outcomes._usable = lambda: False
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_next(record_property):
    record_property("process", os.getpid())
"""


@pytest.mark.slow
def test_after_an_error_that_the_gpu_does_not_survive_another_process_goes_on(tmp_path):
    (tmp_path / "test_planted.py").write_text(UNUSABLE)
    tests = {}
    assert suite.run([str(tmp_path)], tmp_path / "out.json", tests) == 1
    error, following = tests.values()
    assert (error["outcome"], following["outcome"]) == ("failed", "passed")
    assert "illegal memory access" in error["message"]
    assert error["properties"]["process"] != following["properties"]["process"]


@pytest.mark.slow
def test_tests_that_cannot_start_end_the_suite(tmp_path):
    (tmp_path / "test_planted.py").write_text("import no_such_module\n")
    assert suite.run([str(tmp_path)], tmp_path / "out.json", {}) == 1


def test_synchronizing_calls_are_counted_by_line(monkeypatch):
    model, inputs = build("gpt_neox")
    norm = torch.linalg.vector_norm

    def synchronizing(*arguments, **options):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return norm(*arguments, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", synchronizing)
    found = synchronizations.count(lambda: tracker.measure(model, inputs, k=2, measures="coupling"), "cpu")
    assert found["synchronizations"] == sum(found["lines"].values()) > 0
    assert all(line.startswith("tracker/") for line in found["lines"])


def test_the_document_has_the_table_of_the_results():
    file = ROOT / command.RESULT
    content = json.loads(file.read_text()) if file.exists() else {}
    assert summary.markdown(content) in (ROOT / "docs" / "gpu.md").read_text()


def test_the_table_is_filled_from_results():
    ours = {"seconds": 4.25, "seconds_per_prompt": 4.25, "stages": {}, "fraction_of_gemm_rate": {"jacobian": 0.5}}
    run_of = {"run": {"every": 200}, "seconds_of_a_measurement": 0.5, "seconds_of_a_stretch": {"without": [4.9]}}
    content = {"steps": {"12b-float32": {"result": {"ours": ours}}, "callback": {"result": run_of}}}
    rows = summary.markdown(content).splitlines()
    assert any("one prompt" in row and "| 4.25 s | 6 s |" in row for row in rows)
    assert any("the callback" in row and "| 2.0% | 2 % |" in row for row in rows)
    assert sum(summary.NOT_MEASURED in row for row in rows) == len(summary.ROWS) - 3


def test_every_row_names_a_step():
    assert {name for _, _, name, _ in summary.ROWS} <= {step.name for step in STEPS}


@pytest.mark.slow
def test_every_step_runs_in_small_on_the_cpu(tmp_path):
    out = tmp_path / "gpu.json"
    code = command.main(["--device", "cpu", "--small", "--limit", "1500", "--out", str(out)])
    steps = json.loads(out.read_text())["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {step.name: "ok" for step in STEPS}, [
        step["output"] for step in steps.values() if step["status"] != "ok"
    ]
    assert code == 0
    assert all(summary.headline(step) for step in steps.values())
    assert summary.NOT_MEASURED not in summary.table({"steps": steps})
