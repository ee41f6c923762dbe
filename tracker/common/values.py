"""Typed values of options: whole numbers, positions, byte sizes, names, and choices.

A `ValueType` converts what a command line, a YAML file or a Python caller gives. A choice is a Literal, which the parser of
command lines reads itself.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

FinalNorm = Literal["auto", "include", "exclude"]
Method = Literal["auto", "full", "krylov"]  # of finding singular vectors
# Of the products that Jacobians in float32 are made of
Precision = Literal["float32", "tf32", "bfloat16"]
Dtype = Literal["float32", "float64"]
Witness = Literal["model", "off"]  # whether the caller's model itself is asked about its blocks
Derivative = Literal["checked", "autograd"]  # whether J is compared with differences of values
UNITS = ("B", "KB", "MB", "GB", "TB")
TOKEN_CHOICES = ("last", "cls", "all")
# Of walks and replays, by default
PROJECT = "block-coupling"
LOG: Final = "main"


class ValueTypeError(ArgumentTypeError, ValueError):
    """A text that is no value of an option's type; argparse prints the message of an ArgumentTypeError unchanged."""


@dataclass(frozen=True)
class ValueType:
    """The type of an option: a name for `--help` and a function from text, or from a value of YAML or Python, to the value."""

    name: str
    convert: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Convert a value.

        Raises:
            ValueTypeError: if it is not of this type; the message states what is allowed.
        """
        return self.convert(value)

    def __str__(self) -> str:
        return self.name


def as_path(option: str, value: Any) -> Path | None:
    """Return a directory that was given as text or as a path; ~ is the home directory.

    Raises:
        ValueError: if it is neither.
    """
    if value is None or isinstance(value, (str, PathLike)):
        return None if value is None else Path(value).expanduser()
    raise ValueError(f"--{option} {value!r}; give a directory, as text or as a path")


def whole_numbers(value: Any) -> list[int]:
    """Return the whole numbers in one number or several, Python's or numpy's; an empty list for anything else."""
    if isinstance(value, bool):
        return []
    try:
        return [index(value)]
    except TypeError:
        several = value if isinstance(value, Iterable) and not isinstance(value, str) else []
    try:
        return [index(entry) for entry in several]
    except TypeError:
        return []


def _numbers(value: Any) -> list[int]:
    """Return the whole numbers in a text, where 9-11 is 9, 10, 11, or in any other value; an empty list where there are none."""
    if not isinstance(value, str):
        return whole_numbers(value)
    numbers = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", part)
        if match is None:
            return []
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def _integers(value: Any) -> list[int]:
    if numbers := _numbers(value):
        return numbers
    raise ValueTypeError(
        f"{value!r}; give whole numbers with commas between them (in Python, one or a list)"
    )


def _integer(value: Any) -> int:
    numbers = _numbers(value)
    if len(numbers) != 1:
        raise ValueTypeError(f"{value!r}; give one whole number")
    return numbers[0]


def _count_or_integers(value: Any) -> int | list[int]:
    numbers = _integers(value)
    if len(numbers) > 1 or not isinstance(value, (Integral, str)):
        return numbers
    if numbers[0] < 2:
        raise ValueTypeError(
            f"{value!r}; give a number of tokens, at least 2, or a list of positions"
        )
    return numbers[0]


def _tokens(value: Any) -> str | list[int]:
    if isinstance(value, str) and value in TOKEN_CHOICES:
        return value
    if numbers := _numbers(value):
        return numbers
    raise ValueTypeError(
        f"{value!r}; give last, cls, all or positions such as 0,-1 (in Python, also a list)"
    )


def _byte_size(value: Any) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)?", str(value).strip(), re.IGNORECASE)
    if match is None:
        raise ValueTypeError(
            f"{value!r}; give a number with a unit, such as 60GB (10^9 bytes) or 500MB"
        )
    return round(float(match[1]) * 1000 ** UNITS.index((match[2] or "B").upper()))


def _names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueTypeError(f"{value!r}; give names with commas between them")
    return sorted({name.strip() for name in names})


INTEGERS = ValueType("int,...", _integers)
INTEGER = ValueType("int", _integer)
COUNT_OR_INTEGERS = ValueType("int|int,int,...", _count_or_integers)
TOKENS = ValueType("|".join((*TOKEN_CHOICES, "int,...")), _tokens)
BYTE_SIZE = ValueType("bytes", _byte_size)
NAMES = ValueType("name,...", _names)
