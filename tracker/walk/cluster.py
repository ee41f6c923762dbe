"""Run additional walks on a Ray cluster. They coordinate through the store alone: each measures steps that none has claimed.

Ray restarts a worker that dies; the claims of the dead worker are free. The directories that the walk reads and
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
    """Run `walk.workers` additional walks during the context, each with a GPU if the cluster has GPUs.

    Args:
        run: the function that a worker calls with the walk.

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
    """Return the walk with absolute paths, for a process with another current directory."""
    named = {name: getattr(walk, name) for name in ("model", "prompts", "tokenizer", "scores", "inputs", "out")}
    absolute = {name: Path(value).resolve() for name, value in named.items() if value and Path(value).exists()}
    return replace(walk, **{name: type(named[name])(path) for name, path in absolute.items()})
