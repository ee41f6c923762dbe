"""Whether intervals cover the truth as often as they promise."""

import numpy as np
from scipy import stats


def assert_covers(covered, low=0.95, high=0.95):
    """Check a coverage between `low` and `high`, within sampling error (99.9 %)."""
    covered = np.asarray(covered)
    fewest, _ = stats.binom.interval(0.999, covered.size, low)
    _, most = stats.binom.interval(0.999, covered.size, high)
    assert fewest <= covered.sum() <= most, f"{covered.mean():.4f} of {covered.size}"
