"""Exit statuses and error handling of all command lines, also those of `tracker` and `vit`."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from checkpoints.hub import CheckpointError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

P = ParamSpec("P")


class CommandFailure(Exception):
    """A failure that is not the caller's mistake; the command exits with status FAILED."""


def reports_errors(
    interrupted: str = "interrupted", usage: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a command so that an error becomes one message on standard error and an exit status.

    Args:
        interrupted: the message after Ctrl-C.
        usage: errors with status USAGE, in addition to ValueError (and so UsageError), OSError and CheckpointError.
    """

    def decorate(command: Callable[P, int]) -> Callable[P, int]:
        @wraps(command)
        def guarded(*arguments: P.args, **keywords: P.kwargs) -> int:
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
            except (ValueError, OSError, CheckpointError, *usage) as error:
                print(f"error: {error}", file=sys.stderr)
                return USAGE

        return guarded

    return decorate
