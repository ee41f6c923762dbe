"""Which steps of a training run to measure: functions step -> bool.

Step s is the state after s optimizer steps, 0 that before training: the number in a checkpoint's file name, and
Lightning's `trainer.global_step`. Lightning logs the loss of the batch that led to step s at s - 1.
"""

import time
from collections.abc import Callable, Iterable

from tracker.errors import UsageError

Schedule = Callable[[int], bool]


def log2(step: int) -> bool:
    """0, 1, 2, 4, 8 and on."""
    return step & (step - 1) == 0


def pythia(step: int) -> bool:
    """The steps at which Pythia's checkpoints were published: 0, 1, 2, 4 .. 512, and every 1000."""
    return step % 1000 == 0 or (step <= 512 and log2(step))


NAMED = {"log2": log2, "pythia": pythia}


def choose(
    every_n_steps: int | None = None, steps: Iterable[int] | None = None, schedule: str | Schedule | None = None
) -> Schedule:
    """The schedule that a caller describes in one of three ways; `log2` where nothing is said.

    >>> [step for step in range(10) if choose(every_n_steps=3)(step)]
    [0, 3, 6, 9]

    Raises:
        UsageError: for several descriptions at once, an unknown name, or steps that are not whole numbers from 0.
    """
    if sum(given is not None for given in (every_n_steps, steps, schedule)) > 1:
        raise UsageError("several schedules given; give one of every_n_steps, every_n_epochs, steps and schedule")
    if every_n_steps is not None:
        n = positive("every_n_steps", every_n_steps)
        return lambda step: step % n == 0
    if steps is not None:
        chosen = set(steps)
        if not chosen or not all(isinstance(step, int) and step >= 0 for step in chosen):
            raise UsageError(f"steps={steps!r}; give the optimizer steps to measure, whole numbers from 0 on")
        return chosen.__contains__
    if schedule is None or isinstance(schedule, str):
        if (schedule or "log2") not in NAMED:
            raise UsageError(
                f"schedule={schedule!r}; choose {' or '.join(map(repr, NAMED))}, or give a function step -> bool"
            )
        return NAMED[schedule or "log2"]
    return schedule


def positive(name: str, value: int) -> int:
    """`value`, if it is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}; give a whole number, at least 1")
    return value


def due(schedule: Schedule, served: int, now: int) -> bool:
    """Whether the schedule names a step after `served`, up to `now`: several optimizers may step at once."""
    return any(schedule(step) for step in range(served + 1, now + 1))


class Clock:
    """How much of a run's time goes into measuring: `with clock:` around each measurement."""

    def __init__(self) -> None:
        self.began = self.ended = self.entered = time.perf_counter()
        self.spent = 0.0  # seconds of all measurements
        self.last = 0.0  # of the last one
        self.last_share = 0.0  # of the time since the end of the one before; 0 for the first

    def __enter__(self) -> None:
        self.entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.last = now - self.entered
        self.last_share = self.last / (now - self.ended) if self.spent else 0.0
        self.spent += self.last
        self.ended = now

    @property
    def share(self) -> float:
        """Of the time since the clock was made."""
        return self.spent / (time.perf_counter() - self.began)

    def has_room(self, limit: float) -> bool:
        """Whether one more measurement, as long as the last, keeps the share below `limit`."""
        return self.spent + self.last <= limit * (time.perf_counter() - self.began + self.last)
