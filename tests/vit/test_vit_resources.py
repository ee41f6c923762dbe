"""Tests of what is refused because no machine has it."""

import os
import socket

import pytest

from tests.vit.test_vit_grid import arguments
from tests.vit.test_vit_train import main as train
from vit import grid
from vit.resources import check_accelerator, check_machines, check_ray, recommended_share


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)


def test_a_cell_must_fit_on_one_machine():
    machines = [{"CPU": 8.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 64.0}]
    for cpus, gpus in ((8, 1), (64, 0), (64, None), (1, 0.25)):
        check_machines(machines, cpus, gpus)
    for cpus, gpus, message in (
        (65, None, r"--cpus_per_cell 65; no machine has that.*\(8 CPUs and 1 GPUs; 64 CPUs and 0 GPUs\)"),
        (9, 0.5, "--cpus_per_cell 9 --gpus_per_cell 0.5; no machine has that"),
        (1, 2, "--gpus_per_cell 2; no machine has that"),
    ):
        with pytest.raises(ValueError, match=message):
            check_machines(machines, cpus, gpus)


def test_this_machine_is_checked_before_ray_starts():
    check_ray(None, os.cpu_count() or 1, None)
    for cpus, gpus in ((1000, None), (1, 1)):
        for address in (None, "local"):
            with pytest.raises(ValueError, match="no machine has that"):
                check_ray(address, cpus, gpus)


def test_a_cluster_must_answer(monkeypatch):
    check_ray("auto", 1000, None)  # Ray knows
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_ray(address, 1000, 8)
        check_ray(f"ray://{address}", 1000, 8)
    with pytest.raises(ValueError, match=f"--address {address}; no Ray cluster answers there"):
        check_ray(address, 1, None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match="no Ray cluster answers there"):
        check_ray(None, 1, None)


def test_no_gpu():
    for name in ("auto", "cpu"):
        check_accelerator(name)
    for name in ("gpu", "cuda"):
        with pytest.raises(ValueError, match=f"--accelerator {name}; PyTorch finds no GPU"):
            check_accelerator(name)


@pytest.mark.parametrize(
    "engine, more, message",
    [
        ("ray", ["--cpus_per_cell", "1000"], "error: --cpus_per_cell 1000; no machine has that"),
        ("ray", ["--accelerator", "auto", "--gpus_per_cell", "1"], "--gpus_per_cell 1; no machine has that"),
        ("ray", ["--address", "127.0.0.1:9"], "error: --address 127.0.0.1:9; no Ray cluster answers there"),
        ("processes", ["--accelerator", "gpu"], "error: --accelerator gpu; PyTorch finds no GPU"),
    ],
)
@pytest.mark.parametrize("dry_run", ["false", "true"])
def test_a_grid_says_so_in_one_line_before_it_loads_data(engine, more, message, dry_run, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("vit.data.load", lambda recipe: pytest.fail("loaded"))
    assert grid.main([*arguments(tmp_path, engine), *more, "--dry_run", dry_run]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (tmp_path / "grid").exists()


def test_a_training_says_so_in_one_line(tmp_path, capsys):
    assert train(["--data", "digits", "--accelerator", "gpu", "--out", str(tmp_path / "cell")]) == 2
    assert "error: --accelerator gpu; PyTorch finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "cell").exists()


def test_as_many_cells_as_fit_are_recommended():
    assert recommended_share(0, 0) == ""
    assert "--gpus_per_cell 0.125" in recommended_share(10**9, 80 * 10**9)
    assert "3 fit beside each other" in recommended_share(20 * 10**9, 80 * 10**9)
    assert "--gpus_per_cell 0.333" in recommended_share(20 * 10**9, 80 * 10**9)
    assert "--gpus_per_cell 0.166" in recommended_share(11 * 10**9, 80 * 10**9)  # 6 times 0.167 is more than a GPU
    assert recommended_share(50 * 10**9, 80 * 10**9) == "" == recommended_share(10**9, 80 * 10**9, on_a_gpu=8)
