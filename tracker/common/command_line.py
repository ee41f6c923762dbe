"""Exit statuses, errors and warnings of all command lines."""

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from tracker.common.errors import CheckpointError, MissingExtraError, Note, missing_extra
from tracker.common.text import escaped

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
INPUT_ERRORS = (ValueError, OSError, CheckpointError)

# Modules whose lines tell the user of a command nothing.
OWN = tuple(
    f"{Path(__file__).parents[2] / package}{os.sep}"
    for package in ("checkpoints", "tracker", "vit")
)

P = ParamSpec("P")


@contextmanager
def leaving_at_once(signals: Iterable[int], message: str) -> Iterator[None]:
    """Print a message and end the process at each of these signals.

    While libraries are imported, one of them could swallow an exception.
    """

    def leave(*_: object) -> None:
        # print may be interrupted within itself, and may not be entered again there.
        os.write(2, f"\n{message}\n".encode())
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class CommandFailure(Exception):
    """A failure that is not the caller's mistake; the command exits with status FAILED."""


def reports_errors(
    interrupted: str = "interrupted", usage: tuple[type[Exception], ...] = INPUT_ERRORS
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a command so that an error becomes one message on standard error and an exit status.

    Args:
        interrupted: the message after Ctrl-C.
        usage: errors that report bad input, with status USAGE; any other error keeps its traceback.
    """

    def decorate(command: Callable[P, int]) -> Callable[P, int]:
        @wraps(command)
        def guarded(*arguments: P.args, **keywords: P.kwargs) -> int:
            # As standard error: names of files may hold anything
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                with _brief_warnings():
                    return command(*arguments, **keywords)
            except BrokenPipeError:  # the reader of the output has closed it
                # Python writes what is left when it exits, and would fail once more.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return FAILED
            except KeyboardInterrupt:
                print(f"\n{interrupted}", file=sys.stderr)
                return INTERRUPTED
            except CommandFailure as error:
                print(f"error: {escaped(str(error))}", file=sys.stderr)
                return FAILED
            except usage as error:
                print(f"error: {escaped(str(error))}", file=sys.stderr)
                return USAGE
            except ImportError as error:
                named = missing_extra(error, "this command")
                if not isinstance(named, MissingExtraError):
                    raise
                print(f"error: {named}", file=sys.stderr)
                return USAGE

        return guarded

    return decorate


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """Print each warning of the project's own once, as one line without the line of code; others as Python does.

    Python shows a warning again for the same line whenever a library has changed the filters in between.
    """
    before, printed = warnings.showwarning, set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, *where: Any, **options: Any
    ) -> None:
        if category not in (UserWarning, Note) or not filename.startswith(OWN):
            before(message, category, filename, *where, **options)
        elif str(message) not in printed:
            printed.add(str(message))
            print(
                f"{'note' if category is Note else 'warning'}: {escaped(str(message))}",
                file=sys.stderr,
                flush=True,
            )

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before
