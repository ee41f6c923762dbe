"""The onset of coupling: the measured steps between which a curve departs from its null level.

    departure    null level minus mis-coupling, averaged over prompts
    onset        where the departure first reaches a tenth of its maximum

Between two measured steps nothing is known of the curve. The onset is therefore a pair of steps, the last below a tenth of the
maximum and the first at or above it, and nothing is interpolated between them. The maximum is that of the measured steps: steps
that miss the peak of a curve that falls again lower the tenth, and may move the onset to an earlier pair.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from tracker.analysis.regression import CONFIDENCE, clustered_mean

SHARE = 0.1  # of the maximum
# Of the null level. Prompts share the weights: an interval over prompts does not contain the chance alignment of one draw of
# weights, which alone moves the mis-coupling of an untrained model by up to one percent (d = 128; `offdiag`: three).
LEAST = 0.02
FEWEST = 2  # measured steps
NAN = float("nan")


@dataclass(frozen=True)
class Onset:
    """The steps between which a curve departs from its null level, and their interval; NaN where there is no onset.

    Attributes:
        earlier: the last step below a tenth of the maximum; 0, the start of training, where there is none.
        later: the first step at or above it.
        low, high: the 95 % interval over prompts, at least from `earlier` to `later`.
        words: the onset as figures and the page state it, after "onset".
    """

    earlier: float
    later: float
    low: float
    high: float
    words: str

    @property
    def found(self) -> bool:
        """Whether the curve departs from its null level."""
        return bool(np.isfinite(self.later))


def onset(
    steps: Float[ndarray, " S"],
    departure: Float[ndarray, "S prompts"],
    clusters: ndarray | None = None,
    null: Float[ndarray, "S prompts"] | float = 0.0,
) -> Onset:
    """Find the steps between which a mis-coupling departs from its null level.

    An onset is reported only if the departure of some step is above 2 % of the null level of that step, and the maximum
    departure is above zero in a one-sided t test at 2.5 % / S. The rate of false onsets is then at most 2.5 % for normally
    distributed prompts, whatever the dependence of the steps; 5 % for a skewness of -1/2, 11 % for a skewness of -1.

    The interval covers every pair of neighbouring steps between which the onset may lie. A pair is excluded if the curve, less
    a tenth of its maximum, is below zero at the later step (one-sided t test, 2.5 %) or above zero at a step before the pair's
    later one (2.5 % / (S - 1)).

    Args:
        steps: ascending.
        departure: null level minus mis-coupling; NaN where undefined.
        clusters: labels of the prompts, as for `clustered_mean`.
        null: the null level, which changes during training for measures that are not normalized; its sign has no meaning.
    """
    steps, departure = np.asarray(steps, float), np.asarray(departure, float)
    defined = np.isfinite(departure).any(1)
    null = np.broadcast_to(null, departure.shape)[defined]
    steps, departure = steps[defined], departure[defined]
    # A prompt that is undefined at some steps would make the mean jump there.
    departure = np.where(np.isfinite(departure).all(0), departure, np.nan)
    if len(steps) < FEWEST:
        return Onset(NAN, NAN, NAN, NAN, f"unknown: fewer than {FEWEST} steps")
    mean, error, df = clustered_mean(departure, clusters)
    peak = int(mean.argmax())
    if not np.isfinite(error[peak]):
        return Onset(NAN, NAN, NAN, NAN, "unknown: fewer than 2 independent prompts")
    # Bonferroni: the maximum is over S steps.
    if not mean[peak] > stats.t.isf((1 - CONFIDENCE) / 2 / len(steps), df[peak]) * error[peak]:
        return Onset(NAN, NAN, NAN, NAN, "none beyond chance")
    level = abs(np.nanmean(np.where(np.isfinite(departure), null, np.nan), 1))
    if not (mean > LEAST * level).any():
        words = f"none: the distance from the null level stays below {100 * LEAST:.0f} % of it"
        return Onset(NAN, NAN, NAN, NAN, words)
    first = int((mean >= SHARE * mean[peak]).argmax())
    before = np.concatenate([[0.0], steps[:-1]])
    above, error, df = clustered_mean(departure - SHARE * departure[peak], clusters)
    significantly_below = above < -stats.t.isf((1 - CONFIDENCE) / 2, df) * error
    significantly_above = above > stats.t.isf((1 - CONFIDENCE) / 2 / (len(steps) - 1), df) * error
    departed_before = np.cumsum(significantly_above) > significantly_above
    index = np.arange(len(steps))
    possible = np.flatnonzero((~significantly_below & ~departed_before & (index <= peak)) | (index == first))
    low, high = float(before[possible[0]]), float(steps[possible[-1]])
    of = f" of {count} sources" if clusters is not None and (count := len(set(clusters))) > 1 else ""
    earlier, later = float(before[first]), float(steps[first])
    where = (
        f"between steps {earlier:,.0f} and {later:,.0f}"
        if first
        else f"at or before step {later:,.0f}, the first measured"
    )
    words = f"{where} (95 % interval over prompts{of}: {low:,.0f} to {high:,.0f})"
    return Onset(earlier, later, low, high, words)
