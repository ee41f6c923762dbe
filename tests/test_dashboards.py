"""What reaches Weights & Biases, read back from real offline files and by a server that stands in for its API's address."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import tracker
from tests.models import neox, tokens
from tracker import dashboards
from tracker.results import Store
from tracker.statistics import HEADLINE, scalars
from tracker.wandb_log import AXIS, SHOWN, WandbLog

ROOT = Path(__file__).parent.parent
STEPS = (0, 2, 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """Three steps of a random model, with every measure."""
    store = Store(tmp_path_factory.mktemp("results") / "toy run")
    store.settle({"model": "toy", "k": [2, 4]})
    for step in STEPS:
        torch.manual_seed(step)
        unit = tracker.measure(neox(), tokens(3), k=[2, 4], measures="all")
        store.write(step, unit.assign_coords(step=step, suspect="repeats step 0" if step == 2 else ""))
    return store


def records(file: Path) -> list[dict]:
    """Everything in an offline run's file."""
    inspect = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", file]
    return [json.loads(line) for line in subprocess.run(inspect, capture_output=True, text=True).stdout.splitlines()]


def of(kind: str, among: list[dict]) -> list[dict]:
    return [record[kind] for record in among if record["type"] == kind]


def offline_run(directory: Path) -> Path:
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    return file


def command(module: str, *arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess:
    settings = {**os.environ, "HOME": str(home), "NETRC": str(home / "netrc"), "OMP_NUM_THREADS": "1", **environment}
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        if name not in environment:
            settings.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=settings, text=True, capture_output=True, timeout=300
    )


@pytest.fixture(scope="module")
def replayed(store, tmp_path_factory) -> list[dict]:
    """The records of a replay."""
    home = tmp_path_factory.mktemp("home")
    done = command("tracker.replay", str(store.path), "--project", "p", "--wandb", "offline", home=home)
    assert done.returncode == 0, done.stderr
    assert "W&B offline" in done.stdout and "wandb sync" in done.stdout
    return records(offline_run(store.path))


class TestReplay:
    def test_every_step_once_with_the_numbers_of_the_store(self, replayed, store):
        rows = [row["item"] for row in of("history", replayed)]
        assert [row[AXIS] for row in rows] == list(STEPS)
        for row in rows:
            points = scalars(store.read(row[AXIS]))
            assert len(points) > 100
            for name, value in points.items():
                assert row[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name
            assert row["coupling/heatmap/k2._type"] == "image-file"
        assert [row["checkpoint/suspect"] for row in rows] == [0, 1, 0]

    def test_the_run_says_what_it_is(self, replayed, store):
        (run,) = of("run", replayed)
        assert run["project"] == "p" and run["display_name"] == "toy run"
        config = {entry["key"]: entry["value_json"] for entry in run["config"]["update"]} if isinstance(
            run["config"]["update"], list
        ) else run["config"]["update"]
        assert json.dumps(config).count("device") == 1 and "[2, 4]" in json.dumps(config)
