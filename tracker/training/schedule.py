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


# Seconds of measuring in all, after which a share above the limit is worth a warning before the run ends
LONG = 30.0
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

    def __enter__(self) -> None:
        self.last_start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.last = now - self.last_start
        if math.isinf(self.first_end):
            self.first, self.first_end = self.last, now
        elif self.last:
            self.last_share = self.last / (now - self.last_end)
        self.total += self.last
        self.last_end = now

    @property
    def share(self) -> float:
        """Time spent on measuring over the time since the first measurement; 0 without a second."""
        later = self.total - self.first
        return later / (time.perf_counter() - self.first_end) if later else 0.0

    def warn(self, ended: bool = False) -> None:
        """Warn, once, if measuring takes too much of the run's time: after half a minute of it, or when the run has ended."""
        early = self.total <= LONG and not ended
        if self.warned or early or self.limit is None or self.share <= self.limit:
            return
        self.warned = True
        warn_caller(
            f"measuring took {self.share:.0%} of this run's time after the first measurement, more than "
            f"max_overhead={self.limit:g}: {REMEDY}"
        )
