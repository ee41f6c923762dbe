"""The store of a training run, which one run at a time writes and which a resumed run continues.

A run claims its store with a lock on a file (`Held`), which no other process, no other run of its process and no fork of it has.

- The claim lasts until the run has ended; in its own process, a run whose object is gone has ended.
- One that ends in an error leaves it to the next run of this process, which is the same run once more, with a smaller batch, say:
  it sets aside the units of the earlier attempt.
- A run of this process that is resumed takes the claim over from any other, and one that begins takes it from one without
  results: what an error has ended may still be there, because a notebook keeps the variables of the error.
- Any other run is refused. So is one whose claim was taken over, when it goes on and has measured.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracker.common.errors import UsageError, warn_caller
from tracker.common.files import Lock
from tracker.measures.settings import Settings
from tracker.provenance import digest
from tracker.store import Store


@dataclass(eq=False)
class Held:
    """The claim of a run of this process, a `TrainingRun`, on a store."""

    lock: Lock
    run: weakref.ref[Any]
    failed: bool = False  # whether the run has ended in an error


_held: dict[Path, Held] = {}  # the last claim on each file


def _refusal(file: Path) -> UsageError:
    last = max(Store(file.parent).steps(), default="none")
    return UsageError(
        f"{file.parent} belongs to another training ({Lock.holder(file) or 'not signed'}; last step: {last}); "
        "choose another save_dir, or resume that training when it has ended"
    )


def check_claim(held: Held | None) -> None:
    """Check that no other run has taken a claim over.

    Raises:
        UsageError: if one has.
    """
    if held is not None and not held.lock.held:
        raise _refusal(held.lock.file)


def _lock(file: Path) -> Lock:
    """Lock the file of a store.

    Raises:
        UsageError: if another run has it, or the directory can't be written to.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(file)
        if lock is not None:
            lock.sign()
    except OSError as error:
        raise UsageError(f"save_dir can't be used: {error}") from error
    if lock is None:
        raise _refusal(file)
    return lock


def open_for_run(
    store: Store | None,
    settings: Settings,
    shared: Mapping[str, Any],
    step: int,
    resumed: bool,
    run: object,
) -> tuple[Settings, Held | None]:
    """Claim a store, if there is one; return the settings that continue it, and the claim.

    Args:
        shared: the settings that all its units share.
        step, resumed: as in `claim`.
        run: whose claim it is; it may have one of an earlier training.

    Raises:
        UsageError: if the store can't be used.
    """
    if store is None:
        return settings, None
    file = store.path.resolve() / ".training"
    earlier = _held.get(file)
    if earlier is not None and earlier.lock.held and not earlier.lock.has_file:
        earlier.lock.release()  # the directory was removed
    if earlier is None or not earlier.lock.held:
        earlier, lock = None, _lock(file)
    else:
        lock = earlier.lock
    other = None if earlier is None else earlier.run()
    again = earlier is not None and (earlier.failed or other is run)
    if other is not None and other.any_measured and not (again or resumed):
        raise _refusal(file)
    try:
        claim(store, shared, step, resumed, again)
    except BaseException:
        # Only a lock that this call took is given back.
        if earlier is None:
            lock.release(remove=True)
        raise
    if earlier is not None:
        # Of several runs that take the claim over at the same time, one has the lock then.
        lock.release()
        lock = _lock(file)
    held = _held[file] = Held(lock, weakref.ref(run))
    return store.continued(settings), held


def check_inputs(store: Store | None, probe: Any) -> None:
    """Check that a probe is what the units of a store were measured on.

    Raises:
        UsageError: if it is not.
    """
    if store is None:
        return
    measured = store.shared("inputs_sha256")
    if measured not in (None, digest(probe)):
        raise UsageError(
            f"{store.path} measured other inputs (SHA-256 {measured[:8]}); give the same probe=, or choose another save_dir"
        )


def claim(store: Store, settings: Mapping[str, Any], step: int, resumed: bool, again: bool) -> None:
    """Prepare a store for a run that starts at `step`: check its settings, set later units aside, forget later skips.

    Args:
        resumed: whether the run continues from a state that is known, such as that of a checkpoint.
        again: whether it is one of this process that has ended in an error. If it is not resumed, all its units are set aside: at
            its first step, too, the model may have other weights.

    Raises:
        UsageError: if the store can't be used.
    """
    steps = store.steps()
    if steps and not (resumed or again):
        raise UsageError(
            f"{store.path} holds the units of another run (up to step {steps[-1]}); choose another save_dir, remove this one, or "
            "resume that run from its checkpoint: trainer.fit(..., ckpt_path=...) in Lightning, "
            "trainer.train(resume_from_checkpoint=...) in transformers, or in a loop of your own its weights and its step"
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
        raise UsageError(f"save_dir can't be used: {error}") from error
