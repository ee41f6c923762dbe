"""What a user is told when a call is refused."""

import pytest

from tracker.common.errors import UsageError


def refused(message: str):
    """Return the context of a call that is refused with a message in which this pattern is found."""
    return pytest.raises(UsageError, match=message)
