"""Which steps a schedule includes."""

import pytest

from tracker.training.schedule import choose


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ((None, None, None), [0, 1, 2, 4, 8, 16]),
        ((7, None, None), [0, 7, 14]),
        ((None, (9, 3), None), [3, 9]),
        ((None, None, 2), []),  # the callback decides at the end of an epoch
    ],
)
def test_steps_of_a_schedule(given, steps):
    due = choose(*given)
    assert [step for step in range(20) if due(step)] == steps
