"""Regressions, correlations and their uncertainty, for few models or few prompts.

    linear       y = a + b x            R^2, p from t = r sqrt(df / (1 - r^2))           (Figs 1a, 6a, 8, 35, 36, Table 4)
    exponential  y = a exp(b x)         least squares in y; R^2 = 1 - SS_res / SS_tot    (Fig. 7)
    partial      the correlation of the residuals of x and of y after a linear fit on other variables

All intervals are at 95 %:

    mean over prompts   mean +- t_df se                             prompts independent, or sampled in clusters (sources)
    r                   tanh(atanh r +- 1.96 / sqrt(df - 1))        Fisher's z; df as for p: n - 2 for a plain fit, one less
                                                                    for each control and each further group
    R^2                 the squares of r's interval; from 0 where r's interval contains 0

For N prompts in G clusters of n_g prompts, with w_g = n_g / N and e_gi the deviation of a prompt from the mean of all prompts:

    se^2 = sum_g (sum_i e_gi)^2 / (1 - w_g) / N^2         CR2 (Bell and McCaffrey 2002): unbiased for independent prompts
    1 / df = sum_g (1 - 2 w_g) h_g^2 + (sum_g w_g h_g)^2,   h_g = w_g / (1 - w_g)        Satterthwaite, for independent prompts

With clusters of equal size this is the t interval of the G cluster means, df = G - 1; with one prompt per cluster it is the usual
t interval. It belongs to the mean in which each prompt has equal weight, which differs from the unweighted mean of unequal
clusters. Holm's method corrects p for multiple tests under any dependence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from scipy import optimize, special

FEWEST_POINTS = 8  # of a statistic that figures and pages print
MIN_POINTS = 4  # of a linear fit: R^2 of two points is 1, of three often close to 1
CONFIDENCE = 0.95
POWER = 0.8


def linear_fit(x: ndarray, y: ndarray, groups: ndarray | None = None) -> dict[str, float]:
    """Fit y = a + b x by least squares.

    Args:
        x, y: (n,).
        groups: (n,), a label per point; each group then has its own intercept.

    Returns:
        n, df, r, r2, slope, p, and the intervals r_low, r_high, r2_low, r2_high. All but n and df are NaN for fewer than
        `MIN_POINTS` points or where x or y is constant.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    labels = np.zeros(len(x)) if groups is None else np.asarray(groups)
    intercepts = len(np.unique(labels))
    return _fit_centred(_centred(x, labels), _centred(y, labels), len(x) - intercepts - 1)


def _centred(values: ndarray, labels: ndarray) -> ndarray:
    """Subtract from each value the mean of its group."""
    rest = values
    for label in np.unique(labels):
        group = labels == label
        rest = np.where(group, values - values[group].mean(), rest)
    return _without_rounding(rest, values)


def partial_correlation(x: ndarray, y: ndarray, controls: Sequence[ndarray]) -> dict[str, float]:
    """Fit y on x while controlling for other variables: the fit of the residuals of both after linear fits on the controls.

    Args:
        x, y: (n,).
        controls: variables, (n,) each.

    Returns:
        As `linear_fit`; p and the intervals have one degree of freedom less for each control.
    """
    design = np.column_stack([np.ones(len(x)), *controls])
    x, y = (np.asarray(v, float) for v in (x, y))
    rest_x, rest_y = (
        _without_rounding(v - design @ np.linalg.lstsq(design, v, rcond=None)[0], v) for v in (x, y)
    )
    return _fit_centred(rest_x, rest_y, len(x) - int(np.linalg.matrix_rank(design)) - 1)


def cluster_means(table: pd.DataFrame, clusters: ndarray) -> pd.DataFrame | None:
    """Average the numbers of the rows of each cluster; None where no two rows share one.

    A mean over an undefined value is undefined, as a fit of the rows themselves is: otherwise the means of x and of y might be of
    different rows.

    >>> cluster_means(pd.DataFrame({"x": [1.0, 5.0, 3.0]}), np.array(["a", "b", "a"]))["x"].tolist()
    [2.0, 5.0]
    """
    if len(np.unique(clusters)) == len(table):
        return None
    groups: Any = table.select_dtypes("number").groupby(clusters, sort=False)
    return groups.agg(lambda values: values.mean(skipna=False))


def _without_rounding(rest: ndarray, of: ndarray) -> ndarray:
    """Return what a fit left of some values, or zeros if only rounding error is left."""
    # Rounding leaves about 1e-16 of the values, of which a fit would make a correlation.
    return rest if np.linalg.norm(rest) > 1e-10 * np.linalg.norm(of) else np.zeros_like(rest)


def _fit_centred(x: ndarray, y: ndarray, df: int) -> dict[str, float]:
    """Fit centred values; `df` are the degrees of freedom of p."""
    undefined = ("r", "r2", "slope", "p", "r_low", "r_high", "r2_low", "r2_high")
    out = dict.fromkeys(undefined, float("nan")) | {"n": len(x), "df": df}
    if len(x) < MIN_POINTS or df < 1 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return out
    xx, yy, xy = x @ x, y @ y, x @ y
    # Rounding may take the quotient beyond 1.
    r = float(np.clip(xy / np.sqrt(xx * yy), -1, 1))
    # On a line 1 - r^2 is 0: the least number in its place makes p 0.
    t = np.sqrt(r * r * df / max(1 - r * r, 1e-300))
    p = 2 * special.stdtr(df, -t)
    low, high = _correlation_interval(r, df)
    squares = sorted((low * low, high * high))
    ends = {
        "r_low": low,
        "r_high": high,
        "r2_low": 0.0 if low <= 0 <= high else squares[0],
        "r2_high": squares[1],
    }
    return out | {"r": r, "r2": r * r, "slope": float(xy / xx), "p": float(p)} | ends


def _correlation_interval(r: float, df: int) -> tuple[float, float]:
    """Return the interval of a correlation whose p has `df` degrees of freedom; [-1, 1] where Fisher's z has no variance."""
    if df < 2:
        return -1.0, 1.0
    if abs(r) == 1:
        return r, r
    margin = special.ndtri((1 + CONFIDENCE) / 2) / np.sqrt(df - 1)
    return float(np.tanh(np.arctanh(r) - margin)), float(np.tanh(np.arctanh(r) + margin))


def power_of_correlation(r: float, df: int) -> float:
    """Return the probability that the two-sided t test at 5 % finds a true correlation r; NaN below 2 df.

    By Fisher's z with its bias r / (2 (df + 1)), an approximation.

    >>> round(power_of_correlation(0.5, df=30), 2)
    0.85
    """
    if df < 2:
        return float("nan")
    t = special.stdtrit(df, (1 + CONFIDENCE) / 2)
    critical = np.arctanh(t / np.sqrt(t * t + df))
    shift, scale = np.arctanh(r) + r / (2 * (df + 1)), 1 / np.sqrt(df - 1)
    return float(special.ndtr(np.array([-critical + shift, -critical - shift]) / scale).sum())


def detectable_correlation(df: int) -> float:
    """Return the smallest correlation that a two-sided test at 5 % finds with probability `POWER`; NaN below 2 df.

    >>> round(detectable_correlation(30), 2)
    0.47
    """
    if df < 2:
        return float("nan")
    # Over z = arctanh r, up to 18: tanh 19 is 1 in float64, and its arctanh infinite.
    z: Any = optimize.brentq(lambda z: power_of_correlation(np.tanh(z), df) - POWER, 0, 18)
    return float(np.tanh(z))


def exponential_fit(x: ndarray, y: ndarray) -> dict[str, float]:
    """Fit y = a exp(b x) by least squares in y.

    Args:
        x, y: (n,).

    Returns:
        n, a, b, r2. All but n are NaN for fewer than `MIN_POINTS` points, where x or y is constant or not finite, or where y
        has both signs.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    out = dict.fromkeys(("a", "b", "r2"), float("nan")) | {"n": len(x)}
    if len(x) < MIN_POINTS or not np.isfinite([x, y]).all():
        return out
    if np.ptp(x) == 0 or np.ptp(y) == 0 or (y * y[0] <= 0).any():
        return out
    # Standardised x keeps a and b of moderate size
    middle, width = x.mean(), x.std()
    z = (x - middle) / width
    # The line through log |y| weights small y too much: it is where the iteration starts.
    b, log_a = np.polyfit(z, np.log(abs(y)), 1)
    start = (np.sign(y[0]) * np.exp(log_a), b)
    (a, b), *_ = optimize.curve_fit(lambda z, a, b: a * np.exp(b * z), z, y, start, maxfev=10_000)
    residual, deviation = y - a * np.exp(b * z), y - y.mean()
    r2 = 1 - (residual @ residual) / (deviation @ deviation)
    out["a"] = float(a * np.exp(-b * middle / width))
    out["b"] = float(b / width)
    return out | {"r2": float(r2)}


def clustered_mean(
    values: Float[ndarray, "*points prompts"], clusters: ndarray | None = None
) -> tuple[ndarray, ndarray, ndarray]:
    """Return means over prompts, their standard errors, and the degrees of freedom of the errors.

    Args:
        values: NaN where undefined; left out.
        clusters: (prompts,), a label per prompt; prompts with the same label are not independent. None: all are.

    Returns:
        Three arrays, (*points); error and degrees of freedom are NaN where fewer than two clusters have a value.
    """
    values = np.asarray(values, float)
    names, member = np.unique(
        np.arange(values.shape[-1]) if clusters is None else clusters, return_inverse=True
    )
    defined = np.isfinite(values)
    # (prompts, clusters): a product with it sums over the prompts of each cluster.
    membership = (member[:, None] == np.arange(len(names))).astype(float)
    size = defined @ membership
    total = size.sum(-1, keepdims=True)
    # Points without values, and one cluster, whose share is 1, are NaN below.
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(defined, values, 0).sum(-1, keepdims=True) / total
        deviation = np.where(defined, values - mean, 0) @ membership
        share = size / total
        leverage = share / (1 - share)
        error = np.sqrt((deviation**2 / (1 - share)).sum(-1)) / total[..., 0]
        df = 1 / ((leverage**2 * (1 - 2 * share)).sum(-1) + (share * leverage).sum(-1) ** 2)
    single = (size > 0).sum(-1) < 2
    return mean[..., 0], np.where(single, np.nan, error), np.where(single, np.nan, df)


def error_of_sum(errors: ndarray, df: ndarray) -> tuple[ndarray, ndarray]:
    """Return the standard error of a sum or difference of independent means, and Satterthwaite's degrees of freedom of it.

    Args:
        errors, df: of each mean, (means, *points).
    """
    variance, parts = (errors**2).sum(0), (errors**4 / df).sum(0)
    of_sum = np.where(parts > 0, variance**2 / np.where(parts > 0, parts, 1), df.sum(0))
    return np.sqrt(variance), of_sum


def mean_interval(
    values: Float[ndarray, "*points prompts"], clusters: ndarray | None = None
) -> tuple[ndarray, ndarray]:
    """Return the ends of the t interval of the mean over prompts, (*points) each; arguments as for `clustered_mean`."""
    mean, error, df = clustered_mean(values, clusters)
    margin = t_margin(error, df)
    return mean - margin, mean + margin


def t_margin(error: ndarray, df: ndarray) -> ndarray:
    """Return half the width of the t interval of a value with this standard error."""
    return special.stdtrit(df, (1 + CONFIDENCE) / 2) * error


def holm(p: ndarray) -> ndarray:
    """Correct p-values for multiple tests by Holm's step-down method; NaN (not tested) stays NaN and is not counted.

    >>> holm(np.array([0.01, 0.04, 0.03, np.nan])).round(3).tolist()
    [0.03, 0.06, 0.06, nan]
    """
    out = np.full_like(p, np.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested])]
    # The factors fall, and a greater p may not become the smaller one.
    out[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return out
