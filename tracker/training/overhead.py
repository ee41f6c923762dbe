"""The share of a training run's time that measuring takes."""

import time

from tracker.notices import warn_caller

MIN_SECONDS = 30.0  # of measuring before a warning: a shorter total is no cost worth one
REMEDY = "measure less often, on fewer samples or tokens, or set thin=True"


class Overhead:
    """The time that measurements take: `with overhead:` around each.

    Args:
        limit: the share of the run's time above which `warn_above_limit` warns; None: never.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.warned = False
        self.started = self.last_end = self.last_start = time.perf_counter()
        self.total = 0.0  # seconds of all measurements
        self.last = 0.0  # seconds of the last measurement
        self.last_share = 0.0  # the last measurement over the time since the previous one ended; 0 for the first

    def __enter__(self) -> None:
        self.last_start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.last = now - self.last_start
        self.last_share = self.last / (now - self.last_end) if self.total else 0.0
        self.total += self.last
        self.last_end = now

    @property
    def share(self) -> float:
        """Time spent on measuring over the time since the start."""
        return self.total / (time.perf_counter() - self.started)

    def allows_another(self) -> bool:
        """Whether one more measurement, as long as the last, keeps the share within the limit."""
        elapsed = time.perf_counter() - self.started
        return self.limit is None or self.total + self.last <= self.limit * (elapsed + self.last)

    def warn_above_limit(self, share: float, period: str) -> None:
        """Warn, once, that the share of measuring in a period is above the limit."""
        if self.warned or self.limit is None or share <= self.limit or self.total <= MIN_SECONDS:
            return
        self.warned = True
        warn_caller(f"measuring took {share:.0%} of {period}, more than max_overhead={self.limit:g}: {REMEDY}")
