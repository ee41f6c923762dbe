"""What is said of a value of `measures=` that names no choice."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from tracker.measures import choices
from tracker.measures.registry import BY_NAME


def refusal(measures: Sequence[Any]) -> str:
    """Return what is wrong with a value of `measures=` that names no choice, and what may be given."""
    allowed = ("all", *choices.choices())
    given = f"measures {', '.join(map(str, measures))!r}" if measures else "measures is empty"
    hints = []
    for name in (str(one) for one in measures if one not in allowed):
        if name in BY_NAME and BY_NAME[name].option:
            hints.append(f"{name} is a variable that {BY_NAME[name].option!r} measures")
        elif close := get_close_matches(name, allowed, 1):
            hints.append(f"did you mean {close[0]!r}?")
    meant = f" ({', '.join(hints)})" if hints else ""
    return (
        f"{given}{meant}; choose from {', '.join(allowed)} (all leaves out {', '.join(choices.expensive())}, which cost most: "
        f"{','.join(choices.everything())} adds them)"
    )
