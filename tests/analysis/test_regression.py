"""Fits and intervals against scipy, statsmodels and simulation."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats

from tests.support.coverage import assert_covers
from tracker.analysis.regression import (
    cluster_means,
    clustered_mean,
    detectable_correlation,
    exponential_fit,
    holm,
    linear_fit,
    mean_interval,
    partial_correlation,
    power_of_correlation,
)


def holds(value, low, high):
    return (np.asarray(low) <= value) & (value <= np.asarray(high))


def test_regression_without_groups_agrees_with_scipy():
    x, y = np.random.default_rng(0).standard_normal((2, 9))
    fit, oracle = linear_fit(x, y), stats.linregress(x, y)
    assert fit["r"] == pytest.approx(oracle.rvalue) and fit["r2"] == pytest.approx(oracle.rvalue**2)
    assert fit["slope"] == pytest.approx(oracle.slope) and fit["p"] == pytest.approx(oracle.pvalue)
    assert 0 <= fit["r2_low"] < fit["r2"] < fit["r2_high"] <= 1 and fit["n"] == 9


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


@pytest.mark.parametrize(
    "x, y", [([1.0, 2, 3], [1.0, 2, 4]), ([1.0] * 5, range(5)), (range(5), [2.0] * 5)]
)
def test_fits_of_three_points_or_without_spread_are_undefined(x, y):
    fit = linear_fit(np.array(x, float), np.array(y, float))
    assert np.isnan(
        [fit[name] for name in ("r", "r2", "slope", "p", "r_low", "r_high", "r2_low", "r2_high")]
    ).all() and fit["n"] == len(x)


def test_holm_by_its_definition():
    p = np.random.default_rng(3).random(20) ** 4
    order = np.argsort(p)
    for alpha in np.linspace(0.001, 0.6, 97):
        rejected = np.zeros(20, bool)
        for i, j in enumerate(order):
            if p[j] > alpha / (20 - i):
                break
            rejected[j] = True
        np.testing.assert_array_equal(holm(p) <= alpha, rejected)


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


def test_a_variable_that_the_controls_explain_has_no_partial_correlation():
    x = np.arange(8.0)
    assert np.isnan(partial_correlation(x, x**2, [x])["r2"])
    assert np.isnan(
        partial_correlation(x[:5], x[:5] ** 2, [x[:5] ** 3, x[:5] ** 0.5, x[:5] ** 1.5])["p"]
    )


@pytest.mark.parametrize("a, b", [(2.0, 0.7), (-3.0, -0.02), (1e-3, 40.0), (5.0, 1e-6)])
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


@pytest.mark.parametrize(
    "x, y",
    [
        (range(5), [-1, 1, 2, 3, 4]),
        ([np.nan, 1, 2, 3, 4], range(1, 6)),
        (range(5), [2] * 5),
        ([1] * 5, range(1, 6)),
        (range(3), [1, 2, 4]),
    ],
    ids=["both signs", "undefined", "constant y", "constant x", "three points"],
)
def test_no_exponential(x, y):
    fit = exponential_fit(np.array(x, float), np.array(y, float))
    assert np.isnan([fit["a"], fit["b"], fit["r2"]]).all() and fit["n"] == len(x)


@pytest.mark.filterwarnings("error")
def test_the_interval_of_points_on_a_line_is_a_point():
    for slope in (2.0, -2.0):
        fit = linear_fit(np.arange(9.0), slope * np.arange(9.0))
        assert fit["r_low"] == fit["r_high"] == np.sign(slope)
        assert fit["r2_low"] == fit["r2_high"] == 1 and fit["p"] < 1e-9


def test_coverage_of_the_interval_of_the_mean():
    """The bootstrap percentiles used before covered it in 0.84 of simulations with 6 prompts."""
    random = np.random.default_rng(7)
    for prompts in (2, 6, 40):
        assert_covers(holds(0, *mean_interval(random.standard_normal((20_000, prompts)))))


def test_skewness_reduces_the_coverage_of_the_interval_of_the_mean():
    """What t intervals are known to lose: 0.93 at a skewness of 1, 0.89 at 2 with 6 prompts."""
    random = np.random.default_rng(7)
    assert_covers(holds(1, *mean_interval(random.gamma(4, 0.25, (20_000, 6)))), 0.925, 0.935)
    assert_covers(holds(1, *mean_interval(random.exponential(1, (20_000, 6)))), 0.88, 0.89)
    assert_covers(holds(1, *mean_interval(random.exponential(1, (20_000, 40)))), 0.925, 0.935)


def clustered(random, sizes, icc, count=20_000):
    """Prompts of mean 0 and variance 1, of which those of one source share `icc`; and their sources."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    shared = random.standard_normal((count, len(sizes)))[:, label]
    return np.sqrt(icc) * shared + np.sqrt(1 - icc) * random.standard_normal(
        (count, len(label))
    ), label


@pytest.mark.parametrize("icc", [0, 0.5, 1])
def test_prompts_of_four_sources(icc):
    values, label = clustered(np.random.default_rng(20), (6, 6, 6, 6), icc)
    assert_covers(holds(0, *mean_interval(values, label)))
    if icc == 0.5:  # without their sources
        assert holds(0, *mean_interval(values)).mean() < 0.7


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 5, 6), (2, 4, 8, 30), (1,) * 20 + (20,)])
def test_sources_of_different_sizes(sizes):
    """There the degrees of freedom are an approximation: G - 1 of them would cover 0.93, 0.86 and 0.86."""
    for icc in (0, 0.5):
        assert_covers(
            holds(0, *mean_interval(*clustered(np.random.default_rng(21), sizes, icc))), 0.94, 0.985
        )


@pytest.mark.parametrize("sizes, coverage", [((1, 1, 30), 0.91), ((1, 1, 100), 0.81)])
def test_intervals_are_too_narrow_where_one_source_has_nearly_all_prompts(sizes, coverage):
    """If its prompts are alike, the mean depends on little but what they share, whose variance one source cannot show."""
    for icc in (0.5, 1):
        values, label = clustered(np.random.default_rng(21), sizes, icc)
        assert_covers(holds(0, *mean_interval(values, label)), coverage - 0.01, coverage + 0.01)
    independent = clustered(np.random.default_rng(21), sizes, 0)
    assert_covers(holds(0, *mean_interval(*independent)), 0.97, 0.98)


def test_of_sources_of_one_size_it_is_the_t_interval_of_their_means():
    random = np.random.default_rng(22)
    values, label = random.random((3, 12)), np.array(list("abcd" * 3))
    means = np.stack([values[:, label == name].mean(1) for name in "abcd"])
    expected = stats.t.interval(0.95, 3, means.mean(0), stats.sem(means))
    np.testing.assert_allclose(mean_interval(values, label), expected, rtol=1e-12)
    alone = stats.t.interval(0.95, 11, values.mean(1), stats.sem(values, 1))
    for labels in (None, np.arange(12)):
        np.testing.assert_allclose(mean_interval(values, labels), alone, rtol=1e-12)
    assert np.isnan(mean_interval(values, np.full(12, "one"))).all(), (
        "one cluster shows no variance"
    )


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


def test_the_interval_of_r_is_scipy_s():
    random = np.random.default_rng(8)
    for n in (4, 5, 9, 60):
        x, y = random.standard_normal((2, n))
        fit, oracle = linear_fit(x, y), stats.pearsonr(x, y).confidence_interval()
        assert (fit["r_low"], fit["r_high"]) == pytest.approx((oracle.low, oracle.high), rel=1e-10)


def fits_of(design, rho, count=2000):
    """Fits of pairs with correlation rho: plain, with three controls, or within four groups."""
    random = np.random.default_rng(24)
    n, group = (9, None) if design != "groups" else (16, np.repeat(np.arange(4), 4))
    for _ in range(count):
        x, other = random.standard_normal((2, n))
        y = rho * x + np.sqrt(1 - rho**2) * other
        if design == "plain":
            yield linear_fit(x, y)
        elif design == "groups":
            yield linear_fit(x + 5 * group, y - 3 * group, group)
        else:
            controls = random.standard_normal((3, n))
            yield partial_correlation(x + controls.sum(0), y - 2 * controls[0], list(controls))


@pytest.mark.parametrize("design", ["plain", "controls", "groups"])
@pytest.mark.parametrize("rho", [0, 0.6])
def test_intervals_of_r_and_r2_cover_them(design, rho):
    """Fisher's z is approximate, by at most half a per cent here; a bootstrap interval of R^2 never contained 0."""
    ends = np.array(
        [
            [fit[end] for end in ("r_low", "r_high", "r2_low", "r2_high")]
            for fit in fits_of(design, rho)
        ]
    ).T
    assert_covers(holds(rho, *ends[:2]), 0.945, 0.955)
    # Where r's reaches below 0, R^2's holds (-r)^2 too
    assert_covers(holds(rho**2, *ends[2:]), 0.945, 0.975)
    assert (ends[2] <= ends[3]).all() and (ends[2][(ends[0] < 0) & (ends[1] > 0)] == 0).all()


def test_one_degree_of_freedom_excludes_no_correlation():
    x, y, *others = np.random.default_rng(25).standard_normal((5, 6))
    fit = partial_correlation(x, y, others)
    assert (fit["r_low"], fit["r_high"], fit["r2_low"], fit["r2_high"]) == (
        -1,
        1,
        0,
        1,
    ) and np.isfinite(fit["p"])


def test_averaged_copies_count_as_one_point():
    """Of pairs that are copies, p is that of half as many points."""
    random = np.random.default_rng(26)
    label = np.repeat(list("abcdef"), 2)
    x, y = (np.repeat(v, 2) for v in random.standard_normal((2, 6)))
    means = cluster_means(pd.DataFrame({"x": x, "y": y}), label)
    fit = linear_fit(means.x.to_numpy(), means.y.to_numpy())
    oracle = stats.linregress(x[::2], y[::2])
    assert fit["n"] == 6 and fit["p"] == pytest.approx(oracle.pvalue)
    assert linear_fit(x, y)["p"] < fit["p"]


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


@pytest.mark.parametrize("df, rho", [(8, 0.6), (30, 0.4), (30, 0.0), (64, -0.3)])
def test_power_is_the_share_of_samples_with_small_p(df, rho):
    random = np.random.default_rng(27)
    x = random.standard_normal((4000, df + 2))
    y = rho * x + np.sqrt(1 - rho**2) * random.standard_normal(x.shape)
    r = np.array([np.corrcoef(*pair)[0, 1] for pair in zip(x, y, strict=True)])
    p = 2 * stats.t.sf(abs(r) * np.sqrt(df / (1 - r**2)), df)
    assert (p < 0.05).mean() == pytest.approx(power_of_correlation(rho, df), abs=0.03)


def test_detectable_correlation_has_the_power_that_it_states():
    for df in (5, 30, 200):
        assert power_of_correlation(detectable_correlation(df), df) == pytest.approx(0.8)
    assert np.isnan([detectable_correlation(1), power_of_correlation(0.5, 1)]).all()
    assert 0.9 < detectable_correlation(2) < 1 and 0 < power_of_correlation(0.5, 2) < 1


def test_values_that_are_constant_but_for_rounding_have_no_correlation():
    x, groups = np.array([0.1] * 3 + [0.2] * 3), np.array([0] * 3 + [1] * 3)
    assert np.isnan(linear_fit(x, np.arange(6.0) ** 2, groups)["r"])
