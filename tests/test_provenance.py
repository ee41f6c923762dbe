"""Tests of the versions in results, also in a checkout that is not installed."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from types import ModuleType

import pytest
import torch

import tracker
from tests.conftest import ROOT
from tracker.provenance import describe, package_version

# Runs the benchmark, which calls tracker.measure and records its environment, without the metadata of this distribution.
UNINSTALLED = """
import importlib.metadata, sys

search = importlib.metadata.MetadataPathFinder.find_distributions
importlib.metadata.MetadataPathFinder.find_distributions = lambda *arguments: (
    found for found in search(*arguments) if found.name != "block-coupling-tracker"
)
try:
    importlib.metadata.version("block-coupling-tracker")
except importlib.metadata.PackageNotFoundError:
    import tracker
    from benchmarks import coupling

    print(tracker.__file__)
    sys.exit(coupling.main(sys.argv[1:]))
sys.exit("the metadata of the distribution is still found")
"""


@pytest.mark.slow
def test_a_checkout_without_metadata_measures(tmp_path):
    for package in ("tracker", "checkpoints", "benchmarks"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "results"),
        )
    quick = "--shape 14m --tokens 4 --blocks 2 --k 2 --repeats 1".split()
    only = ["--published", "false", "--memory", "false", "--out", str(tmp_path / "result.json")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", UNINSTALLED, *quick, *only]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "tracker"))
    assert (
        json.loads((tmp_path / "result.json").read_text())["environment"]["block-coupling-tracker"]
        == tracker.__version__
    )


def test_code_and_distribution_state_one_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "tracker.version.__version__"
    }
    attributes = describe(torch.nn.Linear(1, 1), torch.device("cpu"))
    assert attributes["tracker_version"] == tracker.__version__
    assert attributes["torch_version"] == version("torch")


def test_a_package_without_metadata_states_its_own_version(monkeypatch):
    vendored = ModuleType("vendored")
    monkeypatch.setitem(sys.modules, "vendored", vendored)
    assert package_version("vendored") == "unknown" == package_version("absent")
    vendored.__dict__["__version__"] = "1.2"
    assert package_version("vendored") == "1.2"
