"""The ranks of a training run, which go on together.

A rank that fails alone leaves the others waiting in the next collective, usually the reduction of the gradients, until its
process has ended and they end with "connection closed by peer". So after each part of a measurement the ranks take the
maximum of one number:

    DONE 0,   FAILED 1: memory, numbers, kernels,   MISTAKE 2: wrong arguments, any other error,   LOST 3: the device

If it is not DONE, they exchange their reasons, and all raise: `Failure`, after which the training continues, or an error that
ends it on every rank. Numbers and reasons are exchanged by the CPUs (gloo), as a rank whose device is lost can use no other way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import torch
import torch.distributed

from tracker.common.errors import UsageError, panics_as_errors
from tracker.devices import is_device_error
from tracker.model.weights import FAILURES, ON_RANK, notes

DONE, FAILED, MISTAKE, LOST = range(4)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Report:
    """What went wrong on a rank, without the error, which holds tensors."""

    outcome: int
    kind: str  # the type of the error
    message: str
    rank: str  # "on rank 1"


class Failure(Exception):
    """A part of a measurement failed on some rank. Every rank raises this, with the same reason."""


class Ranks:
    """The ranks of a run, seen from one of them; all ranks make and close this object together.

    Args:
        caller: the name of the class that the user sees, for messages.
    """

    def __init__(self, rank: int = 0, count: int = 1, caller: str = "CouplingCallback") -> None:
        self.rank, self.count, self.caller = rank, count, caller
        self.group: Any = torch.distributed.new_group(backend="gloo") if count > 1 else None

    def close(self) -> None:
        """Leave the group of the ranks."""
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def together(
        self,
        part: Callable[..., Result],
        *arguments: Any,
        during: str,
        fatal: int = LOST,
        gathers: bool = False,
    ) -> Result:
        """Return what a function returns on this rank, if it succeeds on every rank.

        Args:
            during: what the caller is doing, to be named in an error that ends the training.
            fatal: the outcome from which on the training ends.
            gathers: whether the function reads sharded weights. The others may wait there, on the device, for a rank that has
                lost its own; then it raises at once, its process ends, and the launcher ends theirs.

        Raises:
            Failure: if the function fails on some rank, and the training can continue.
            Exception: otherwise: this rank's own error, or one that states the reason of another rank.
        """
        error, outcome = None, DONE
        try:
            with panics_as_errors():
                result = part(*arguments)
        except Exception as caught:  # whatever it is, the other ranks must learn of it
            error, outcome = caught, _outcome(caught)
        worst = outcome if gathers and outcome == LOST else self._worst(outcome)
        if worst == DONE:
            return result  # type: ignore[reportPossiblyUnbound]
        own = None if error is None else _report(error, self.rank)
        reports = [own] if gathers and outcome == LOST else self.gather(own)
        kind, reason, where = self._reason(
            [report for report in reports if report and report.outcome == worst]
        )
        if worst < fatal:
            # An error in a variable of a frame that it was raised through is a reference cycle, which keeps all these frames.
            error = None
            raise Failure(reason)
        if error is None or outcome < worst:
            error = (UsageError if kind == UsageError.__name__ else RuntimeError)(reason)
        error.add_note(f"while {self.caller} {during}{where}; the training can't continue")
        raise error

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        return self.gather(value)[0]

    def _worst(self, outcome: int) -> int:
        """Return the largest outcome of the ranks."""
        if self.group is None:
            return outcome
        largest = torch.tensor(outcome)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self.group)
        return int(largest)

    def _reason(self, reports: list[Report]) -> tuple[str, str, str]:
        """Return why some ranks failed, for the first one's reason: its type and text, and the ranks, if there are several."""
        first, ranks = reports[0], list(dict.fromkeys(report.rank for report in reports))
        where = f" {', '.join(ranks)}"
        if self.count == 1:
            where = ""
        elif len(ranks) == self.count:
            where = " on all ranks"
        return first.kind, f"{first.kind}{where}: {first.message}", where


def _outcome(error: Exception) -> int:
    if is_device_error(error):
        return LOST
    return FAILED if isinstance(error, FAILURES) and not isinstance(error, UsageError) else MISTAKE


def _report(error: Exception, rank: int) -> Report:
    message, outcome = str(error), _outcome(error)
    # A KeyError says little without its line
    if outcome == MISTAKE and not isinstance(error, (UsageError, OSError)):
        line = extract_tb(error.__traceback__)[-1]
        message += f" ({Path(line.filename).name}, line {line.lineno})"
    where = next((note for note in notes(error) if note.startswith(ON_RANK)), f"{ON_RANK}{rank}")
    return Report(outcome, type(error).__name__, message, where)
