"""Call functions in processes of Ray: on this machine or a cluster, with GPUs or fractions of one.

The processes of a grid coordinate through files alone, which must be on a file system that all machines share.
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

from tracker.common.errors import UsageError

SECONDS = 5.0  # to connect to a cluster


@contextmanager
def connected(address: str | None, cpus: float, gpus: float | None) -> Iterator[float]:
    """Start Ray, or connect to a cluster, and end all processes with the context; yield the GPUs of a process.

    Args:
        address: as of `ray.init`; None starts Ray on this machine, if RAY_ADDRESS does not name a cluster.
        cpus: CPUs of a process.
        gpus: GPUs of a process; None is 1 if any of Ray's machines has a GPU, which this one need not have.

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
            largest = " or ".join(f"{cpu:g} and {gpu:g}" for cpu, gpu in sizes)
            raise UsageError(
                f"--cpus_per_cell {cpus:g} --gpus_per_cell {gpus:g}; no machine has that, so nothing would start: give at "
                f"most what one has, {largest}"
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
