"""The scheduled steps of a training run that could not be measured or recorded, and why."""

from tracker.notices import warn_caller
from tracker.results import Store
from tracker.training.ranks import Failure


class Skipped:
    """Reasons by step, the same on every rank. Each type of error is named in one warning; the store keeps all reasons.

    Args:
        store: where to record them; None: nowhere.
        warns: whether to warn, on one of the ranks.
    """

    def __init__(self, store: Store | None, warns: bool = True) -> None:
        self.store, self.warns = store, warns
        self.reasons: dict[int, str] = {}
        self.warned: set[tuple[str, str]] = set()

    def add(self, step: int, failure: Failure, part: str = "") -> None:
        """Record a step; warn of the first error of its type.

        Args:
            part: what failed after the step was measured, such as "not stored".
        """
        reason = f"{part}: {failure}" if part else str(failure)
        known = self.reasons.get(step, "")
        if reason not in known:
            self.reasons[step] = f"{known}; {reason}" if known else reason
        if (part, failure.kind) not in self.warned:
            self.warned.add((part, failure.kind))
            result = f"is measured but {part}" if part else "is not measured"
            self._warn(f"step {step} {result} ({failure}); training continues")
        if self.store is not None:
            try:
                self.store.write_skipped(self.store.skipped() | {step: self.reasons[step]})
            except (OSError, ValueError) as why:
                self._warn(f"{self.store.path} can't record that step {step} was skipped: {why}")

    def summarize(self) -> None:
        """Warn, at the end of the training, of all steps if more were skipped than were named."""
        if len(self.reasons) > len(self.warned):
            steps, last = ", ".join(map(str, self.reasons)), list(self.reasons.values())[-1]
            self._warn(f"{len(self.reasons)} steps were skipped: {steps} (the last: {last})")

    def _warn(self, message: str) -> None:
        if self.warns:
            warn_caller(message)
