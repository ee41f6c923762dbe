"""Fits and intervals against scipy, statsmodels and simulation."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from tests.support.coverage import assert_covers
from tracker.analysis.regression import (
    clustered_mean,
    detectable_correlation,
    exponential_fit,
    linear_fit,
    mean_interval,
    partial_correlation,
    power_of_correlation,
)


def holds(value, low, high):
    return (np.asarray(low) <= value) & (value <= np.asarray(high))


def test_regression_with_groups_is_that_with_dummies():
    """Frisch and Waugh: slope and p of x in a regression with group dummies."""
    random = np.random.default_rng(1)
    groups = np.repeat([0, 1, 2], 6)
    x = random.standard_normal(18) + 5 * groups
    y = 0.5 * x - 9 * groups + random.standard_normal(18)
    design = np.column_stack([x, *(groups == g for g in range(3))])
    weights, residual, *_ = np.linalg.lstsq(design, y, rcond=None)
    df = 18 - 4
    error = np.sqrt(residual[0] / df * np.linalg.inv(design.T @ design)[0, 0])
    fit = linear_fit(x, y, groups)
    assert fit["slope"] == pytest.approx(weights[0])
    assert fit["p"] == pytest.approx(2 * stats.t.sf(abs(weights[0] / error), df))
    # Simpson's paradox is what the groups are for
    assert linear_fit(x, y)["slope"] < 0 < fit["slope"]


def test_partial_correlation_is_that_of_a_multiple_regression():
    random = np.random.default_rng(4)
    depth, width = random.standard_normal((2, 20))
    x = depth + 0.3 * random.standard_normal(20)
    y = 2 * depth - width + 0.5 * x + 0.2 * random.standard_normal(20)
    oracle = sm.OLS(y, sm.add_constant(np.column_stack([x, depth, width]))).fit()
    fit = partial_correlation(x, y, [depth, width])
    assert fit["slope"] == pytest.approx(oracle.params[1]) and fit["p"] == pytest.approx(
        oracle.pvalues[1]
    )
    t = oracle.tvalues[1]
    assert fit["r2"] == pytest.approx(t**2 / (t**2 + oracle.df_resid))


@pytest.mark.parametrize("a, b", [(-3.0, -0.02), (1e-3, 40.0), (5.0, 1e-6)])
def test_an_exponential_is_found(a, b):
    x = np.random.default_rng(5).random(12) / abs(b)
    fit = exponential_fit(x, a * np.exp(b * x))
    assert fit["a"] == pytest.approx(a, rel=1e-5) and fit["b"] == pytest.approx(b, rel=1e-4)
    assert fit["r2"] == pytest.approx(1)


def test_an_exponential_is_fitted_in_y_not_in_its_logarithm():
    random = np.random.default_rng(6)
    x = random.random(30)
    y = np.exp(2 * x) + 0.3 * random.standard_normal(30).clip(-2, 2)
    fit = exponential_fit(x, y)

    def left(a, b):
        return ((y - a * np.exp(b * x)) ** 2).sum()

    best = left(fit["a"], fit["b"])
    assert all(
        best <= left(fit["a"] * i, fit["b"] * j) for i in (0.99, 1, 1.01) for j in (0.99, 1, 1.01)
    )
    assert fit["r2"] == pytest.approx(1 - best / ((y - y.mean()) ** 2).sum())


LINE = np.arange(1.0, 9)
NO_FIT = {
    "three points": (LINE[:3], LINE[:3] ** 2),
    "constant x": (np.ones(5), LINE[:5]),
    "constant y": (LINE[:5], np.ones(5)),
}
UNDEFINED = {
    **{f"linear, {case}": (linear_fit, *points) for case, points in NO_FIT.items()},
    **{f"exponential, {case}": (exponential_fit, *points) for case, points in NO_FIT.items()},
    "exponential, both signs": (exponential_fit, LINE, LINE - 1.5),
    "exponential, undefined": (exponential_fit, np.append(np.nan, LINE), np.append(1, LINE)),
    "constant but for rounding": (linear_fit, [0.1] * 3 + [0.2] * 3, LINE[:6], [0] * 3 + [1] * 3),
    "explained by the controls": (partial_correlation, LINE, LINE**2, [LINE]),
    "as many controls as points": (
        partial_correlation,
        LINE[:5],
        LINE[:5] ** 2,
        [LINE[:5] ** power for power in (3, 0.5, 1.5)],
    ),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_no_fit(case):
    fit, x, *more = UNDEFINED[case]
    found = fit(x, *more)
    assert found.pop("n") == len(x)
    found.pop("df", None)
    assert np.isnan([*found.values()]).all()


@pytest.mark.filterwarnings("error")
def test_the_interval_of_points_on_a_line_is_a_point():
    for slope in (2.0, -2.0):
        fit = linear_fit(np.arange(9.0), slope * np.arange(9.0))
        assert fit["r_low"] == fit["r_high"] == np.sign(slope)
        assert fit["r2_low"] == fit["r2_high"] == 1 and fit["p"] < 1e-9


def clustered(random, sizes, icc, count=20_000):
    """Prompts of mean 0 and variance 1, of which those of one source share `icc`; and their sources."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    shared = random.standard_normal((count, len(sizes)))[:, label]
    return np.sqrt(icc) * shared + np.sqrt(1 - icc) * random.standard_normal(
        (count, len(label))
    ), label


def independent(draw, prompts):
    """Prompts without sources, drawn with mean 0."""
    return lambda random: (draw(random, (20_000, prompts)), None)


def of_sources(sizes, icc):
    return lambda random: clustered(random, sizes, icc)


UNEVEN = [(1, 2, 3, 4, 5, 6), (2, 4, 8, 30), (1,) * 20 + (20,)]
USUAL = 0.95, 0.95
# How prompts are drawn, and in which share of simulations the interval of their mean holds it
COVERED = [
    # The bootstrap percentiles used before covered it in 0.84 of simulations with 6 prompts.
    *((independent(np.random.Generator.standard_normal, n), *USUAL) for n in (2, 6, 40)),
    *((of_sources((6,) * 4, icc), *USUAL) for icc in (0, 0.5, 1)),
    # There the degrees of freedom are an approximation: G - 1 of them would cover 0.93, 0.86 and 0.86.
    *((of_sources(sizes, icc), 0.94, 0.985) for sizes in UNEVEN for icc in (0, 0.5)),
    # Without the sources it is too narrow.
    (lambda random: (clustered(random, (6,) * 4, 0.5)[0], None), 0, 0.7),
]


@pytest.mark.parametrize("drawn, low, high", COVERED)
def test_coverage_of_the_interval_of_the_mean(drawn, low, high):
    values, label = drawn(np.random.default_rng(21))
    assert_covers(holds(0, *mean_interval(values, label)), low, high)


def test_errors_of_clusters_are_cr2_with_bell_and_mccaffrey_s_degrees_of_freedom():
    """By matrices: the cluster's part of the projection, to the power of minus one half."""
    values = np.random.default_rng(23).random(11)
    label = np.array([0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    mean, error, df = clustered_mean(values, label)
    N, X = 11, np.ones((11, 1))
    left = np.eye(N) - X @ X.T / N
    parts = []
    for source in range(4):
        rows = np.flatnonzero(label == source)
        worth, axes = np.linalg.eigh(left[np.ix_(rows, rows)])
        parts.append(X[rows, 0] @ (axes / np.sqrt(worth)) @ axes.T @ left[rows] / N)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(np.sqrt(sum((part @ values) ** 2 for part in parts)))
    cross = np.array([[a @ b for a in parts] for b in parts])
    assert df == pytest.approx(np.trace(cross) ** 2 / (cross**2).sum())


@pytest.mark.parametrize("slope", [0, 0.6])
def test_the_intervals_of_r_and_r2_are_fisher_s(slope):
    """One degree of freedom less for each control, and for each further group; R² is from 0 where r may be 0."""
    random, groups = np.random.default_rng(8), np.arange(16) % 4
    x, y, *controls = random.standard_normal((5, 16))
    y = y + slope * x
    oracle = stats.pearsonr(x, y).confidence_interval()
    plain = linear_fit(x, y)
    assert (plain["r_low"], plain["r_high"]) == pytest.approx((oracle.low, oracle.high), rel=1e-10)
    for fit, df in (
        (plain, 14),
        (partial_correlation(x, y, controls), 11),
        (linear_fit(x, y, groups), 11),
    ):
        margin = 1.959964 / np.sqrt(df - 1)
        ends = np.tanh(np.arctanh(fit["r"]) + np.array([-margin, margin]))
        assert fit["df"] == df
        assert (fit["r_low"], fit["r_high"]) == pytest.approx(tuple(ends), rel=1e-6)
        squares = sorted(ends**2) if ends.prod() > 0 else (0, max(ends**2))
        assert (fit["r2_low"], fit["r2_high"]) == pytest.approx(tuple(squares), rel=1e-6)


def test_one_degree_of_freedom_excludes_no_correlation():
    x, y, *others = np.random.default_rng(25).standard_normal((5, 6))
    fit = partial_correlation(x, y, others)
    assert (fit["r_low"], fit["r_high"], fit["r2_low"], fit["r2_high"]) == (
        -1,
        1,
        0,
        1,
    ) and np.isfinite(fit["p"])


def test_means_leave_out_what_is_undefined_and_one_prompt_has_no_interval():
    values = np.random.default_rng(9).random((2, 30))
    padded = np.concatenate([values, np.full((2, 1), np.nan)], 1)
    assert np.isfinite(mean_interval(padded)).all()
    np.testing.assert_allclose(mean_interval(padded), mean_interval(values), rtol=1e-12)
    assert np.isnan(mean_interval(values[:, :1])).all()
    label = np.repeat([0, 1, 2], 10)
    values[0, 25:] = values[1, :20] = np.nan  # the second point has prompts of one source left
    (low, none), _ = mean_interval(values, label)
    assert low == pytest.approx(mean_interval(values[0, :25], label[:25])[0]) and np.isnan(none)


def test_detectable_correlation_has_the_power_that_it_states():
    for df in (5, 30, 200):
        assert power_of_correlation(detectable_correlation(df), df) == pytest.approx(0.8)
        assert power_of_correlation(0, df) == pytest.approx(0.05, abs=0.005)
    assert np.isnan([detectable_correlation(1), power_of_correlation(0.5, 1)]).all()
    assert 0.9 < detectable_correlation(2) < 1 and 0 < power_of_correlation(0.5, 2) < 1
