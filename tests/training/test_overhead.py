"""When a training is told that measuring takes too much of its time."""

import warnings

import pytest

from tracker.training import schedule
from tracker.training.schedule import Overhead

# Seconds of training and of measuring, one pair for each measurement; those after which a warning is given, of which the last
# is that at the end of the run.
RUNS = {
    "a slow first measurement": ([(0.0, 20.0), *[(9.9, 0.1)] * 4], []),
    "a single measurement": ([(1.0, 5.0)], []),
    "a short run": ([(0.0, 5.0), *[(0.92, 0.08)] * 10], [11]),
    "half a minute of measuring": ([(0.0, 5.0), *[(92.0, 8.0)] * 5], [4]),
}


@pytest.mark.parametrize("limit", [0.05, None])
@pytest.mark.parametrize("case", RUNS)
def test_a_share_above_the_limit_is_said_once(case, limit, monkeypatch):
    """After half a minute of measuring, or at the end; the first measurement does not count."""
    seconds, expected = RUNS[case]
    now, said, overhead = [0.0], [], Overhead(limit)
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: now[0])
    for i, (training, measuring) in enumerate([*seconds, (0.0, None)]):
        now[0] += training
        with warnings.catch_warnings(record=True, action="always") as caught:
            if measuring is None:
                overhead.warn(ended=True)
            else:
                with overhead:
                    now[0] += measuring
                overhead.warn()
        said += [(i, str(warning.message)) for warning in caught]
    assert [i for i, _ in said] == ([] if limit is None else expected)
    for _, text in said:
        assert text.startswith("measuring took 8% of this run's time after the first measurement, ")
    assert len(seconds) > 1 or overhead.share == 0
