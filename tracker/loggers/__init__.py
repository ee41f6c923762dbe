"""Send measured units to experiment loggers.

In: one measured Dataset per step. Out: scalars, images and tables in Weights & Biases or a Lightning logger.

To add a logger, write a module here with a class that has the methods of `protocol.Logger` and a function
`prepare(mode) -> Open | None`, and add the module to `LOGGERS`.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracker.loggers.protocol import LoggedRun, Open, Row
    from tracker.loggers.wandb import Mode

LOGGERS = {"wandb": "tracker.loggers.wandb"}  # name: module, imported on use


def prepare(mode: "Mode") -> "list[Open]":
    """Check the loggers' settings before a run starts; return the functions that open the enabled loggers.

    Raises:
        ValueError: if a logger can't be used in this mode.
    """
    prepared = [importlib.import_module(module).prepare(mode) for module in LOGGERS.values()]
    return [opener for opener in prepared if opener is not None]


@contextmanager
def opened(openers: "Sequence[Open]", run: "LoggedRun") -> "Iterator[Callable[[Row | None], None]]":
    """Open loggers for a run and yield the function that sends a row to all; finish them and print where they are."""
    with ExitStack() as stack:
        loggers = []
        for opener in openers:
            logger = opener(run)
            loggers.append(logger)
            stack.callback(lambda logger=logger: print(logger.finish(), flush=True))

        def send(row: "Row | None") -> None:
            for logger in loggers if row is not None else ():
                logger.images(row)
                logger.log(row)

        yield send
