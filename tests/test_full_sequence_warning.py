"""The warning about the full sequence."""

import sys

import pytest
import torch

import tracker
from tests.jacobians.test_rows import Mixing, Stack, random


def test_the_warning_of_the_full_sequence_says_that_it_is_exact_and_points_at_the_call():
    model, x = Stack([Mixing(random(8, 8, seed=i)) for i in range(2)]), random(1, 5, 8)
    with pytest.warns(UserWarning) as caught:
        tracker.measure(model, x, k=8, dtype=torch.float64)
        here = sys._getframe().f_lineno - 1
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, here)
    text = str(warning.message)
    assert text.startswith(
        "block 1 (blocks.0): computed over the full sequence (exact, slower), because the faster method"
    )
    assert "failed its value check" in text and "was not used" in text and "another output" not in text
