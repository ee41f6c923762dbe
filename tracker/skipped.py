"""The steps that a walk or a training run could not measure or record, and why."""

from collections.abc import Callable

from tracker.common.text import by_cause, cause, printable
from tracker.store import Store


class Skipped:
    """Reasons by step; those that differ only in numbers have one cause.

    Args:
        store: keeps the reasons in its skipped.json, for its page; None: nothing keeps them.
        warn: called with a line if the store can't keep them.
    """

    def __init__(self, store: Store | None, warn: Callable[[str], None]):
        self.store, self.warn = store, warn
        self.reasons: dict[int, str] = {}
        self._first: dict[str, int] = {}  # the first step of each cause

    def add(self, step: int, reason: str) -> int | None:
        """Record a step; return the step that was skipped before for the same cause, or None.

        A step can have several reasons: it may be measured, but not stored and not logged.
        """
        reason = printable(reason)
        known = self.reasons.get(step, "")
        if reason not in known:
            self.reasons[step] = f"{known}; {reason}" if known else reason
        before = self._first.get(cause(reason))
        self._first.setdefault(cause(reason), step)
        if self.store is not None:
            self._keep(self.store, step)
        return before

    def alike(self, count: int) -> bool:
        """Whether so many steps were skipped, all for one cause."""
        return len(self._first) == 1 and len(self.reasons) >= count

    def lines(self) -> list[str]:
        """Return a line for each cause, with its steps."""
        return by_cause(self.reasons)

    def _keep(self, store: Store, step: int) -> None:
        try:
            with store.alone():  # several walks add to one store
                store.write_skipped(store.skipped() | {step: self.reasons[step]})
        except (OSError, ValueError) as why:
            self.warn(f"{store.path} can't record that step {step} was skipped: {why}")
