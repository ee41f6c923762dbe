"""The share of a training run's time that measuring takes.

The first measurement is left out of every share: it includes imports and what libraries do at their first call.
"""

import math
import time

from tracker.notices import warn_caller

LONG = 30.0  # seconds of measuring in all, after which one interval above the limit is worth a warning
CLEARLY, IN_A_ROW = 2.0, 2  # before that: so many intervals in a row, each above so many times the limit
REMEDY = "measure less often, on fewer samples or tokens, or set thin=True"


class Overhead:
    """The time that measurements take: `with overhead:` around each.

    Args:
        limit: the share of the run's time above which the user is warned; None: never.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.warned = False
        self.started = self.last_end = self.last_start = time.perf_counter()
        self.total = 0.0  # seconds of all measurements
        self.last = 0.0  # seconds of the last measurement
        self.last_share = 0.0  # the last measurement over the time since the previous one ended; 0 for the first
        self.first, self.first_end = 0.0, math.inf  # seconds of the first measurement, and when it ended
        self.clearly_above = 0  # the last intervals in a row that are clearly above the limit

    def __enter__(self) -> None:
        self.last_start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.last = now - self.last_start
        if math.isinf(self.first_end):
            self.first, self.first_end = self.last, now
        elif self.last:
            self.last_share = self.last / (now - self.last_end)
        clearly = self.limit is not None and self.last_share > CLEARLY * self.limit
        self.clearly_above = self.clearly_above + 1 if clearly else 0
        self.total += self.last
        self.last_end = now

    @property
    def share(self) -> float:
        """Time spent on measuring over the time since the first measurement; 0 without a second."""
        later = self.total - self.first
        return later / (time.perf_counter() - self.first_end) if later else 0.0

    def allows_another(self) -> bool:
        """Whether one more measurement, as long as the last, keeps the share within the limit."""
        elapsed = time.perf_counter() - self.started
        return self.limit is None or self.total + self.last <= self.limit * (elapsed + self.last)

    def warn_of_interval(self) -> None:
        """Warn, once, if measuring takes too much of the time between measurements: clearly, or in a long run at all."""
        if self.total > LONG or self.clearly_above >= IN_A_ROW:
            self._warn_above_limit(self.last_share, "the time since the last measurement")

    def warn_of_run(self) -> None:
        """Warn, unless it was done before, if measuring took too much of the run's time."""
        self._warn_above_limit(self.share, "this run's time after the first measurement")

    def _warn_above_limit(self, share: float, period: str) -> None:
        if self.warned or self.limit is None or share <= self.limit:
            return
        self.warned = True
        warn_caller(f"measuring took {share:.0%} of {period}, more than max_overhead={self.limit:g}: {REMEDY}")
