"""More walkers on the machines of a Ray cluster. They need no other plan than the store: each takes what none has claimed.

A worker that dies is started again by Ray, and whatever it had claimed is free. The directories that the walk reads and
writes have to be on a file system that all machines share.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracker.walk.command import Walk

RETRIES = 3  # of a worker that died


@contextmanager
def walkers(run: Callable[[Walk], int], walk: Walk) -> Iterator[None]:
    """`walk.workers` further walks beside what happens inside, each with a GPU where the cluster has one for it.

    Args:
        run: what a worker does with a walk.

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
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        task: Any = ray.remote(max_retries=RETRIES, num_gpus=gpus)(run)
        alike = _anywhere(replace(walk, workers=0, address=None, loggers=""))
        started = [task.remote(alike) for _ in range(walk.workers)]
        yield
        del started  # kept till here: Ray cancels nothing that is referred to; what they have not done was done here
    finally:
        ray.shutdown()


def _anywhere(walk: Walk) -> Walk:
    """The same walk for a process with another current directory."""
    named = {name: getattr(walk, name) for name in ("model", "prompts", "tokenizer", "scores", "inputs", "out")}
    there = {name: Path(value).resolve() for name, value in named.items() if value and Path(value).exists()}
    return replace(walk, **{name: type(named[name])(path) for name, path in there.items()})
