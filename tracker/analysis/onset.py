"""Whether blocks are coupled beyond chance, and the onset: the measured steps between which a curve departs from its null level.

    departure    null level minus mis-coupling
    coupled      the mean departure over pairs of blocks is above zero
    onset        where the departure, averaged over prompts, first reaches a tenth of its maximum

Prompts and tokens share the weights: their mean has the chance alignment of one draw of weights, however many there are.
Different pairs of unrelated blocks are turned against each other independently, so that the test of "coupled" is over pairs, each
counted once as the mean of its two directions, and over prompts: a one-sided t test whose error has both sources, and that is
not passed more often where departures lean to the left.

Between two measured steps nothing is known of the curve. The onset is therefore a pair of steps, the last below a tenth of the
maximum and the first at or above it, and nothing is interpolated between them. The maximum is that of the measured steps: steps
that miss the peak of a curve that falls again lower the tenth, and may move the onset to an earlier pair.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.special import stdtrit

from tracker.analysis.regression import CONFIDENCE, clustered_mean, error_of_sum

SHARE = 0.1  # of the maximum
FEWEST = 2  # measured steps
FEWEST_PAIRS = 3
NAN = float("nan")


def pairs_of_blocks(matrices: Float[ndarray, "*S L L"]) -> Float[ndarray, "*S pairs"]:
    """Return the mean of both directions of each pair of different blocks."""
    l, m = np.triu_indices(matrices.shape[-1], 1)
    return (matrices[..., l, m] + matrices[..., m, l]) / 2


def coupled(
    pairs: Float[ndarray, "S pairs"],
    prompts: Float[ndarray, "S prompts"] | None = None,
    clusters: ndarray | None = None,
    level: float = (1 - CONFIDENCE) / 2,
) -> Bool[ndarray, " S"]:
    """Return at which steps the mean departure over pairs of blocks and prompts is above zero, in a one-sided t test.

    Its squared error is the sum of that over pairs and that over prompts, with Satterthwaite's degrees of freedom. The sum counts
    what is of one pair and one prompt alone twice, and so errs on the safe side. With one prompt it is that over pairs.

    A t test is passed too often if pairs lean to the left. So t has to pass after Hall's transformation for their skewness, too
    (On the removal of skewness by transformation, 1992). It is not taken alone, since the skewness of few pairs may also raise t.

    Args:
        pairs: departures as `pairs_of_blocks` returns them, averaged over prompts and tokens; NaN where undefined.
        prompts: those of each prompt, averaged over pairs.
        clusters: labels of the prompts, as for `clustered_mean`.
        level: of the test.
    """
    mean, error, df = clustered_mean(pairs)
    enough = df >= FEWEST_PAIRS - 1
    if prompts is not None:
        _, *of_prompts = clustered_mean(prompts, clusters)
        # One prompt has no error.
        of_prompts = np.where(np.isfinite(of_prompts), of_prompts, [[0], [1]])
        error, df = error_of_sum(*np.stack([[error, df], of_prompts], 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = mean / error
        skewness = _third_cumulant_of_mean(pairs, mean) / error**3
        transformed = t + skewness * (t**2 / 3 + 1 / 6) + skewness**2 * t**3 / 27
    return enough & (np.fmin(t, transformed) > -stdtrit(df, level))


def _third_cumulant_of_mean(
    pairs: Float[ndarray, "S pairs"], mean: Float[ndarray, " S"]
) -> Float[ndarray, " S"]:
    """Return an unbiased estimate of the third cumulant of the mean over independent pairs."""
    defined = np.isfinite(pairs)
    n = defined.sum(1)
    cubes = np.where(defined, pairs - mean[:, None], 0) ** 3
    return cubes.sum(1) / ((n - 1) * (n - 2) * n)


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


def no_onset(words: str) -> Onset:
    """Return an onset without steps, and why."""
    return Onset(NAN, NAN, NAN, NAN, words)


def onset(
    steps: Float[ndarray, " S"],
    departure: Float[ndarray, "S prompts"],
    pairs: Float[ndarray, "S pairs"],
    clusters: ndarray | None = None,
) -> Onset:
    """Find the steps between which a mis-coupling departs from its null level.

    An onset is reported only if the blocks are `coupled` at the step where the departure is largest, at 2.5 % / S for S steps.

    The interval covers every pair of neighbouring steps between which the onset may lie for other prompts. A pair is excluded if
    the curve, less a tenth of its maximum, is below zero at the later step (one-sided t test, 2.5 %) or above zero at a step
    before the pair's later one (2.5 % / (S - 1)).

    Args:
        steps: ascending.
        departure: null level minus mis-coupling of each prompt; NaN where undefined.
        pairs: the same of each pair of blocks (`pairs_of_blocks`).
        clusters: labels of the prompts, as for `clustered_mean`.
    """
    steps, departure, pairs = (np.asarray(values, float) for values in (steps, departure, pairs))
    defined = np.isfinite(departure).any(1)
    steps, departure, pairs = steps[defined], departure[defined], pairs[defined]
    # A prompt that is undefined at some steps would make the mean jump there.
    departure = np.where(np.isfinite(departure).all(0), departure, np.nan)
    if len(steps) < FEWEST:
        return no_onset(f"unknown: fewer than {FEWEST} steps")
    if not (np.isfinite(pairs).sum(1) >= FEWEST_PAIRS).any():
        return no_onset(f"unknown: fewer than {FEWEST_PAIRS} pairs of blocks")
    mean, error, _ = clustered_mean(departure, clusters)
    peak = int(np.nan_to_num(mean, nan=-np.inf).argmax())
    # Bonferroni: the maximum is over S steps.
    if not coupled(pairs, departure, clusters, (1 - CONFIDENCE) / 2 / len(steps))[peak]:
        return no_onset("none beyond chance at 2.5 % / steps")
    first = int((mean >= SHARE * mean[peak]).argmax())
    # What is above the tenth at the first measured step has departed at some time since the start.
    before = np.concatenate([[0.0], steps[:-1]])
    earlier, later = float(before[first]), float(steps[first])
    where = (
        f"between steps {earlier:,.12g} and {later:,.12g}"
        if first
        else f"at or before step {later:,.12g}, the first measured"
    )
    if not np.isfinite(error[peak]):
        words = f"{where} (no interval: fewer than 2 independent prompts)"
        return Onset(earlier, later, earlier, later, words)
    # By prompt, so that what its curve has in common with its peak cancels
    above, error, df = clustered_mean(departure - SHARE * departure[peak], clusters)
    significantly_below = above < stdtrit(df, (1 - CONFIDENCE) / 2) * error
    significantly_above = above > -stdtrit(df, (1 - CONFIDENCE) / 2 / (len(steps) - 1)) * error
    # At an earlier step: the count up to a step exceeds its own
    departed_before = np.cumsum(significantly_above) > significantly_above
    index = np.arange(len(steps))
    possible = np.flatnonzero(
        (~significantly_below & ~departed_before & (index <= peak)) | (index == first)
    )
    low, high = float(before[possible[0]]), float(steps[possible[-1]])
    of = "" if clusters is None else f" in {len(set(clusters))} clusters"
    words = f"{where} (95 % interval over prompts{of}: {low:,.12g} to {high:,.12g})"
    return Onset(earlier, later, low, high, words)
