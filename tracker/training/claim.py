"""The store of a training run, which one training at a time writes and which a resumed run continues.

The process of rank 0 holds a lock until the training has ended. A training that begins in this process after one that ended in an
error, of the same store, is the same run once more, with a smaller batch, say: it sets aside the units of the earlier attempt.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracker.common.errors import UsageError, warn_caller
from tracker.common.files import Lock
from tracker.measures.settings import Settings
from tracker.store import Store
from tracker.training.probe import inputs_digest


@dataclass
class Held:
    """The lock of a training of this process on its store."""

    lock: Lock
    failed: bool = False  # whether the training has ended in an error


_held: dict[Path, Held] = {}  # by store


def held(store: Store | None) -> Held | None:
    """Return what a training of this process holds of a store."""
    return None if store is None else _held.get(store.path.resolve())


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
    # For the message of a training that finds it taken
    lock.sign()
    _held[path] = Held(lock)


def release(store: Store | None) -> None:
    """Unlock a store after a training."""
    if store is not None and (own := _held.pop(store.path.resolve(), None)):
        own.lock.release(remove=True)


def _forget() -> None:
    """Leave the locks to the parent process: workers that load data may outlive it."""
    for own in _held.values():
        os.close(own.lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def open_for_run(
    store: Store | None,
    settings: Settings,
    shared: Mapping[str, Any],
    step: int,
    resumed: bool,
    own: Held | None,
) -> Settings:
    """Claim a store, if there is one; return the settings that continue it.

    Args:
        shared: the settings that all its units share.
        step, resumed: as in `claim`.
        own: what the caller holds of a store, if its training before this one has not ended.

    Raises:
        UsageError: if the store can't be used.
    """
    if store is None:
        return settings
    earlier = held(store)
    again = earlier is not None and (earlier is own or earlier.failed)
    try:
        hold(store)
    except OSError as error:
        raise UsageError(f"save_dir can't be used: {error}") from error
    if refusal := claim(store, shared, step, resumed, again):
        # Only a lock that this call took is given back.
        if earlier is None:
            release(store)
        raise UsageError(refusal)
    if again and earlier is not None:
        earlier.failed = False
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


def claim(
    store: Store, settings: Mapping[str, Any], step: int, resumed: bool, again: bool = False
) -> str | None:
    """Prepare a store for a run that starts at `step`: check its settings, set later units aside, forget later skips.

    Args:
        resumed: whether the run continues from a state that is known, such as that of a checkpoint.
        again: whether it is one of this process that has ended in an error. If it is not resumed, all its units are set aside: at
            its first step, too, the model may have other weights.

    Returns:
        The reason why the store can't be used, or None.
    """
    steps = store.steps()
    if steps and not (resumed or again):
        return (
            f"{store.path} holds the units of another run (up to step {steps[-1]}); choose another save_dir, remove this one, or "
            "resume that run from its checkpoint: trainer.fit(..., ckpt_path=...), or in a loop of your own its weights and "
            "its step"
        )
    try:
        store.check_settings(settings)
        aside = [later for later in steps if later > step or not resumed]
        store.set_aside(aside)
        if aside and not resumed:
            warn_caller(
                f"the run begins again: its {len(aside)} units so far are set aside in {store.path / 'superseded'}"
            )
        # A later step is reached again, and may then be measured.
        skipped = store.skipped()
        kept = {before: reason for before, reason in skipped.items() if resumed and before <= step}
        if kept != skipped:
            store.write_skipped(kept)
    except (ValueError, OSError) as error:
        return f"save_dir can't be used: {error}"
    return None
