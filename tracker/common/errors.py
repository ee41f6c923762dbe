"""Errors and warnings, each a message for the user.

The core installs what `tracker.measure` needs. Every other package is imported where it is used; without it, the error names
the extra of the distribution that brings it. Warnings point at the line of the user's code that started a measurement.
"""

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path

from tracker.common.text import first_line

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # why a file can't be written
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class UsageError(ValueError):
    """A request that can't be met with this model or these inputs: what was given, what is allowed, what to do."""


class CheckpointError(Exception):
    """A checkpoint can't be loaded or can't be trusted; the message states which, why and what to do."""


class Unreachable(CheckpointError):
    """No hub responds: offline mode is on, there is no network, the hub stays busy, or something else answers."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for the panics of libraries written in Rust (tokenizers), which are no `Exception`s."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"a library panicked: {first_line(error)}") from error


ROOT = Path(__file__).parents[2]  # where the packages of the distribution are
DISTRIBUTION = "block-coupling-tracker"
# Imported name -> extra, as in pyproject.toml.
EXTRAS = {
    "jsonargparse": "all",  # every command needs more than its parser
    "transformers": "walk",
    "huggingface_hub": "walk",
    "safetensors": "walk",
    "tokenizers": "walk",
    "lightning": "train",
    "wandb": "wandb",
    "matplotlib": "report",
    "plotly": "report",
    "timm": "vit",
    "torchvision": "vit",
    "sklearn": "vit",
    "torchmetrics": "vit",
    "ray": "vit",
    "datasets": "prompts",
}


class MissingExtraError(ImportError):
    """A package that can't be imported, because its extra is not installed."""


def missing_extra(error: ImportError, feature: str) -> ImportError:
    """Return an error that names the extra for what could not be imported, or the same error if no extra brings it.

    >>> print(missing_extra(ModuleNotFoundError(name="lightning.pytorch"), "tracker.CouplingCallback"))
    tracker.CouplingCallback needs lightning, which is not installed: pip install '.[train]' in a clone of block-coupling-tracker
    """
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return error
    return MissingExtraError(
        f"{feature} needs {package}, which is not installed: pip install '.[{EXTRAS[package]}]' in a clone of {DISTRIBUTION}",
        name=package,
    )


def require(package: str, feature: str) -> None:
    """Raise MissingExtraError, which names the extra, if a package is not installed; `feature` needs it."""
    if find_spec(package) is None:
        raise missing_extra(ModuleNotFoundError(name=package), feature)


def require_own(package: str) -> None:
    """Exit with status 1 and the file's name if a user's module hides a top-level package of this distribution."""
    spec = find_spec(package)
    file = spec and spec.origin
    if file != str(ROOT / package / "__init__.py"):
        sys.exit(
            f"error: this command needs its own package {package!r}, but Python finds {file or 'another folder'}: rename that, "
            "or run the command in another directory"
        )


WITHIN = str(Path(__file__).parents[1]) + "/"
COMMAND = str(Path(__file__).with_name("command_line.py"))  # where a command runs, it is the caller
# Begins of the names of modules. contextlib runs decorators of the package; jaxtyping and beartype check types in its tests.
FRAMEWORKS = (
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "transformers.",
    "accelerate.",
    "torch.",
    "contextlib.",
    "jaxtyping.",
    "beartype.",
)


class Note(UserWarning):
    """A warning of nothing that is wrong: commands print it as a note."""


# What has been said, where each warning is given once
_said: ContextVar[set[str] | None] = ContextVar("_said", default=None)


@contextmanager
def warning_once(said: set[str]) -> Iterator[None]:
    """Give no warning that was said before, and add to `said` those that are given.

    Python shows a warning again for the same line whenever a library has changed the filters in between, as xarray and pandas do.
    """
    before = _said.set(said)
    try:
        yield
    finally:
        _said.reset(before)


def warn_caller(message: str, category: type[UserWarning] = UserWarning) -> None:
    """Warn at the innermost line that belongs neither to this package nor to a framework that calls it."""
    in_run = _said.get()
    said = set() if in_run is None else in_run
    if message in said:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_internal(
        frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
    said.add(message)  # not where the warning was raised


def _is_internal(file: str, module: str) -> bool:
    return (file.startswith(WITHIN) and file != COMMAND) or f"{module}.".startswith(FRAMEWORKS)
