"""Send measured units to experiment loggers.

In: one measured Dataset per step. Out: scalars, images and tables in Weights & Biases or a Lightning logger.

To add a logger for walks and replays, write a module with a class that has the methods of `protocol.Logger` and a function
`prepare(wandb_mode) -> Opener | None`, and add a line to `LOGGERS`. The callback takes any logger of Lightning.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tracker.common.text import first_line

if TYPE_CHECKING:
    from tracker.loggers.protocol import LoggedRun, Logger, Opener, Row
    from tracker.loggers.wandb import Mode

LOGGERS = ["tracker.loggers.wandb"]  # modules, imported on use


def prepare(wandb_mode: "Mode") -> "list[Opener]":
    """Check loggers before a run starts; return what opens those that are enabled.

    Raises:
        ValueError: for a logger that can't be used.
    """
    openers = [importlib.import_module(module).prepare(wandb_mode) for module in LOGGERS]
    return [opener for opener in openers if opener is not None]


def announce(openers: "Sequence[Opener]", run: "LoggedRun") -> None:
    """Print where a run will be logged, and how to switch that off."""
    for line in filter(None, (opener.where(run) for opener in openers)):
        print(line, flush=True)


@contextmanager
def opened(
    openers: "Sequence[Opener]", run: "LoggedRun"
) -> "Iterator[Callable[[Row | None], None]]":
    """Open loggers for a run; yield the function that sends a row to all; finish them and print where they are.

    They receive the pictures of a row, and those of its metrics that the run logs.

    A logger that fails gets no more rows, and a line on standard error says so: whatever happens to it, the measuring goes on.
    """
    from tracker.loggers.protocol import select_metrics

    loggers: list[Logger] = []

    def attempt(logger: "Logger", part: "Callable[[], str | None]") -> str | None:
        try:
            return part()
        except Exception as error:  # of a service that the measuring does not need
            loggers.remove(logger)
            reason = f"{type(error).__name__}: {first_line(error)}"
            print(
                f"{type(logger).__name__} failed and gets no more steps ({reason})",
                file=sys.stderr,
                flush=True,
            )
            return None

    def send(row: "Row | None") -> None:
        if row is not None and loggers:
            logged = select_metrics(row, run.log)
            # One that fails leaves the list.
            for logger in [*loggers]:
                attempt(logger, partial(_send, logger, row, logged))

    try:
        for opener in openers:
            loggers.append(opener.open(run))
        yield send
    finally:
        for logger in [*loggers]:
            if where := attempt(logger, logger.finish):
                print(where, flush=True)


def _send(logger: "Logger", row: "Row", logged: "Row") -> None:
    logger.images(row)
    logger.log(logged)
