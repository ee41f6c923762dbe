"""Fits, correlations and their uncertainty: what may be said of a few models, or of a few prompts.

    linear       y = a + b x            R^2, p from t = r sqrt(df / (1 - r^2))           (Figs 1a, 6a, 8, 35, 36, Table 4)
    exponential  y = a exp(b x)         least squares in y; R^2 = 1 - SS_res / SS_tot    (Fig. 7)
    partial      the correlation of what a linear fit on other variables leaves of both

Intervals are 95 % bootstrap percentiles over the points given: models, cells or prompts. Holm's method corrects p where many
are tried, whatever their dependence.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import optimize, stats

FEWEST = 4  # points that a line is fitted to: two make R^2 = 1, three nearly so
RESAMPLES = 2000
ONSET = 0.1  # of a curve's largest departure from its null level


def linear_fit(x: ndarray, y: ndarray, groups: ndarray | None = None) -> dict[str, float]:
    """Regression of y on x; where groups are given, with an intercept for each.

    Returns:
        n, r, r2, slope, p, and r2_low, r2_high: the interval. NaN but for n where fewer than four points, or no spread, let
        nothing be said.
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
        As `linear_fit`; p counts a degree of freedom for each of the others.
    """
    given = np.column_stack([np.ones(len(x)), *others])
    x, y = (np.asarray(v, float) for v in (x, y))
    left_x, left_y = (v - given @ np.linalg.lstsq(given, v, rcond=None)[0] for v in (x, y))
    norm = np.linalg.norm
    if norm(left_x) <= 1e-10 * norm(x) or norm(left_y) <= 1e-10 * norm(y):  # rounding is no spread
        left_x, left_y = np.zeros_like(x), np.zeros_like(y)
    return _line(left_x, left_y, len(x) - int(np.linalg.matrix_rank(given)) - 1)


def _line(x: ndarray, y: ndarray, df: int) -> dict[str, float]:
    """Of centred values."""
    out = dict.fromkeys(("r", "r2", "slope", "p", "r2_low", "r2_high"), float("nan")) | {"n": len(x)}
    if len(x) < FEWEST or df < 1 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return out
    r2, slope = float(_r2(x, y)), float(x @ y / (x @ x))
    p = 2 * stats.t.sf(np.sqrt(r2 * df / max(1 - r2, 1e-300)), df)
    low, high = interval(_r2, x, y)
    r = float(np.copysign(np.sqrt(r2), slope))
    return out | {"r": r, "r2": r2, "slope": slope, "p": float(p), "r2_low": float(low), "r2_high": float(high)}


def _r2(x: ndarray, y: ndarray, axis: int = -1) -> ndarray:
    """Squared correlation; 0 where one of the two does not vary, as in a resample of one point alone."""
    x, y = (v - v.mean(axis, keepdims=True) for v in (x, y))
    spread = (x * x).sum(axis) * (y * y).sum(axis)
    return (x * y).sum(axis) ** 2 / np.where(spread > 0, spread, 1)


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


def interval(statistic: Callable[..., ndarray], *samples: ndarray, level: float = 0.95) -> tuple[ndarray, ndarray]:
    """Bootstrap percentiles of a statistic of paired samples, resampled along their last axis.

    Args:
        statistic: takes the samples and `axis`.
    """
    found = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        axis=-1,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return found.low, found.high


def mean_interval(values: Float[ndarray, "*points prompts"]) -> tuple[ndarray, ndarray]:
    """Of the mean over prompts, NaN left out: the interval of every point of a curve."""
    if values.shape[-1] < 2:
        return np.full(values.shape[:-1], np.nan), np.full(values.shape[:-1], np.nan)
    return interval(lambda v, axis: np.nanmean(v, axis), values)


def onset(steps: Float[ndarray, " S"], departure: Float[ndarray, "S prompts"]) -> dict[str, float]:
    """The step at which a curve leaves its null level.

    The curve is the mean over prompts of how far below its null level a mis-coupling is; it has left when it is at a tenth of
    its largest departure, between two steps as a straight line over ln(1 + step).

    Returns:
        step, and low, high: the interval over prompts. NaN where the largest departure may be chance, or too few prompts are
        defined at every step that has any.
    """
    steps, departure = np.asarray(steps, float), np.asarray(departure, float)
    defined = np.isfinite(departure).any(1)
    steps, departure = steps[defined], departure[defined]
    departure = departure[
        :, np.isfinite(departure).all(0)
    ]  # a prompt that is undefined somewhere would bend the curve there
    nothing = {"step": float("nan"), "low": float("nan"), "high": float("nan")}
    if departure.shape[-1] < 2 or not len(steps):
        return nothing
    # The largest of many steps is above zero by chance: each is allowed its share of the 5 %.
    peak = departure[departure.mean(-1).argmax()]
    if not interval(lambda v, axis: v.mean(axis), peak, level=1 - 0.05 / len(steps))[0] > 0:
        return nothing
    low, high = interval(lambda *by_step, axis: _onset(steps, np.stack(by_step).mean(axis)), *departure)
    return {"step": float(_onset(steps, departure.mean(-1))), "low": float(low), "high": float(high)}


def _onset(steps: Float[ndarray, " S"], curve: Float[ndarray, "S *resamples"]) -> ndarray:
    position = np.log1p(steps)
    level = ONSET * curve.max(0)
    first = (curve >= level).argmax(0)
    before = np.maximum(first - 1, 0)
    at, earlier = (np.take_along_axis(curve, i[None], 0)[0] for i in (first, before))
    share = np.where(first > 0, (level - earlier) / np.where(at > earlier, at - earlier, 1), 0)
    return np.expm1(position[before] + share * (position[first] - position[before]))


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
