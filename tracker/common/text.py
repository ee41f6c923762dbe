"""Words and lines of messages."""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "checkpoint"), counted(1200, "prompt")
    ('1 checkpoint', '1,200 prompts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join_names(names: Iterable[int | str]) -> str:
    """Join names with commas, eliding the middle of a long list."""
    shown = [str(name) for name in names]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:13], "…", *shown[-2:]])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second where the first announces it with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return printable(" ".join(lines[: 2 if lines[0].rstrip().endswith(":") else 1]), 500)


def printable(text: str, most: int = 2000) -> str:
    r"""Return a text as one line that any terminal shows as it is: a file may hold anything, and error messages quote it.

    Args:
        most: characters to keep.

    >>> print(printable("no such\n type: \x1b[31m\ud800"))
    no such type: \x1b[31m\ud800
    """
    words = " ".join(text.split())
    words = words if len(words) <= most else f"{words[:most]} …"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
