"""Command lines: their help is quick, and a package that is missing or hidden is named."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support import processes

HEAVY = {  # packages that take a tenth of a second or more to import
    *"torch numpy xarray pandas scipy matplotlib plotly".split(),
    *("lightning", "timm", "torchvision", "transformers", "wandb", "ray"),
}
# What runs as `python -m`, without the examples.
COMMAND_LINES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for package in ("tracker", "checkpoints", "vit", "benchmarks")
    for file in (ROOT / package).rglob("*.py")
    if 'if __name__ == "__main__":' in file.read_text()
)


def test_every_command_is_among_those_whose_help_is_quick():
    assert {"tracker.pythia", "tracker.report", "benchmarks.callback"} < {*COMMAND_LINES}


@pytest.mark.parametrize("module", COMMAND_LINES)
def test_help_imports_nothing_heavy(module):
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0 and shown.stdout.startswith("usage: ")
    if module in ("tracker.pythia", "vit.train", "vit.grid"):
        assert "Exit status: 0" in " ".join(shown.stdout.split())
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "tracker.common" in imported and not imported & HEAVY


@pytest.mark.alone
@pytest.mark.parametrize("module", COMMAND_LINES)
def test_help_takes_less_than_half_a_second(module):
    def seconds():
        before = processes.children_seconds()
        assert processes.run(module, "--help", cold=True).returncode == 0
        return processes.children_seconds() - before

    assert any(0 < seconds() < 0.5 for _ in range(3))


def test_the_extras_of_missing_packages_exist():
    import tomllib

    from tracker.common.errors import EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS.values()) <= set(extras)
    for package, extra in EXTRAS.items():
        if extra != "all":
            named = {"sklearn": "scikit-learn"}.get(package, package).replace("_", "-")
            assert any(line.replace("_", "-").startswith(named) for line in extras[extra]), package


# A user's own checkpoints.py or vit.py, beside the script that is run.
SCRIPT = """
import torch, timm, tracker
from tracker import CouplingCallback, TransformersCallback, Watch, open_results, prompts, summary
model = timm.create_model("deit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=2)
print(*tracker.measure(model, torch.zeros(1, 3, 224, 224), k=2).sizes)
"""


@pytest.fixture
def hidden(tmp_path):
    for name in ("checkpoints.py", "vit.py"):
        (tmp_path / name).write_text("")
    return tmp_path


def python(directory, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )


def test_measurements_and_callbacks_do_not_need_the_packages_that_a_users_files_hide(hidden):
    ran = python(hidden, "-c", SCRIPT)
    assert "\nprompt token k layer" in f"\n{ran.stdout}", ran.stderr


def test_a_walk_names_the_users_file_that_hides_its_package(hidden):
    ran = python(hidden, "-m", "tracker.pythia", "--help")
    assert ran.returncode and f"Python finds {hidden}/checkpoints.py: rename that" in ran.stderr
