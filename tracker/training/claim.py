"""The store of a training run, which one training at a time writes and which a resumed run continues.

The process of rank 0 holds a lock until the training has ended.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracker.common.errors import UsageError
from tracker.common.files import Lock
from tracker.measures.settings import Settings
from tracker.store import Store
from tracker.training.probe import inputs_digest

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


def open_for_run(
    store: Store | None, settings: Settings, shared: Mapping[str, Any], step: int, resumed: bool
) -> Settings:
    """Claim a store, if there is one; return the settings that continue it.

    Args:
        shared: the settings that all its units share.
        step, resumed: as in `claim`.

    Raises:
        UsageError: if the store can't be used.
    """
    if store is None:
        return settings
    try:
        hold(store)
    except OSError as error:
        raise UsageError(f"save_dir can't be used: {error}") from error
    if refusal := claim(store, shared, step, resumed):
        release(store)
        raise UsageError(refusal)
    return store.continued(settings)


def check_inputs(store: Store | None, probe: Any) -> None:
    """Check that a probe is what the units of a store were measured on.

    Raises:
        UsageError: if it is not.
    """
    if store is None:
        return
    measured = store.shared("inputs_sha256")
    if measured not in (None, inputs_digest(probe)):
        raise UsageError(
            f"{store.path} measured other inputs (SHA-256 {measured[:8]}); give the same probe=, or choose another save_dir"
        )


def claim(store: Store, settings: Mapping[str, Any], step: int, resumed: bool) -> str | None:
    """Prepare a store for a run that starts at `step`: check its settings, set later units aside, forget later skips.

    Returns:
        The reason why the store can't be used, or None.
    """
    steps = store.steps()
    if steps and not resumed:
        return (
            f"{store.path} holds the units of another run (up to step {steps[-1]}); choose another save_dir, or resume that run "
            "from its checkpoint: trainer.fit(..., ckpt_path=...), or in a loop of your own its weights and its step"
        )
    try:
        store.check_settings(settings)
        store.set_aside([later for later in steps if later > step])
        skipped = store.skipped()
        kept = {before: reason for before, reason in skipped.items() if resumed and before <= step}
        if kept != skipped:
            store.write_skipped(kept)
    except (ValueError, OSError) as error:
        return f"save_dir can't be used: {error}"
    return None
