"""Processes of Ray, which is told of GPUs that do not exist: their number, their GPUs, and which are tried again."""

import os
import signal
import socket
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tracker import pythia
from tracker.walk.command import Walk, of_worker

ray = pytest.importorskip("ray")
from tracker import cluster  # noqa: E402


@pytest.fixture
def told(monkeypatch):
    """A function that tells Ray what this machine has."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    start = ray.init
    return lambda **machine: monkeypatch.setattr(ray, "init", partial(start, **machine))


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus, device, expected",
    [(2, "cuda:0", {"1"}), (2, "cpu", {"0", "1"}), (1, "cuda:0", set())],
)
def test_no_worker_gets_the_gpu_of_the_driver(gpus, device, expected, told, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 300)
    told(num_gpus=gpus, num_cpus=2)
    count = max(len(expected), 1)

    def report(out: Path) -> None:
        (out / os.environ.get("CUDA_VISIBLE_DEVICES", "none")).touch()
        while len(list(out.iterdir())) < count:
            time.sleep(0.05)

    with cluster.connected(None) as gpus, cluster.workers(report, tmp_path, count, gpus, device):
        deadline = time.monotonic() + (300 if expected else 5)
        while len(list(tmp_path.iterdir())) < count and time.monotonic() < deadline:
            time.sleep(0.05)
    assert {file.name for file in tmp_path.iterdir()} == expected


@pytest.mark.slow
def test_what_fails_is_tried_again_while_others_wait_for_their_turn(told, tmp_path, monkeypatch):
    told(num_cpus=4)
    at_once, wait = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda running: (at_once.append(len(running)), wait(running))[1])

    def work(item: str) -> None:
        with open(tmp_path / item, "a") as tries:
            tries.write("x")
        kind, _, often = item.partition(" ")
        if often == "always" or (tmp_path / item).stat().st_size == 1:
            if kind == "raises":
                raise LookupError("no such thing")
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)

    expected = {"works": 1, "raises once": 2, "dies once": 2, "raises always": 2, "dies always": 2}
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with cluster.connected(None) as gpus:
            assert signal.getsignal(signal.SIGTERM) is mine
            failed = dict(cluster.failures(work, [*expected], jobs=2, cpus=1, gpus=gpus, retries=1))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == expected
    assert max(at_once) == 2
    reasons = {item: error.splitlines()[-1] for item, error in failed.items()}
    assert reasons == {
        "raises always": "LookupError: no such thing",
        "dies always": "its process died, often for lack of memory",
    }
    assert not ray.is_initialized()


@pytest.fixture
def machines(monkeypatch):
    """Ray without processes; a function that gives it machines. Its attribute `ended` counts the ends of connections."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def give(*resources):
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": one} for one in resources])

    give.ended = []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: give.ended.append(True))
    return give


def test_a_process_must_fit_on_one_machine(machines):
    machines({"CPU": 8.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 64.0})
    for cpus, gpus in ((8, 1), (64, 0), (1, 0.25)):
        with cluster.connected(None, cpus, gpus) as granted:
            assert granted == gpus
    for cpus, gpus in ((65, 0), (9, 0.5), (1, 2)):
        message = rf"{cpus} CPUs and {gpus} GPUs .*; no machine has that.*\(8 CPUs and 1 GPUs; 64 CPUs and 0 GPUs\)"
        with pytest.raises(ValueError, match=message), cluster.connected(None, cpus, gpus):
            pytest.fail("connected")
    assert len(machines.ended) == 6


def test_a_cluster_must_answer(machines, monkeypatch):
    machines({"CPU": 1.0})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with cluster.connected(f"ray://{address}"):
            pass
    for given in (address, None):
        with pytest.raises(ValueError, match=f"--address {given}; no Ray cluster answers"), cluster.connected(given):
            pytest.fail("connected")
        monkeypatch.setenv("RAY_ADDRESS", address)


@pytest.mark.parametrize(
    "device, machine, expected",
    [
        ("cuda:1", {"CPU": 2.0, "GPU": 2.0}, ("cuda", 1.0)),  # Ray shows a worker its own GPU alone
        (None, {"CPU": 2.0, "GPU": 2.0}, (None, 1.0)),
        ("cpu", {"CPU": 2.0, "GPU": 2.0}, ("cpu", 0.0)),
        (None, {"CPU": 2.0}, (None, 0.0)),
        ("cuda:1", {"CPU": 2.0}, ("cuda:1", 0.0)),
    ],
)
def test_workers_of_a_walk_have_a_gpu_each_where_there_are_any(device, machine, expected, machines, monkeypatch):
    machines(machine)
    started = []
    monkeypatch.setattr(cluster, "workers", lambda *given: nullcontext(started.append(given)))
    plan = SimpleNamespace(
        output=SimpleNamespace(store=SimpleNamespace(path=Path("out"))), measurement=SimpleNamespace(device="cuda:1")
    )
    with pythia._workers(Walk(model="nano", device=device, workers=3), plan, missing=2):
        [(function, worker, count, gpus, withheld)] = started
    assert (function, count, withheld, worker.workers) == (pythia.run, 3, "cuda:1", 0)
    assert (worker.device, gpus) == expected


def test_names_are_not_taken_for_directories_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "wikitext", "out"):
        (tmp_path / name).mkdir()
    walk = of_worker(Walk(model="nano", prompts="wikitext", out=Path("out")), on_gpu=False)
    assert (walk.model, walk.prompts, walk.out) == ("nano", "wikitext", tmp_path / "out")
