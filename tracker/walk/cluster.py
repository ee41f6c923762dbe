"""Run additional walks on a Ray cluster. They coordinate through the store alone: each measures steps that none has claimed.

Ray restarts a worker that dies; the claims of the dead worker are free. The directories that the walk reads and
writes have to be on a file system that all machines share.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracker.walk.command import Walk
from tracker.walk.prompts import SETS

RETRIES = 3  # of a worker that died
PATIENCE = 30.0  # seconds to wait for the GPUs of this machine that other work on the cluster holds


@contextmanager
def walkers(run: Callable[[Walk], int], walk: Walk, device: str) -> Iterator[None]:
    """Run `walk.workers` additional walks during the context, each with a GPU of its own if the cluster has GPUs.

    A worker for which no GPU is left waits for one; this process then measures alone.

    Args:
        run: the function that a worker calls with the walk.
        device: the device on which this process measures; a GPU is withheld from the workers.

    Raises:
        ValueError: if Ray is not installed, or the cluster can't be reached.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("--workers needs Ray: pip install 'block-coupling-tracker[ray]'") from error
    try:
        ray.init(address=walk.address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise ValueError(f"--address {walk.address}: no Ray cluster can be reached there ({error})") from error
    try:
        on_gpus = walk.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        reserved = _reserve(ray, device) if on_gpus and device.startswith("cuda") else None
        task: Any = ray.remote(max_retries=RETRIES, num_gpus=int(on_gpus))(run)
        # Ray shows each worker its own GPU alone, as the first one.
        anywhere = "cuda" if on_gpus and walk.device is not None else walk.device
        of_worker = _anywhere(replace(walk, workers=0, address=None, wandb="off", device=anywhere))
        started = [task.remote(of_worker) for _ in range(walk.workers)]
        yield
        # Kept till here: Ray cancels nothing that is referred to; what they have not done was done here.
        del started, reserved
    finally:
        ray.shutdown()


def _reserve(ray: Any, device: str) -> Any:
    """Take this process's GPU from the cluster; return what holds it, or None if it is not the cluster's or not free.

    Ray chooses the GPU that a task gets, so all free GPUs of this machine are taken and the others given back.
    """
    node = ray.get_runtime_context().get_node_id()
    count = next(int(one["Resources"].get("GPU", 0)) for one in ray.nodes() if one["NodeID"] == node)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    holder = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=here)(_Holder)
    holders = [holder.remote() for _ in range(count)]
    names = {one.names.remote(): one for one in holders}
    granted, _ = ray.wait(list(names), num_returns=count, timeout=PATIENCE)
    own = _name_of(device)
    kept = next((names[reply] for reply in granted if own in ray.get(reply)), None)
    for one in holders:
        if one is not kept:
            ray.kill(one)
    return kept


class _Holder:
    """A reservation of a GPU."""

    def names(self) -> list[str]:
        """Return the GPU's name in CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


def _name_of(device: str) -> str:
    index = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def _anywhere(walk: Walk) -> Walk:
    """Return the walk with absolute paths, for a process with another current directory."""
    named = {name: getattr(walk, name) for name in ("model", "prompts", "tokenizer", "scores", "inputs", "out")}
    named = {name: value for name, value in named.items() if value not in ("nano", "builtin", *SETS)}
    absolute = {name: Path(value).resolve() for name, value in named.items() if value and Path(value).exists()}
    return replace(walk, **{name: type(named[name])(path) for name, path in absolute.items()})
