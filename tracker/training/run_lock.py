"""One training at a time writes a store: the process of rank 0 holds a lock until the training has ended."""

import os
from pathlib import Path

from checkpoints.files import Lock
from tracker.errors import UsageError
from tracker.results import Store

_held: dict[Path, Lock] = {}  # by store, in this process


def hold(store: Store) -> None:
    """Lock a store for a training. A training of this process that ended in an error does not keep it from the next one.

    Raises:
        UsageError: if a training of another process has it.
        OSError: if the directory can't be written to.
    """
    path = store.path.resolve()
    if path in _held:
        return
    path.mkdir(parents=True, exist_ok=True)
    lock = Lock.take(path / ".training")
    if lock is None:
        raise UsageError(
            f"{store.path} is written by another training ({(path / '.training').read_text()}); choose another save_dir, or "
            "wait until that one has ended and resume it"
        )
    lock.sign()
    _held[path] = lock


def release(store: Store | None) -> None:
    """Unlock a store after a training."""
    if store is not None and (lock := _held.pop(store.path.resolve(), None)):
        lock.release(remove=True)


def _forget() -> None:
    """Leave the locks to the parent process: workers that load data may outlive it."""
    for lock in _held.values():
        os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
