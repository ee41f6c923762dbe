"""What a caller can mend."""


class UsageError(ValueError):
    """What was asked can't be done with this model or these inputs; the message says what to do instead."""
