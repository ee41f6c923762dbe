"""Exit statuses and error handling of all command lines, also those of `tracker` and `vit`."""

import io
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from checkpoints.errors import CheckpointError
from checkpoints.extras import MissingExtraError, missing_extra

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
INPUT_ERRORS = (ValueError, OSError, CheckpointError)

P = ParamSpec("P")


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
            if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error: names of files may hold anything
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                return command(*arguments, **keywords)
            except BrokenPipeError:  # the reader of the output has closed it
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return FAILED
            except KeyboardInterrupt:
                print(f"\n{interrupted}", file=sys.stderr)
                return INTERRUPTED
            except CommandFailure as error:
                print(f"error: {error}", file=sys.stderr)
                return FAILED
            except usage as error:
                print(f"error: {error}", file=sys.stderr)
                return USAGE
            except ImportError as error:
                named = missing_extra(error, "this command")
                if not isinstance(named, MissingExtraError):
                    raise
                print(f"error: {named}", file=sys.stderr)
                return USAGE

        return guarded

    return decorate
