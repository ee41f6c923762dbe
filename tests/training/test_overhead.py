"""When a training is told that measuring takes too much of its time."""

import warnings

import pytest

from tracker.training import schedule
from tracker.training.schedule import Overhead

LIMIT = 0.05


class Run:
    """A training on a clock of its own, with its warnings."""

    def __init__(self, monkeypatch, limit: float | None = LIMIT):
        self.now = 0.0
        monkeypatch.setattr(schedule.time, "perf_counter", lambda: self.now)
        self.overhead = Overhead(limit)

    def measure(self, seconds: float, after: float = 0.0) -> str:
        """Train for `after` seconds and measure for some; return the warning, or ""."""
        self.now += after
        with self.overhead:
            self.now += seconds
        return said(self.overhead.warn)

    def end(self, after: float = 0.0) -> str:
        self.now += after
        return said(lambda: self.overhead.warn(ended=True))


def said(warn) -> str:
    with warnings.catch_warnings(record=True, action="always") as caught:
        warn()
    return " ".join(str(warning.message) for warning in caught)


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_a_slow_first_measurement_is_no_reason_for_a_warning(run):
    assert run.measure(20.0) == ""
    for _ in range(4):
        assert run.measure(0.1, after=9.9) == ""
    assert run.end() == ""


def test_a_share_above_the_limit_is_said_at_the_end_of_a_short_run(run):
    run.measure(5.0)
    assert [run.measure(0.08, after=0.92) for _ in range(10)] == [""] * 10
    assert run.end().startswith(
        "measuring took 8% of this run's time after the first measurement, more than max_overhead=0.05"
    )
    assert run.end() == ""  # once


def test_a_share_above_the_limit_is_said_after_half_a_minute_of_measuring(run):
    run.measure(5.0)
    found = [run.measure(8.0, after=92.0) for _ in range(5)]
    assert [text[:18] for text in found] == ["", "", "", "measuring took 8% ", ""]


def test_a_single_measurement_has_no_share(run):
    run.measure(5.0, after=1.0)
    assert run.overhead.share == 0 and run.end(after=1.0) == ""


def test_no_limit_no_warning(monkeypatch):
    run = Run(monkeypatch, limit=None)
    assert [run.measure(50.0, after=1.0) for _ in range(4)] == [""] * 4 and run.end() == ""
