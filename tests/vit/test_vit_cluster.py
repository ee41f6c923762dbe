"""Processes of Ray, which is told of machines and GPUs that do not exist: their number, their GPUs, and which are tried again."""

import os
import signal
import socket
from functools import partial
from types import SimpleNamespace

import pytest

from vit import grid
from vit.recipe import Recipe

ray = pytest.importorskip("ray")
from vit import cluster  # noqa: E402

TWO_GPUS = {"CPU": 2.0, "GPU": 2.0}
DIGITS = {"data": "digits", "data_dir": "data", "batch_size": 32, "wandb": "off"}


@pytest.mark.slow
def test_what_fails_is_tried_again_and_the_others_wait_for_their_turn(tmp_path, monkeypatch):
    at_once, wait = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda running: at_once.append(len(running)) or wait(running))
    monkeypatch.setattr(ray, "init", partial(ray.init, num_cpus=4))

    def work(item: str):
        tries = tmp_path / item
        with open(tries, "a") as file:
            file.write("x")
        if item.endswith("always") or tries.stat().st_size == 1:
            if item.startswith("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if item.startswith("raises"):
                raise LookupError("no such thing")

    expected = {"works": 1, "raises once": 2, "dies once": 2, "raises always": 2, "dies always": 2}
    before = signal.signal(signal.SIGTERM, ours := lambda *_: None)
    with cluster.connected(None, cpus=1, gpus=None) as gpus:
        assert signal.signal(signal.SIGTERM, before) is ours  # not Ray's
        failed = dict(cluster.failures(work, [*expected], jobs=2, cpus=1, gpus=gpus, retries=1))
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == expected
    assert max(at_once) == 2 and not ray.is_initialized()
    assert sorted(failed) == ["dies always", "raises always"]
    assert failed["raises always"].endswith("LookupError: no such thing")
    assert failed["dies always"].endswith("\nits process died, often for lack of memory")


@pytest.fixture
def pretended(monkeypatch):
    """Ray without processes, interrupted when it is waited for; what was asked for, what was started."""
    found = SimpleNamespace(machines=[TWO_GPUS], requests=[], started=[], ended=[])

    def interrupt(running):
        raise KeyboardInterrupt

    def remote(**request):
        found.requests.append(request)
        return lambda function: SimpleNamespace(
            remote=lambda item: found.started.append(item) or len(found.started)
        )

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = lambda: [{"Alive": True, "Resources": machine} for machine in found.machines]  # noqa: E731
    pretended = {"init": lambda **_: None, "nodes": nodes, "remote": remote, "wait": interrupt}
    for name, function in pretended.items():
        monkeypatch.setattr(ray, name, function)
    monkeypatch.setattr(ray, "shutdown", lambda: found.ended.append(True))
    return found


CPUS = {"CPU": 64.0}
ONE_GPU = {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}


@pytest.mark.parametrize(
    "machines, accelerator, options, gpus",
    [
        ([TWO_GPUS], "auto", {}, 1.0),
        ([CPUS], "auto", {}, 0.0),
        ([TWO_GPUS], "cpu", {}, 0.0),
        ([TWO_GPUS], "auto", {"gpus_per_cell": 0.25}, 0.25),
        ([ONE_GPU, CPUS], "auto", {"cpus_per_cell": 8}, 1.0),
        ([ONE_GPU, CPUS], "auto", {"cpus_per_cell": 64, "gpus_per_cell": 0}, 0),
        ([ONE_GPU, CPUS], "auto", {"cpus_per_cell": 65, "gpus_per_cell": 0}, None),
        ([ONE_GPU, CPUS], "auto", {"cpus_per_cell": 9, "gpus_per_cell": 0.5}, None),
        ([ONE_GPU, CPUS], "auto", {"gpus_per_cell": 2}, None),
    ],
)
def test_rays_machines_decide_on_the_gpus_of_a_cell_which_must_fit_on_one(
    machines, accelerator, options, gpus, pretended, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pretended.machines = machines
    if gpus is None:
        monkeypatch.setattr("vit.data.load", lambda recipe: pytest.fail("loaded"))
    command = grid.GridCommand(out="out", jobs=3, **options)
    status = grid.run(command, Recipe(accelerator=accelerator, **DIGITS))
    assert pretended.ended and status == (2 if gpus is None else 130)
    if gpus is None:
        cpus = options.get("cpus_per_cell", 1)
        error = capsys.readouterr().err
        assert f"--cpus_per_cell {cpus} --gpus_per_cell {options['gpus_per_cell']}; no " in error
        assert "no machine has that" in error and "what one has, 8 and 1 or 64 and 0\n" in error
        return
    request = {"num_cpus": options.get("cpus_per_cell", 1.0), "num_gpus": gpus, "max_retries": 0}
    assert pretended.requests == [request] and len(pretended.started) == 3
    directories = {(cell.directory.parent, cell.data_dir) for cell in pretended.started}
    assert directories == {(tmp_path / "out", tmp_path / "data")}


def test_a_cluster_must_answer(pretended, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with cluster.connected(f"ray://{address}", 1, None):
            pass
    for given in (address, None):
        with (
            pytest.raises(ValueError, match=f"--address {given}; no Ray cluster answers"),
            cluster.connected(given, 1, None),
        ):
            pytest.fail("connected")
        monkeypatch.setenv("RAY_ADDRESS", address)
