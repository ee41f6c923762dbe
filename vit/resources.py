"""The machines, CPUs and GPUs that a command asks for, compared with those that exist.

Ray waits without end, and prints nothing, for resources that no machine has, and for a cluster that does not answer.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from math import floor
from typing import Any

from tracker.measures.cost import size

SECONDS = 5.0  # to connect to a cluster
CONTEXT = 600_000_000  # bytes of a GPU that a process takes before it allocates any
MOST_ON_A_GPU = 8


def check_accelerator(name: str) -> None:
    """Check that there is a GPU if one is asked for by `--accelerator`.

    Raises:
        ValueError: if PyTorch finds none.
    """
    if name in ("gpu", "cuda") and not _gpus():
        raise ValueError(f"--accelerator {name}; PyTorch finds no GPU on this machine: leave it out, or give cpu")


def _gpus() -> int:
    import torch

    return torch.accelerator.device_count()


def check_ray(address: str | None, cpus: float, gpus: float | None) -> None:
    """Check, before Ray is started, what can be known without it.

    Args:
        address: as of `ray.init`; None starts Ray on this machine, if RAY_ADDRESS does not name a cluster.
        cpus: CPUs of a cell.
        gpus: GPUs of a cell.

    Raises:
        ValueError: if this machine is to train the cells and lacks the resources, or if the cluster does not answer.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "local"):
        check_machines([{"CPU": os.cpu_count() or 1, "GPU": _gpus() if gpus else 0}], cpus, gpus)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # auto
        return
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"--address {address}; no Ray cluster answers there ({error}): give the address that `ray start --head` prints, "
            "or leave it out to train on this machine"
        ) from error


def check_machines(machines: Iterable[Mapping[str, Any]], cpus: float, gpus: float | None) -> None:
    """Check that some machine has the CPUs and GPUs of one cell.

    Args:
        machines: the resources of each, "CPU" and "GPU".

    Raises:
        ValueError: if none has.
    """
    found = [(machine.get("CPU", 0), machine.get("GPU", 0)) for machine in machines]
    if any(cpus <= has_cpus and (gpus or 0) <= has_gpus for has_cpus, has_gpus in found):
        return
    wanted = f"--cpus_per_cell {cpus:g}" + (f" --gpus_per_cell {gpus:g}" if gpus else "")
    largest = "; ".join(f"{has_cpus:g} CPUs and {has_gpus:g} GPUs" for has_cpus, has_gpus in sorted(set(found)))
    raise ValueError(f"{wanted}; no machine has that, so no cell would start: give at most what one has ({largest})")


def recommended_share(memory: int, of_memory: int, on_a_gpu: float = 1.0) -> str:
    """Return in words how many cells fit on a GPU; "" without one, or if as many share it already.

    Args:
        memory: bytes that a cell takes.
        of_memory: bytes of the GPU.
        on_a_gpu: number of cells that share one.
    """
    cells = min(int(0.9 * of_memory / (memory + CONTEXT)), MOST_ON_A_GPU)
    if cells <= max(on_a_gpu, 1):
        return ""
    return (
        f"a cell takes {size(memory + CONTEXT)} of the GPU's {size(of_memory)}: {cells} fit beside each other, and a small model "
        f"alone leaves most of a GPU idle: --gpus_per_cell {floor(1000 / cells) / 1000:g}"
    )
