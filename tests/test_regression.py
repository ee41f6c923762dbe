"""Fits and intervals against scipy, statsmodels and simulation."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from tracker.regression import exponential_fit, holm, linear_fit, mean_interval, onset, partial_correlation


def test_regression_is_scipys_without_groups():
    x, y = np.random.default_rng(0).standard_normal((2, 9))
    fit, oracle = linear_fit(x, y), stats.linregress(x, y)
    assert fit["r"] == pytest.approx(oracle.rvalue) and fit["r2"] == pytest.approx(oracle.rvalue**2)
    assert fit["slope"] == pytest.approx(oracle.slope) and fit["p"] == pytest.approx(oracle.pvalue)
    assert 0 <= fit["r2_low"] < fit["r2"] < fit["r2_high"] <= 1 and fit["n"] == 9


def test_at_fixed_group_it_is_the_regression_with_a_dummy_for_each():
    """Frisch and Waugh: slope and p of x beside group dummies, by least squares."""
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
    assert linear_fit(x, y)["slope"] < 0 < fit["slope"]  # Simpson's paradox is what the groups are for


@pytest.mark.parametrize("x, y", [([1.0, 2, 3], [1.0, 2, 4]), ([1.0] * 5, range(5)), (range(5), [2.0] * 5)])
def test_nothing_is_said_of_three_points_or_without_spread(x, y):
    fit = linear_fit(np.array(x, float), np.array(y, float))
    assert np.isnan([fit[name] for name in ("r", "r2", "slope", "p", "r2_low", "r2_high")]).all() and fit["n"] == len(x)


def test_interval_narrows_with_points():
    random = np.random.default_rng(2)
    widths = []
    for n in (8, 200):
        x = random.standard_normal(n)
        fit = linear_fit(x, x + random.standard_normal(n))
        widths.append(fit["r2_high"] - fit["r2_low"])
    assert widths[1] < 0.5 * widths[0]


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


def test_other_variables_held_fixed_are_those_of_a_multiple_regression():
    random = np.random.default_rng(4)
    depth, width = random.standard_normal((2, 20))
    x = depth + 0.3 * random.standard_normal(20)
    y = 2 * depth - width + 0.5 * x + 0.2 * random.standard_normal(20)
    oracle = sm.OLS(y, sm.add_constant(np.column_stack([x, depth, width]))).fit()
    fit = partial_correlation(x, y, [depth, width])
    assert fit["slope"] == pytest.approx(oracle.params[1]) and fit["p"] == pytest.approx(oracle.pvalues[1])
    t = oracle.tvalues[1]
    assert fit["r2"] == pytest.approx(t**2 / (t**2 + oracle.df_resid))


def test_nothing_is_left_of_a_variable_that_the_others_explain():
    x = np.arange(8.0)
    assert np.isnan(partial_correlation(x, x**2, [x])["r2"])
    assert np.isnan(partial_correlation(x[:5], x[:5] ** 2, [x[:5] ** 3, x[:5] ** 0.5, x[:5] ** 1.5])["p"])


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
    assert all(best <= left(fit["a"] * i, fit["b"] * j) for i in (0.99, 1, 1.01) for j in (0.99, 1, 1.01))
    assert fit["r2"] == pytest.approx(1 - best / ((y - y.mean()) ** 2).sum())


def test_no_exponential_through_values_of_both_signs():
    assert np.isnan(exponential_fit(np.arange(5.0), np.array([-1.0, 1, 2, 3, 4]))["b"])


def test_the_mean_s_interval_covers_it_as_often_as_it_says():
    """400 sets of 40 prompts with a skew distribution of mean 1."""
    low, high = mean_interval(np.random.default_rng(7).gamma(4, 0.25, (400, 40)))
    assert 0.91 <= ((low <= 1) & (1 <= high)).mean() <= 0.98


def test_the_interval_of_r2_covers_it():
    random = np.random.default_rng(8)
    covered = 0
    for _ in range(100):
        x = random.standard_normal(60)
        fit = linear_fit(x, x + random.standard_normal(60))
        covered += fit["r2_low"] <= 0.5 <= fit["r2_high"]
    assert 88 <= covered <= 99


def test_means_leave_out_what_is_undefined_and_one_prompt_has_no_interval():
    values = np.random.default_rng(9).random((2, 30))
    padded = np.concatenate([values, np.full((2, 1), np.nan)], 1)
    assert np.isfinite(mean_interval(padded)).all()
    assert np.isnan(mean_interval(values[:, :1])).all()


STEPS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128])


def test_onset_of_a_ramp():
    """Rising by 0.1 with every doubling after step 8, to 0.4 at 128: a tenth of that is 0.4 of the way to 16."""
    ramp = np.array([0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4])
    prompts = ramp[:, None] * np.random.default_rng(10).normal(1, 0.1, 20)
    found = onset(STEPS, prompts)
    expected = np.exp(np.log(9) + 0.4 * (np.log(17) - np.log(9))) - 1
    assert found["step"] == pytest.approx(expected) and found["low"] <= found["step"] <= found["high"]


def test_a_curve_that_never_leaves_has_no_onset_but_by_chance():
    """Noise about the null level: at most some 5 % of curves seem to leave it, though the largest of nine steps is looked at."""
    random = np.random.default_rng(11)
    left = [np.isfinite(onset(STEPS, random.normal(0, 1, (9, 40)))["step"]) for _ in range(60)]
    assert np.mean(left) <= 0.1


def test_prompts_and_steps_that_are_undefined_do_not_move_the_onset():
    ramp = np.array([0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4])
    prompts = ramp[:, None] * np.random.default_rng(10).normal(1, 0.1, 20)
    broken = prompts.copy()
    broken[-1, 3] = broken[2, 5] = np.nan
    assert onset(STEPS, broken)["step"] == pytest.approx(onset(STEPS, np.delete(prompts, [3, 5], 1))["step"])
    broken = prompts.copy()
    broken[0] = np.nan
    assert onset(STEPS, broken)["step"] == pytest.approx(onset(STEPS[1:], prompts[1:])["step"])
    assert np.isnan(onset(STEPS, np.full((9, 20), np.nan))["step"])


def test_onset_at_the_first_step():
    assert onset(STEPS, np.ones((9, 5)))["step"] == 0
