"""The scheduled steps of a training run that could not be measured, and why."""

from tracker.notices import warn_caller
from tracker.results import Store


class Skipped:
    """Reasons by step. Each type of error is named in one warning; the store, if there is one, keeps all reasons.

    Args:
        store: where to record them; None: nowhere.
    """

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.reasons: dict[int, str] = {}
        self.warned: set[type] = set()

    def add(self, step: int, error: Exception) -> None:
        """Record a step; warn of the first error of its type."""
        reason = self.reasons[step] = f"{type(error).__name__}: {error}"
        if type(error) not in self.warned:
            self.warned.add(type(error))
            warn_caller(f"step {step} is not measured ({reason}); training continues")
        if self.store is not None:
            try:
                self.store.write_skipped(self.store.skipped() | {step: reason})
            except OSError as why:
                warn_caller(f"{self.store.path} can't record that step {step} is not measured: {why}")

    def summarize(self) -> None:
        """Warn, at the end of the training, of all steps if more were skipped than were named."""
        if len(self.reasons) > len(self.warned):
            steps, last = ", ".join(map(str, self.reasons)), list(self.reasons.values())[-1]
            warn_caller(f"{len(self.reasons)} steps were not measured: {steps} (the last: {last})")
