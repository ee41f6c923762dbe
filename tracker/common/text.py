"""Words, lines and sentences of messages, those about steps with the same weights among them."""

import re
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any

WIDTH = 80  # columns of the printed text
LABEL = 12
# Paths, commits, and numbers that differ between steps
DIFFERING = re.compile(r"/\S+|\b[0-9a-f]{8,64}\b|\d+(?:\.\d+)?")


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "checkpoint"), counted(1200, "prompt")
    ('1 checkpoint', '1,200 prompts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def capitalised(text: str) -> str:
    """Return a text with its first letter as a capital, and the others as they are, which `str.capitalize` changes."""
    return text[0].upper() + text[1:]


def join_names(names: Iterable[int | str]) -> str:
    """Join names with commas, eliding the middle of a long list."""
    shown = [str(name) for name in names]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:13], "…", *shown[-2:]])


def cause(reason: str) -> str:
    """Return what the reasons of several steps have in common if they differ only in paths, numbers and commits.

    >>> cause("/runs/a.pt can't be loaded: 2.5 GB at step 128")
    "* can't be loaded: * GB at step *"
    """
    return DIFFERING.sub("*", reason)


def by_cause(reasons: Mapping[int, str]) -> list[str]:
    """Return a line for each cause: the steps that have it, and the reason of the last of them.

    >>> by_cause({1: "2 bytes are missing", 2: "no file", 4: "7 bytes are missing"})
    ['2 steps (1, 4), the last: 7 bytes are missing', 'step 2: no file']
    """
    steps: dict[str, list[int]] = {}
    for step, reason in reasons.items():
        steps.setdefault(cause(reason), []).append(step)
    lines = []
    for alike in steps.values():
        several = f"{len(alike)} steps ({join_names(alike)}), the last"
        label = several if len(alike) > 1 else f"step {alike[0]}"
        lines.append(f"{label}: {reasons[alike[-1]]}")
    return lines


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
    return escaped(words if len(words) <= most else f"{words[:most]} …")


def escaped(text: str) -> str:
    r"""Return a text with its control characters, other than ends of lines, as escapes: a terminal would obey them."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def entry(label: str, text: str) -> str:
    """Return a labelled text, wrapped to `WIDTH` columns."""
    return "\n".join(
        wrap(
            text,
            WIDTH,
            initial_indent=f"{label:<{LABEL}} ",
            subsequent_indent=" " * (LABEL + 1),
            break_long_words=False,
        )
    )


def duration(seconds: float) -> str:
    """Format seconds to two digits, in a unit that a person reads.

    >>> duration(0.034), duration(7.26), duration(412.0), duration(54321.0)
    ('0.03 s', '7.3 s', '6.9 min', '15 h')
    """
    if seconds < 0.1:
        return f"{seconds:.2f} s"
    if seconds >= 3600:
        value, unit = seconds / 3600, "h"
    elif seconds >= 100:
        value, unit = seconds / 60, "min"
    else:
        value, unit = seconds, "s"
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def size(bytes: int) -> str:
    """Format a number of bytes.

    >>> size(123_456_789), size(4 << 30), size(4 << 40)
    ('123 MB', '4.29 GB', '4.4 TB')
    """
    if bytes >= 1e12:
        return f"{bytes / 1e12:.3g} TB"
    return f"{bytes / 1e9:.3g} GB" if bytes >= 1e9 else f"{bytes / 1e6:.3g} MB"


def at_tokens(tokens: object) -> str:
    """Say in words which tokens are measured, from the option `tokens` or the attribute of a result.

    >>> at_tokens("cls"), at_tokens("5"), at_tokens((0, -1))
    ('class token', 'token 5', 'tokens (0, -1)')
    """
    named = {
        "last": "last token",
        "last non-special": "last word",
        "cls": "class token",
        "all": "all tokens",
    }
    return named.get(str(tokens), f"token{'s' * (',' in str(tokens))} {tokens}")


UNTRAINED = "untrained, seed "  # prefix of the revision of an untrained model
ZERO_RATE = "steps 0 and 1 hold the same weights: a warm-up that starts at learning rate zero leaves the weights unchanged"


def find_repeats(fingerprints: Mapping[Any, str]) -> dict[Any, Any]:
    """Map each step, or run, whose fingerprint repeats an earlier one's to the first with this fingerprint; "" is none."""
    first: dict[str, Any] = {}
    repeats = {}
    for step, fingerprint in sorted(fingerprints.items()):
        if fingerprint and first.setdefault(fingerprint, step) != step:
            repeats[step] = first[fingerprint]
    return repeats


def describe_repeat(step: int, earlier: int) -> str:
    """Describe in a sentence that two steps have the same weights."""
    if (earlier, step) == (0, 1):
        return ZERO_RATE
    return f"steps {earlier} and {step} hold the same weights in every tensor: at least one of them is mislabelled"
