"""Schedules of measurements: functions step -> bool. Those of this module can be pickled, for processes that are spawned.

Step s is the state after s optimizer steps, step 0 the state before training. It is `trainer.global_step` and the number
in a checkpoint's file name. Lightning logs the loss of the batch that led to step s at s - 1.

`Overhead` keeps the share of a training run's time that measuring takes. The first measurement is left out of every share: it
includes imports and what libraries do at their first call.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from tracker.common.errors import UsageError, warn_caller
from tracker.common.values import whole_numbers

Schedule = Callable[[int], bool]


def log2(step: int) -> bool:
    """Whether a step is 0 or a power of two."""
    return step & (step - 1) == 0


def every(n: int, step: int) -> bool:
    """Whether a step is a multiple of n."""
    return step % n == 0


def choose(
    every_n_steps: int | None, steps: Iterable[int] | None, every_n_epochs: int | None
) -> Schedule:
    """Return the schedule given in one of three ways; `log2` if none is given.

    With `every_n_epochs` it includes no step: the callback decides at the end of an epoch.

    Raises:
        UsageError: for several schedules at once, or steps that are not whole numbers from 0.
    """
    if sum(way is not None for way in (every_n_steps, steps, every_n_epochs)) > 1:
        raise UsageError(
            "several schedules given; give one of every_n_steps, every_n_epochs and steps"
        )
    if every_n_epochs is not None:
        positive("every_n_epochs", every_n_epochs)
        return frozenset().__contains__
    if every_n_steps is not None:
        return partial(every, positive("every_n_steps", every_n_steps))
    if steps is not None:
        chosen = frozenset(whole_numbers(steps))
        if not chosen or min(chosen) < 0:
            raise UsageError(
                f"steps={steps!r}; give the optimizer steps to measure, whole numbers from 0 on"
            )
        return chosen.__contains__
    return log2


def positive(name: str, value: int) -> int:
    """Return `value`.

    Raises:
        UsageError: if it is not a whole number, at least 1.
    """
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}; give a whole number, at least 1")
    return value


def any_due(schedule: Schedule, after: int, up_to: int) -> bool:
    """Whether the schedule includes a step in after + 1 .. up_to: several optimizers may step on one batch."""
    return any(schedule(step) for step in range(after + 1, up_to + 1))


# Seconds of measuring in all, after which one interval above the limit is worth a warning
LONG = 30.0
# Before that: so many intervals in a row, each above so many times the limit
CLEARLY, IN_A_ROW = 2.0, 2
REMEDY = "measure less often, or on fewer samples or tokens"


class Overhead:
    """The time that measurements take: `with overhead:` around each.

    Args:
        limit: the share of the run's time above which the user is warned; None: never.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.warned = False
        self.last_end = self.last_start = time.perf_counter()
        self.total = 0.0  # seconds of all measurements
        self.last = 0.0  # seconds of the last measurement
        # The last measurement over the time since the previous one ended; 0 for the first
        self.last_share = 0.0
        # Seconds of the first measurement, and when it ended
        self.first, self.first_end = 0.0, math.inf
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
        # A single interval may be short by chance: several in a row are not.
        clearly = self.limit is not None and self.last_share > CLEARLY * self.limit
        self.clearly_above = self.clearly_above + 1 if clearly else 0
        self.total += self.last
        self.last_end = now

    @property
    def share(self) -> float:
        """Time spent on measuring over the time since the first measurement; 0 without a second."""
        later = self.total - self.first
        return later / (time.perf_counter() - self.first_end) if later else 0.0

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
        warn_caller(
            f"measuring took {share:.0%} of {period}, more than max_overhead={self.limit:g}: {REMEDY}"
        )
