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
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == expected and max(
        at_once
    ) == 2
    assert sorted(failed) == ["dies always", "raises always"] and not ray.is_initialized()
    assert failed["raises always"].endswith("LookupError: no such thing")
    assert failed["dies always"].endswith("\nits process died, often for lack of memory")


@pytest.fixture
def pretended(monkeypatch):
    """Ray without processes, interrupted when it is waited for; what was asked for, what was started."""
    found = SimpleNamespace(machines=[], requests=[], started=[], ended=[])

    def interrupt(running):
        raise KeyboardInterrupt

    def remote(**request):
        found.requests.append(request)
        return lambda function: SimpleNamespace(
            remote=lambda item: found.started.append(item) or len(found.started)
        )

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "Resources": machine} for machine in found.machines]
    )
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "wait", interrupt)
    monkeypatch.setattr(ray, "shutdown", lambda: found.ended.append(True))
    return found


@pytest.mark.parametrize(
    "options, accelerator, machine, expected",
    [
        ({}, "auto", TWO_GPUS, 1.0),
        ({}, "auto", {"CPU": 8.0}, 0.0),
        ({}, "cpu", TWO_GPUS, 0.0),
        ({"gpus_per_cell": 0.25}, "auto", TWO_GPUS, 0.25),
    ],
)
def test_rays_machines_decide_on_the_gpus_of_a_grid(
    options, accelerator, machine, expected, pretended, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pretended.machines = [machine]
    assert (
        grid.run(
            grid.GridCommand(out="out", jobs=3, **options),
            Recipe(accelerator=accelerator, **DIGITS),
        )
        == 130
    )
    assert (
        pretended.requests == [{"num_cpus": 1.0, "num_gpus": expected, "max_retries": 0}]
        and pretended.ended
    )
    directories = {(cell.directory.parent, cell.data_dir) for cell in pretended.started}
    assert directories == {(tmp_path / "out", tmp_path / "data")} and len(pretended.started) == 3


def test_a_cell_must_fit_on_one_machine(pretended, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vit.data.load", lambda recipe: pytest.fail("loaded"))
    pretended.machines = [{"CPU": 8.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 64.0}]
    for cpus, gpus in ((8, 1), (64, 0), (1, 0.25)):
        with cluster.connected(None, cpus, gpus):
            pass
    for cpus, gpus in ((65, 0), (9, 0.5), (1, 2)):
        command = grid.GridCommand(out=tmp_path / "out", cpus_per_cell=cpus, gpus_per_cell=gpus)
        assert grid.run(command, Recipe(**DIGITS)) == 2
        message = (
            f"{cpus} CPUs and {gpus} GPUs (--cpus_per_cell, --gpus_per_cell); no machine has that"
        )
        assert (
            message in (err := capsys.readouterr().err)
            and "(8 CPUs and 1 GPUs; 64 CPUs and 0 GPUs)" in err
        )
    assert len(pretended.ended) == 6 and not (tmp_path / "out").exists()


def test_a_cluster_must_answer(pretended, monkeypatch):
    pretended.machines = [TWO_GPUS]
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
