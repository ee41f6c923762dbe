"""The checkpoints of the tiny suite (the fixture `suite`), and copies of them."""

import shutil
from pathlib import Path

STEPS = [0, 1, 2, 4, 8]


def snapshots(cache: Path) -> Path:
    return next(cache.glob("models--*")) / "snapshots"


def commit(cache: Path, step: int) -> str:
    return (snapshots(cache).parent / "refs" / f"step{step}").read_text()


def checkpoint_of(cache: Path, step: int) -> Path:
    return snapshots(cache) / commit(cache, step)


def copied(cache: Path, step: int, directory: Path) -> Path:
    """Copy the checkpoint of a step."""
    return shutil.copytree(checkpoint_of(cache, step), directory)
