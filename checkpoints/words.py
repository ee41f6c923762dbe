"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "checkpoint"), counted(1200, "prompt")
    ('1 checkpoint', '1,200 prompts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
