"""The GPUs of workers on Ray, by a Ray that is told of GPUs that do not exist."""

import os
import time
from functools import partial
from pathlib import Path

import pytest

from tracker.walk.cluster import _anywhere, walkers
from tracker.walk.command import Walk

ray = pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus, driver, device, expected",
    [
        (2, "cuda:0", "cuda:0", {"1": "cuda"}),
        (2, "cpu", None, {"0": None, "1": None}),
        (1, "cuda:0", None, {}),
    ],
)
def test_no_worker_gets_the_gpu_of_the_driver(gpus, driver, device, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tracker.walk.cluster.PATIENCE", 300)
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=gpus, num_cpus=2))
    count = max(len(expected), 1)

    def report(walk: Walk) -> int:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        (Path(walk.out or "") / f"worker-{gpu}").write_text(str(walk.device))
        while len(list(Path(walk.out or "").iterdir())) < count:
            time.sleep(0.05)
        return 0

    tmp_path.joinpath("out").mkdir()
    walk = Walk(model="nano", workers=count, device=device, out=tmp_path / "out")
    with walkers(report, walk, driver):
        deadline = time.monotonic() + (300 if expected else 5)
        while len(list((tmp_path / "out").iterdir())) < count and time.monotonic() < deadline:
            time.sleep(0.05)
    found = {file.name.removeprefix("worker-"): file.read_text() for file in (tmp_path / "out").iterdir()}
    assert found == {gpu: str(name) for gpu, name in expected.items()}


def test_names_are_not_taken_for_directories_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "wikitext", "out"):
        (tmp_path / name).mkdir()
    walk = _anywhere(Walk(model="nano", prompts="wikitext", out=Path("out")))
    assert (walk.model, walk.prompts, walk.out) == ("nano", "wikitext", tmp_path / "out")
