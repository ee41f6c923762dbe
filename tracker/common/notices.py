"""Warnings that point at the line of the user's code that started a measurement."""

import sys
import warnings
from pathlib import Path

from tracker.common.lightning_packages import PREFIXES

WITHIN = str(Path(__file__).parents[1]) + "/"
COMMAND = str(Path(__file__).with_name("command_line.py"))  # where a command runs, it is the caller
# contextlib runs decorators of the package; jaxtyping and beartype check types in its tests.
FRAMEWORKS = (*PREFIXES, "transformers.", "accelerate.", "torch.", "contextlib.", "jaxtyping.", "beartype.")


def warn_caller(message: str) -> None:
    """Warn at the innermost line that belongs neither to this package nor to a framework that calls it.

    Python shows the same warning once for each such line, so a training run that measures often warns once.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_internal(file: str, module: str) -> bool:
    return (file.startswith(WITHIN) and file != COMMAND) or f"{module}.".startswith(FRAMEWORKS)
