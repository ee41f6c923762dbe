"""Measurement options as callers give them: keywords of a function, its signature and documentation, flags of a command.

Everything here is derived from `settings.Options`. `refusal` says what is wrong with a value of `measures=`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from textwrap import fill
from typing import Any, TypeVar, get_args

from tracker.common.errors import UsageError
from tracker.common.values import ValueTypeError
from tracker.measures.settings import CHOICE_NAMES, EVERYTHING, EXPENSIVE, OPTIONS, Option, Settings


def refusal(measures: Sequence[Any]) -> str:
    """Return what is wrong with a value of `measures=` that names no choice, and what may be given."""
    from tracker.measures.registry import BY_NAME

    allowed = ("all", *CHOICE_NAMES)
    text = f"measures {', '.join(map(str, measures))!r}" if measures else "measures is empty"
    hints = []
    for name in (str(one) for one in measures if one not in allowed):
        if name in BY_NAME and BY_NAME[name].option:
            hints.append(f"{name} is a variable that {BY_NAME[name].option!r} measures")
        elif close := get_close_matches(name, allowed, 1):
            hints.append(f"did you mean {close[0]!r}?")
    meant = f" ({', '.join(hints)})" if hints else ""
    return (
        f"{text}{meant}; choose from {', '.join(allowed)} (all leaves out {', '.join(EXPENSIVE)}, which cost most: "
        f"{','.join(EVERYTHING)} adds them)"
    )


F = TypeVar("F", bound=Callable[..., Any])


def settings_from(
    options: Mapping[str, Any], caller: str, parameters: Iterable[str] = ()
) -> Settings:
    """Return the Settings of the options that a function was called with.

    Args:
        parameters: the names of all parameters of the function, for the error's message.

    Raises:
        TypeError: for an unknown option; the message lists the allowed ones.
        UsageError: for a value that is not allowed.
    """
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        own = [name for name in parameters if name not in OPTIONS]
        close = [
            name
            for word in unknown
            for name in get_close_matches(word, [*own, *OPTIONS], cutoff=0.5)
        ]
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        takes = f"{caller} takes {', '.join(own)}; " if own else ""
        raise TypeError(
            f"{caller}() got an unexpected option {', '.join(map(repr, unknown))}; {meant}{takes}"
            f"measurement options are {', '.join(OPTIONS)}"
        )
    given = {name: _canonical(name, value) for name, value in options.items()}
    return Settings(**{name: option.default for name, option in OPTIONS.items()} | given)


def accepts_options(function: F, options: Mapping[str, Option] = OPTIONS) -> F:
    """Show options, which a function or the constructor of a class takes as **options, in its signature and documentation.

    The docstring's line `**options: ...` is replaced by an entry for each.
    """
    target: Any = function
    constructor: Any = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009 - pyright knows its type
    signature = inspect.signature(constructor)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, option in options.items():
        annotation = getattr(option.given, "__forward_arg__", option.given)
        shown.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation
            )
        )
    constructor.__signature__ = signature.replace(parameters=shown)
    if (doc := function.__doc__) and (
        line := re.search(r"^( *)\*\*options: .*$", doc, re.MULTILINE)
    ):
        wrap = partial(fill, width=120, initial_indent=line[1], subsequent_indent=line[1] + " " * 4)
        entries = [wrap(f"{name}: {option.doc}") for name, option in options.items()]
        function.__doc__ = doc[: line.start()] + "\n".join(entries) + doc[line.end() :]
    return function


def add_flags(parser: Any, defaults: Mapping[str, Any], names: Iterable[str] = OPTIONS) -> None:
    """Add a flag for each measurement option to a jsonargparse parser.

    Args:
        defaults: defaults of this command that differ from those of the options; None for an option to be left out.
        names: the options that the command takes.
    """
    for name in names:
        option = OPTIONS[name]
        default = defaults.get(name, option.default)
        default = list(default) if isinstance(default, tuple) else default
        parser.add_argument(
            f"--{name}", type=option.form or option.given, default=default, help=option.doc
        )


def given_options(parsed: Mapping[str, Any], names: Iterable[str] = OPTIONS) -> dict[str, Any]:
    """Return the measurement options among the values that a parser read, without those left out."""
    return {name: parsed[name] for name in names if parsed.get(name) is not None}


def _canonical(name: str, value: Any) -> Any:
    """Convert the value of an option to its one form.

    Raises:
        UsageError: if it is not of the option's type.
    """
    option = OPTIONS[name]
    if value is None and (option.default is None or name == "measures"):
        return option.default
    if name == "measures":
        return _measures(value)
    if choices := get_args(option.form or option.given):  # of a Literal
        chosen = str(value).removeprefix("torch.") if name == "dtype" else value
        if chosen not in choices:
            raise UsageError(f"{name}={value}; choose from {', '.join(choices)}")
        return chosen
    try:
        converted = option.form(value)
    except ValueTypeError as error:
        raise UsageError(f"{name}={error}") from None
    return tuple(converted) if isinstance(converted, list) else converted


def _measures(value: Any) -> tuple[str, ...]:
    value = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    several = isinstance(value, Iterable) and not isinstance(value, bytes)
    names = tuple(map(str, value)) if several else (str(value),)
    if not names or set(names) - {*CHOICE_NAMES, "all"}:
        raise UsageError(refusal(names))
    return names
