"""The command for a GPU, with steps that fail, crash and hang in place of the real ones, and with all of them in small."""

import json
import os
import re
import select
import subprocess
import sys
import time
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import torch

import tracker
from benchmarks import gpu
from tests.conftest import ROOT
from tests.support import processes
from tests.support.models import build

SETUP = "import json, os, sys, time\nout = sys.argv[sys.argv.index('--out') + 1]\n"
WRITE = "json.dump({'waits': 1}, open(out, 'w'))\n"
MODULES = {
    "well": WRITE,
    "raising": WRITE + "raise MemoryError('no memory left')\n",
    "crashing": WRITE + "os.kill(os.getpid(), 11)\n",
    "hanging": WRITE + "open(__file__.replace('.py', '.reached'), 'w').close()\ntime.sleep(600)\n",
}
LIMIT = 1.0  # seconds


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    """Begin the time of a process once it hangs, however long it took to start; return the file by which it says so."""
    file, now = tmp_path / "hanging.reached", [0.0]

    class Started(subprocess.Popen):
        def wait(self, timeout=None):
            while timeout == LIMIT and self.poll() is None and not file.exists():
                time.sleep(0.01)
            try:
                return super().wait(timeout)
            except subprocess.TimeoutExpired:
                now[0] += LIMIT
                file.unlink()
                raise

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(
        gpu, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    )
    monkeypatch.setattr(gpu, "GRACE", 300.0)
    return file


@pytest.fixture
def steps(tmp_path, monkeypatch, hangs):
    """Replace the steps by the modules above; return the JSON file."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(SETUP + text)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setattr(gpu, "CHECK", "")
    monkeypatch.setattr(gpu, "STEPS", {name: (LIMIT, name) for name in MODULES})
    monkeypatch.setattr(gpu, "SMALL", dict.fromkeys(MODULES, ""))
    return tmp_path / "gpu.json"


def run(out, *arguments: str) -> tuple[int, dict]:
    code = gpu.main(["--device", "cpu", "--small", "--out", str(out), *arguments])
    return code, json.loads(out.read_text())["steps"]


@pytest.mark.slow
def test_whatever_ends_a_step_the_others_run_and_results_so_far_are_kept(steps, capsys):
    code, found = run(steps)
    statuses = {"well": "ok", "raising": "failed", "crashing": "SIGSEGV", "hanging": "timed out"}
    assert code == 1 and {name: step["status"] for name, step in found.items()} == statuses
    assert all(step["result"] == {"waits": 1} and step["commit"] for step in found.values())
    assert "hanging.py" in found["hanging"]["output"], "the stack at the end of the time limit"
    assert re.search(
        r"^raising ... failed, .*\n    MemoryError: no memory left$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert run(steps) == (0, found), "every step is in the file"


@pytest.mark.slow
def test_the_same_command_runs_the_steps_for_which_no_time_was_left(steps, capsys):
    code, first = run(steps, "--steps", "hanging", "well", "--limit", "1.5")
    assert code == 1 and list(first) == ["hanging"]
    assert "well: not run, 1.0 s are not left" in capsys.readouterr().out
    code, found = run(steps)
    assert (
        list(found) == ["hanging", "well", "raising", "crashing"]
        and found["hanging"] == first["hanging"]
    )
    (steps.parent / "raising.py").write_text(SETUP + WRITE)
    code, found = run(steps, "--steps", "raising")
    assert code == 0 and found["raising"]["status"] == "ok"


def test_a_file_of_something_else_is_left_alone(steps, capsys):
    content = '{"device": "cuda", "small": false, "steps": {}}'
    steps.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        run(steps)
    assert "give another --out" in capsys.readouterr().err and steps.read_text() == content


@pytest.mark.slow
def test_a_device_that_can_not_be_used_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cuda:99", "--out", str(tmp_path / "gpu.json")])
    assert (
        "--device cuda:99 can't be used" in capsys.readouterr().err
        and not (tmp_path / "gpu.json").exists()
    )


@pytest.mark.slow
def test_wheels_are_installed_for_the_steps(steps, tmp_path):
    pytest.importorskip("pip")  # environments made by uv have none
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(SystemExit, match="2"):
        run(steps, "--wheels", str(wheels))
    with zipfile.ZipFile(wheels / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "value = 1\n")
        wheel.writestr(
            "brought-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n"
        )
        wheel.writestr(
            "brought-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("brought-1.dist-info/RECORD", "")
    (tmp_path / "well.py").write_text(SETUP + "import brought\n" + WRITE)
    assert run(steps, "--steps", "well")[1]["well"]["status"] == "failed"
    assert run(steps, "--steps", "well", "--wheels", str(wheels))[1]["well"]["status"] == "ok"


@pytest.mark.slow
def test_a_step_ends_with_all_its_processes(tmp_path, hangs):
    """Its child has a pipe open for as long as it runs."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; kept = open({str(pipe)!r}, 'w'); open({str(hangs)!r}, 'w').close(); time.sleep(600)"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    assert gpu.run_limited(["-c", script], LIMIT, tmp_path)["status"] == "timed out"
    assert select.select([reading], [], [], 60)[0] and os.read(reading, 1) == b"", (
        "the child runs on"
    )
    os.close(reading)


TESTS = """
import os, pytest

def test_first(record_property):
    record_property("error", 1e-7)

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_fail():
    assert 1 == 2

def test_crash():
    os.kill(os.getpid(), 11)
"""


@pytest.mark.slow
def test_outcomes_of_tests_are_kept_when_one_crashes(tmp_path):
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_planted.py").write_text(TESTS)
    code = "import pathlib; from benchmarks import gpu; gpu.tests('cpu', False, pathlib.Path('out.json'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == -11 and result["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    first, skipped, failed = result["tests"].values()
    assert first == {"outcome": "passed", "error": 1e-7} and skipped == {"outcome": "skipped"}
    assert failed["outcome"] == "failed" and "assert 1 == 2" in failed["message"]


def test_waits_are_counted_by_line(monkeypatch):
    model, inputs = build("gpt_neox")
    norm = torch.linalg.vector_norm

    def synchronizing(*arguments, **options):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return norm(*arguments, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", synchronizing)
    lines = gpu.waits(lambda: tracker.measure(model, inputs, k=2, measures="coupling"), "cpu")
    assert lines.total() > len(lines) > 0
    assert all(line.startswith("tracker/") for line in lines)


def test_the_document_has_the_table_of_the_results():
    file = ROOT / gpu.RESULT
    steps = json.loads(file.read_text())["steps"] if file.exists() else {}
    assert gpu.table(steps) in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.slow
def test_a_step_of_each_kind_runs_in_small_on_the_cpu_and_every_step_has_a_row(
    tmp_path, monkeypatch
):
    def forked(arguments, limit, directory):
        kind, module, *rest = arguments
        if kind == "-c":
            module, rest = (
                "tests.support.statements",
                [f"import sys; sys.argv[1:] = {rest}\n{module}"],
            )
        ran = processes.run(module, *rest, timeout=limit)
        return {
            "status": "failed" if ran.returncode else "ok",
            "seconds": 0.0,
            "output": ran.stdout + ran.stderr,
        }

    monkeypatch.setattr(gpu, "run_limited", forked)
    chosen = ["machine", "12b-tf32", "tests", "callback", "410m", "synchronizations"]
    commands = {gpu.STEPS[name][1].split(" --")[0] for name in gpu.STEPS}
    assert {gpu.STEPS[name][1].split(" --")[0] for name in chosen} == commands
    code, steps = run(tmp_path / "gpu.json", "--limit", "1500", "--steps", *chosen)
    assert (
        code == 0
        and list(steps) == chosen
        and {name for _, _, name, _ in gpu.ROWS} == set(gpu.STEPS)
    )
    table = gpu.table(steps).splitlines()[2:]
    assert all(
        (gpu.NOT_MEASURED in line) == (name not in chosen)
        for line, (_, _, name, _) in zip(table, gpu.ROWS, strict=True)
    )
