"""Schedules of measurements: functions step -> bool. Those of this module can be pickled, for processes that are spawned.

Step s is the state after s optimizer steps, step 0 the state before training. It is `trainer.global_step` and the number
in a checkpoint's file name. Lightning logs the loss of the batch that led to step s at s - 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tracker.errors import UsageError

Schedule = Callable[[int], bool]


def log2(step: int) -> bool:
    """Whether a step is 0 or a power of two."""
    return step & (step - 1) == 0


def pythia(step: int) -> bool:
    """Whether Pythia has a published checkpoint of a step: 0, 1, 2, 4, ..., 512, and every 1000."""
    return step % 1000 == 0 or (step <= 512 and log2(step))


def never(step: int) -> bool:
    """Include no step."""
    return False


@dataclass(frozen=True)
class Every:
    """Every n-th step, from step 0 on."""

    n: int

    def __call__(self, step: int) -> bool:
        """Whether a step is a multiple of n."""
        return step % self.n == 0


@dataclass(frozen=True)
class Listed:
    """Some steps."""

    steps: frozenset[int]

    def __call__(self, step: int) -> bool:
        """Whether a step is one of them."""
        return step in self.steps


@dataclass(frozen=True)
class AndStep:
    """The steps of another schedule, and one more."""

    due: Schedule
    last: int

    def __call__(self, step: int) -> bool:
        """Whether the other schedule includes a step, or it is the one more."""
        return step == self.last or self.due(step)


NAMED = {"log2": log2, "pythia": pythia}


def choose(
    every_n_steps: int | None = None,
    steps: Iterable[int] | None = None,
    schedule: str | Schedule | None = None,
    every_n_epochs: int | None = None,
) -> Schedule:
    """Return the schedule given in one of four ways; `log2` if none is given.

    With `every_n_epochs` it includes no step: the callback decides at the end of an epoch.

    >>> [step for step in range(10) if choose(every_n_steps=3)(step)]
    [0, 3, 6, 9]

    Raises:
        UsageError: for several schedules at once, an unknown name, or steps that are not whole numbers from 0.
    """
    if sum(given is not None for given in (every_n_steps, steps, schedule, every_n_epochs)) > 1:
        raise UsageError("several schedules given; give one of every_n_steps, every_n_epochs, steps and schedule")
    if every_n_epochs is not None:
        positive("every_n_epochs", every_n_epochs)
        return never
    if every_n_steps is not None:
        return Every(positive("every_n_steps", every_n_steps))
    if steps is not None:
        chosen = frozenset(steps)
        if not chosen or not all(isinstance(step, int) and step >= 0 for step in chosen):
            raise UsageError(f"steps={steps!r}; give the optimizer steps to measure, whole numbers from 0 on")
        return Listed(chosen)
    if schedule is None or isinstance(schedule, str):
        if (schedule or "log2") not in NAMED:
            raise UsageError(
                f"schedule={schedule!r}; choose {' or '.join(map(repr, NAMED))}, or give a function step -> bool"
            )
        return NAMED[schedule or "log2"]
    return schedule


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
