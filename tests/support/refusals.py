"""What is said of a model whose blocks are not found."""

import re
from typing import Any

import pytest

import tracker
from tests.support.models import tokens
from tracker.common.errors import UsageError

K = 4


def lines(message: str) -> list[Any]:
    """Return the blocks that a refusal proposes."""
    return [eval(line) for line in re.findall(r"^  blocks=(.*?)  #", message, re.MULTILINE)]


def refusal(model, inputs=None, **keywords):
    """Return the message with which a measurement is refused."""
    with pytest.raises(UsageError) as error:
        tracker.measure(model, tokens() if inputs is None else inputs, k=K, **keywords)
    return str(error.value)
