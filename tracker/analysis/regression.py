"""Fits, correlations and their uncertainty: what may be said of a few models, or of a few prompts.

    linear       y = a + b x            R^2, p from t = r sqrt(df / (1 - r^2))           (Figs 1a, 6a, 8, 35, 36, Table 4)
    exponential  y = a exp(b x)         least squares in y; R^2 = 1 - SS_res / SS_tot    (Fig. 7)
    partial      the correlation of what a linear fit on other variables leaves of both

Intervals are 95 %:

    mean over prompts   mean +- t_df se                                     prompts drawn in clusters (sources) or one by one
    r                   tanh(atanh r +- 1.96 / sqrt(df - 1))                Fisher's z; df as for p, so n - 3 of a plain fit,
                                                                            one less for each control or further group
    R^2                 the squares of r's interval, from 0 where r's interval has 0 in it

N prompts in G clusters of n_g, w_g = n_g / N, e_gi a prompt's distance from the mean of all prompts:

    se^2 = sum_g (sum_i e_gi)^2 / (1 - w_g) / N^2         CR2 (Bell and McCaffrey 2002): unbiased for independent prompts
    1 / df = sum_g (1 - 2 w_g) h_g^2 + (sum_g w_g h_g)^2,   h_g = w_g / (1 - w_g)        Satterthwaite, for the same

With clusters of one size this is the t interval of the G cluster means, df = G - 1; with clusters of one prompt, the usual one.
It is of the mean that is drawn, in which every prompt counts the same: the unweighted mean of unequal clusters is another number.
Holm's method corrects p where many are tried, whatever their dependence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import optimize, stats

FEWEST = 4  # points that a line is fitted to: two make R^2 = 1, three nearly so
LEVEL = 0.95
ONSET = 0.1  # of a curve's largest departure from its null level


def linear_fit(x: ndarray, y: ndarray, groups: ndarray | None = None) -> dict[str, float]:
    """Regression of y on x; where groups are given, with an intercept for each.

    Returns:
        n, r, r2, slope, p, and the intervals r_low, r_high, r2_low, r2_high. NaN but for n where fewer than four points, or no
        spread, let nothing be said.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    labels = np.zeros(len(x)) if groups is None else np.asarray(groups)
    kinds = np.unique(labels)
    for kind in kinds:
        x, y = (np.where(labels == kind, v - v[labels == kind].mean(), v) for v in (x, y))
    return _line(x, y, len(x) - len(kinds) - 1)


def partial_correlation(x: ndarray, y: ndarray, others: Sequence[ndarray]) -> dict[str, float]:
    """Regression of y on x, other variables held fixed: of what linear fits on them leave of both.

    Returns:
        As `linear_fit`; p and the intervals count a degree of freedom for each of the others.
    """
    given = np.column_stack([np.ones(len(x)), *others])
    x, y = (np.asarray(v, float) for v in (x, y))
    left_x, left_y = (v - given @ np.linalg.lstsq(given, v, rcond=None)[0] for v in (x, y))
    norm = np.linalg.norm
    if norm(left_x) <= 1e-10 * norm(x) or norm(left_y) <= 1e-10 * norm(y):  # rounding is no spread
        left_x, left_y = np.zeros_like(x), np.zeros_like(y)
    return _line(left_x, left_y, len(x) - int(np.linalg.matrix_rank(given)) - 1)


def averaged(labels: ndarray, *values: ndarray) -> tuple[ndarray, ...]:
    """The means of values over the points of each label, so that points that are not independent count once.

    >>> averaged(np.array(["a", "b", "a"]), np.array([1.0, 5.0, 3.0]))[0].tolist()
    [2.0, 5.0]
    """
    kinds = np.unique(labels)
    return tuple(np.array([np.asarray(v, float)[labels == kind].mean() for kind in kinds]) for v in values)


def _line(x: ndarray, y: ndarray, df: int) -> dict[str, float]:
    """Of centred values."""
    undefined = ("r", "r2", "slope", "p", "r_low", "r_high", "r2_low", "r2_high")
    out = dict.fromkeys(undefined, float("nan")) | {"n": len(x)}
    if len(x) < FEWEST or df < 1 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return out
    xx, yy, xy = x @ x, y @ y, x @ y
    r = float(np.clip(xy / np.sqrt(xx * yy), -1, 1))
    p = 2 * stats.t.sf(np.sqrt(r * r * df / max(1 - r * r, 1e-300)), df)
    low, high = _correlation_interval(r, df)
    squares = sorted((low * low, high * high))
    ends = {"r_low": low, "r_high": high, "r2_low": 0.0 if low <= 0 <= high else squares[0], "r2_high": squares[1]}
    return out | {"r": r, "r2": r * r, "slope": float(xy / xx), "p": float(p)} | ends


def _correlation_interval(r: float, df: int) -> tuple[float, float]:
    """Of a correlation whose p has so many degrees of freedom; with one, z has no variance, and nothing is excluded."""
    if df < 2:
        return -1.0, 1.0
    if abs(r) == 1:
        return r, r
    reach = stats.norm.ppf((1 + LEVEL) / 2) / np.sqrt(df - 1)
    return float(np.tanh(np.arctanh(r) - reach)), float(np.tanh(np.arctanh(r) + reach))


def exponential_fit(x: ndarray, y: ndarray) -> dict[str, float]:
    """Y = a exp(b x), y all of one sign.

    Returns:
        n, a, b, r2; NaN but for n where fewer than four points, no spread, or values of both signs allow no such fit.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    out = dict.fromkeys(("a", "b", "r2"), float("nan")) | {"n": len(x)}
    if len(x) < FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0 or (y * y[0] <= 0).any():
        return out
    middle, width = x.mean(), x.std()  # in units in which a and b are of moderate size
    b, log_a = np.polyfit((x - middle) / width, np.log(abs(y)), 1)
    start = (np.sign(y[0]) * np.exp(log_a), b)
    (a, b), *_ = optimize.curve_fit(lambda x, a, b: a * np.exp(b * x), (x - middle) / width, y, start, maxfev=10_000)
    left = y - a * np.exp(b * (x - middle) / width)
    r2 = 1 - (left @ left) / ((y - y.mean()) @ (y - y.mean()))
    return out | {"a": float(a * np.exp(-b * middle / width)), "b": float(b / width), "r2": float(r2)}


def mean_error(
    values: Float[ndarray, "*points prompts"], clusters: ndarray | None = None
) -> tuple[ndarray, ndarray, ndarray]:
    """Means over prompts, their standard errors, and the errors' degrees of freedom; undefined prompts are left out.

    Args:
        clusters: a label for each prompt; prompts of one label are not independent. Without it, or where all have the same,
            each prompt stands for itself: the mean is then that of the one source.

    Returns:
        Of shape (*points); error and degrees of freedom are NaN where fewer than two clusters have a value.
    """
    values = np.asarray(values, float)
    kinds, member = np.unique(np.arange(values.shape[-1]) if clusters is None else clusters, return_inverse=True)
    if len(kinds) == 1:
        kinds = member = np.arange(values.shape[-1])
    there = np.isfinite(values)
    belongs = (member[:, None] == np.arange(len(kinds))).astype(float)
    size = there @ belongs
    total = size.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(there, values, 0).sum(-1, keepdims=True) / total
        left = np.where(there, values - mean, 0) @ belongs
        share = size / total
        leverage = share / (1 - share)
        error = np.sqrt((left**2 / (1 - share)).sum(-1)) / total[..., 0]
        df = 1 / ((leverage**2 * (1 - 2 * share)).sum(-1) + (share * leverage).sum(-1) ** 2)
    alone = (size > 0).sum(-1) < 2
    return mean[..., 0], np.where(alone, np.nan, error), np.where(alone, np.nan, df)


def mean_interval(
    values: Float[ndarray, "*points prompts"], clusters: ndarray | None = None
) -> tuple[ndarray, ndarray]:
    """Of the mean over prompts, NaN left out: the t interval of every point of a curve.

    Args:
        clusters: as `mean_error` takes them.
    """
    mean, error, df = mean_error(values, clusters)
    reach = stats.t.ppf((1 + LEVEL) / 2, df) * error
    return mean - reach, mean + reach


def onset(
    steps: Float[ndarray, " S"], departure: Float[ndarray, "S prompts"], clusters: ndarray | None = None
) -> dict[str, Any]:
    """The step at which a curve leaves its null level.

    The curve is the mean over prompts of how far below its null level a mis-coupling is; it has left at the first step where it
    is at a tenth of its largest departure. There is an onset where the largest departure is above zero by a one-sided t test at
    2.5 % / S: of curves that never leave, at most 2.5 % seem to, whatever the dependence of the steps, where prompts are normal,
    and 5 % where their skewness is -1/2; at -1 it is 11 %.

    The interval holds every two neighbouring steps between which the onset may lie: not where the curve, less a tenth of its
    largest departure, is below zero at the later of the two (one-sided t test, 2.5 %), nor where it is above zero at an earlier
    step (2.5 % / (S - 1)). It is never narrower than the distance between two steps.

    Args:
        clusters: of the prompts, as `mean_error` takes them.

    Returns:
        between: the last step below and the first at or above, 0 (no training) for the former where there is none; step: on a
        straight line over ln(1 + step) between these two; low, high: the interval. NaN where the largest departure may be
        chance, or fewer than two independent prompts are defined at every step that has any.
    """
    steps, departure = np.asarray(steps, float), np.asarray(departure, float)
    defined = np.isfinite(departure).any(1)
    steps, departure = steps[defined], departure[defined]
    # A prompt that is undefined somewhere would bend the curve there.
    departure = np.where(np.isfinite(departure).all(0), departure, np.nan)
    nan = float("nan")
    nothing = {"step": nan, "low": nan, "high": nan, "between": (nan, nan)}
    if not len(steps):
        return nothing
    mean, error, df = mean_error(departure, clusters)
    peak = int(mean.argmax())
    # The largest of many steps is above zero by chance: each is allowed its share of the error.
    if not mean[peak] > stats.t.isf((1 - LEVEL) / 2 / len(steps), df[peak]) * error[peak]:
        return nothing
    first = int((mean >= ONSET * mean[peak]).argmax())
    earlier = np.concatenate([[0.0], steps[:-1]])
    above, error, df = mean_error(departure - ONSET * departure[peak], clusters)
    surely_below = above < -stats.t.isf((1 - LEVEL) / 2, df) * error
    surely_above = above > stats.t.isf((1 - LEVEL) / 2 / max(len(steps) - 1, 1), df) * error
    gone = np.cumsum(surely_above) > surely_above  # at an earlier step
    at = np.arange(len(steps))
    possible = np.flatnonzero((~surely_below & ~gone & (at <= peak)) | (at == first))
    step = steps[0]
    if first > 0:
        position = np.log1p(steps)
        share = (ONSET * mean[peak] - mean[first - 1]) / (mean[first] - mean[first - 1])
        step = np.expm1(position[first - 1] + share * (position[first] - position[first - 1]))
    return {
        "step": float(step),
        "low": float(earlier[possible[0]]),
        "high": float(steps[possible[-1]]),
        "between": (float(earlier[first]), float(steps[first])),
    }


def holm(p: ndarray) -> ndarray:
    """Holm's step-down correction; NaN (not tried) stays NaN and does not count.

    >>> holm(np.array([0.01, 0.04, 0.03, np.nan])).round(3).tolist()
    [0.03, 0.06, 0.06, nan]
    """
    out = np.full_like(p, np.nan)
    tried = np.flatnonzero(np.isfinite(p))
    order = tried[np.argsort(p[tried])]
    out[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return out
