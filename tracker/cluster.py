"""Call functions in processes of Ray: on this machine or a cluster, with GPUs or fractions of one.

The processes of a walk or a grid coordinate through files alone, which must be on a file system that all machines share.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

from tracker.common.errors import UsageError

SECONDS = 5.0  # to connect to a cluster
PATIENCE = 30.0  # seconds to wait for the GPUs of this machine that other work on the cluster holds
RETRIES = 3  # of a worker beside this process


@contextmanager
def connected(address: str | None, cpus: float = 1.0, gpus: float | None = None) -> Iterator[float]:
    """Start Ray, or connect to a cluster, and end all processes with the context; yield the GPUs of a process.

    Args:
        address: as of `ray.init`; None starts Ray on this machine, if RAY_ADDRESS does not name a cluster.
        cpus: CPUs of a process.
        gpus: GPUs of a process. Default: 1 if any of Ray's machines has a GPU, which this one need not have.

    Raises:
        UsageError: if there is no cluster, or none of its machines has what a process needs.
    """
    host, _, port = (
        (address or os.environ.get("RAY_ADDRESS") or "").removeprefix("ray://").rpartition(":")
    )
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # Ray waits without end, and prints nothing, for a cluster that does not answer
        if port.isdecimal():
            socket.create_connection((host, int(port)), SECONDS).close()
        ray.init(
            address=address,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except OSError as error:
        raise UsageError(
            f"--address {address}; no Ray cluster answers ({error}): give the address that `ray start --head` prints, or leave "
            "it out to use this machine alone"
        ) from error
    try:
        if callable(handler):  # Ray has replaced it by one that ends this process
            signal.signal(signal.SIGTERM, handler)
        machines = (node["Resources"] for node in ray.nodes() if node["Alive"])
        sizes = sorted({(machine.get("CPU", 0.0), machine.get("GPU", 0.0)) for machine in machines})
        if gpus is None:
            gpus = float(any(gpu for _, gpu in sizes))
        # Ray waits without end for such a one
        if not any(cpus <= cpu and gpus <= gpu for cpu, gpu in sizes):
            largest = "; ".join(f"{cpu:g} CPUs and {gpu:g} GPUs" for cpu, gpu in sizes)
            raise UsageError(
                f"{cpus:g} CPUs and {gpus:g} GPUs (of a grid: --cpus_per_cell, --gpus_per_cell); no machine has that, so nothing "
                f"would start: give at most what one has ({largest})"
            )
        yield gpus
    finally:
        ray.shutdown()


def failures(
    function: Callable[[Any], object],
    items: Sequence[Any],
    jobs: int | None,
    cpus: float,
    gpus: float,
    retries: int,
) -> Iterator[tuple[Any, str]]:
    """Call a function with each item, at most `jobs` at a time; yield those that failed at every try, with the last error."""
    # Ray's own retries have no limit if it ends a process for lack of memory.
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(function)
    waiting, running = [(item, retries) for item in items], {}
    while waiting or running:
        while waiting and len(running) < (jobs or len(items)):
            item, left = waiting.pop(0)
            running[task.remote(item)] = item, left
        (ended,), _ = ray.wait([*running])
        item, left = running.pop(ended)
        try:
            ray.get(ended)
        except RayError as error:
            died = (
                ""
                if isinstance(error, RayTaskError)
                else "\nits process died, often for lack of memory"
            )
            if left:
                waiting.insert(0, (item, left - 1))
            else:
                yield item, f"{error}".strip() + died


@contextmanager
def workers(
    function: Callable[[Any], object], item: Any, count: int, gpus: float, device: str
) -> Iterator[None]:
    """Call a function with an item in `count` processes during the context; one that dies is started again.

    A worker for which no GPU is left waits for one. That of `device`, which this process uses, is withheld from all workers.
    """
    reserved = _reserve(device) if gpus and device.startswith("cuda") else None
    task = ray.remote(num_gpus=gpus, max_retries=RETRIES)(function)
    # Ray ends a holder that nothing refers to
    kept = [reserved, *(task.remote(item) for _ in range(count))]
    yield
    del kept


def _reserve(device: str) -> Any:
    """Take a GPU of this machine from the cluster; return what holds it, or None if it is not the cluster's or not free."""
    # Ray chooses the GPU that a process gets, so all free GPUs of this machine are taken; those not returned are free again.
    index, visible = int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[index] if visible else str(index)
    node = ray.get_runtime_context().get_node_id()
    count = next(
        int(one["Resources"].get("GPU", 0)) for one in ray.nodes() if one["NodeID"] == node
    )
    here: Any = NodeAffinitySchedulingStrategy(node, soft=False)
    holder = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=here)(_Holder)
    names = {one.names.remote(): one for one in [holder.remote() for _ in range(count)]}
    granted, _ = ray.wait([*names], num_returns=count, timeout=PATIENCE)
    return next((names[reply] for reply in granted if own in ray.get(reply)), None)


class _Holder:  # of a GPU
    def names(self) -> list[str]:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
