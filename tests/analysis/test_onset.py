"""The onset: simulated rates and coverage, and that it is never more precise than the measured steps."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import tracker
from tests.analysis.test_regression import assert_covers
from tracker.analysis.null_levels import null_level
from tracker.analysis.onset import LEAST, Onset, onset
from tracker.analysis.statistics import over_pairs
from tracker.measures.registry import MISCOUPLINGS

STEPS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128])


def test_onset_of_a_ramp():
    """Rising by 0.1 with every doubling after step 8, to 0.4 at 128: a tenth of that lies between 8 and 16."""
    ramp = np.array([0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4])
    prompts = ramp[:, None] * np.random.default_rng(10).normal(1, 0.1, 20)
    found = onset(STEPS, prompts)
    assert (found.earlier, found.later) == (8, 16)
    assert (found.low, found.high) == (8, 16), "the interval is never narrower than the steps"
    assert found.words == "between steps 8 and 16 (95 % interval over prompts: 8 to 16)"
    of_sources = onset(STEPS, prompts, np.arange(20) % 4)
    assert of_sources.words == "between steps 8 and 16 (95 % interval over prompts of 4 sources: 8 to 16)"


@pytest.mark.parametrize("dependence", [0, 0.95])
@pytest.mark.parametrize("prompts, sources", [(4, 4), (6, 6), (10, 10), (20, 20), (24, 4)])
def test_rate_of_false_onsets(prompts, sources, dependence):
    """Noise about the null level, at 13 steps that depend on the one before: at most 5 % of the curves have an onset.

    By the bootstrap it was 36 % with 4 prompts, 20 % with 6, 10 % with 10.
    """
    random, count, S = np.random.default_rng(11), 400, 13
    noise = random.standard_normal((S, count, prompts))
    for step in range(1, S):
        noise[step] = dependence * noise[step - 1] + np.sqrt(1 - dependence**2) * noise[step]
    source = np.arange(prompts) % sources
    if sources < prompts:
        noise += random.standard_normal((S, count, sources))[..., source]
    steps = np.concatenate([[0], 2.0 ** np.arange(S - 1)])
    left = [onset(steps, noise[:, i], source).found for i in range(count)]
    assert_covers(np.logical_not(left), 0.95, 1)


@pytest.mark.parametrize("skewness, most", [(0.5, 0.05), (1, 0.12)])
def test_skewness_increases_the_rate_of_false_onsets(skewness, most):
    """Prompts with a tail far above the null level, 10 of them, at 13 independent steps."""
    shape = 4 / skewness**2
    departures = (shape - np.random.default_rng(14).gamma(shape, size=(600, 13, 10))) / np.sqrt(shape)
    seen = [onset(np.arange(13), one).found for one in departures]
    assert_covers(np.logical_not(seen), 1 - most, 1)


def test_ignoring_sources_makes_false_onsets():
    random = np.random.default_rng(12)
    source = np.arange(24) % 4
    noise = random.standard_normal((300, 9, 4))[..., source] + 0.3 * random.standard_normal((300, 9, 24))
    assert np.mean([onset(STEPS, one).found for one in noise]) > 0.2
    assert np.mean([onset(STEPS, one, source).found for one in noise]) < 0.06


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("prompts, sources", [(6, 6), (20, 20), (24, 4)])
def test_coverage_of_the_interval_of_the_onset(noise, prompts, sources):
    """A curve that is flat until step 8 and then rises and falls: its onset lies between 8 and 16."""
    random, count = np.random.default_rng(13), 400
    ramp = np.array([0, 0, 0, 0, 0, 0.1, 0.3, 0.4, 0.2])
    source = np.arange(prompts) % sources
    of_source = random.standard_normal((count, 9, sources))[..., source] * (sources < prompts)
    curves = ramp[:, None] + noise * (random.standard_normal((count, 9, prompts)) + of_source)
    found = [onset(STEPS, curve, source) for curve in curves]
    seen = [one for one in found if one.found]
    assert len(seen) > count / 2
    assert_covers([one.low <= 8 and 16 <= one.high for one in seen], 0.95, 1)
    for one in seen:
        assert one.low <= one.earlier <= one.later <= one.high


def test_prompts_and_steps_that_are_undefined_do_not_move_the_onset():
    ramp = np.array([0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4])
    prompts = ramp[:, None] * np.random.default_rng(10).normal(1, 0.1, 20)
    broken = prompts.copy()
    broken[-1, 3] = broken[2, 5] = np.nan
    assert onset(STEPS, broken) == onset(STEPS, np.delete(prompts, [3, 5], 1))
    broken = prompts.copy()
    broken[0] = np.nan
    assert onset(STEPS, broken) == onset(STEPS[1:], prompts[1:])
    assert onset(STEPS, np.full((9, 20), np.nan)).words == "unknown: fewer than 2 steps"
    assert onset(STEPS, prompts[:, :1]).words == "unknown: fewer than 2 independent prompts"
    broken = prompts.copy()
    broken[0, 10:] = np.nan
    assert not onset(STEPS, broken, np.arange(20) < 10).found, "prompts of one source of two"


def test_onset_at_the_first_step():
    """Before it lies only the start of training."""
    words = "at or before step {0}, the first measured (95 % interval over prompts: 0 to {0})"
    assert onset(STEPS, np.ones((9, 5))) == Onset(0, 0, 0, 0, words.format(0))
    assert onset(STEPS[3:], np.ones((6, 5))) == Onset(0, 4, 0, 4, words.format(4))


def test_no_onset_beyond_chance():
    noise = np.random.default_rng(15).standard_normal((9, 6))
    assert onset(STEPS, noise).words == "none beyond chance"


@pytest.mark.parametrize("null", [1.0, -1.0])
def test_no_onset_within_two_percent_of_the_null_level(null):
    """One draw of weights moves all prompts alike, which a test over prompts takes for coupling."""
    ramp = np.array([0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1])
    prompts = ramp[:, None] * np.random.default_rng(10).normal(1, 0.1, 20)
    prompts /= prompts.mean(1).max()
    assert onset(STEPS, 0.019 * prompts).found
    small = onset(STEPS, 0.019 * prompts, null=null)
    assert not small.found and small.words == "none: the distance from the null level stays below 2 % of it"
    assert onset(STEPS, 0.021 * prompts, null=null).found


@pytest.mark.parametrize("share, found", [(0.05, True), (0.019, False)])
@pytest.mark.parametrize("levels", [(0.01, 1), (1, 0.01)])
def test_the_distance_is_compared_with_the_null_level_of_its_step(levels, share, found):
    """That of `offdiag` follows the norm of the Jacobians: by its mean, 5 % of the lower level are too little."""
    null = np.repeat(levels, [5, 4])[:, None] * np.ones(20)
    departed = np.where(np.arange(9) < 5, share, 0.0001)[:, None] * np.random.default_rng(10).normal(1, 0.02, 20)
    departed *= share / departed.mean(1).max()
    assert onset(STEPS, null * departed, null=null).found == found
    assert onset(STEPS, null * departed, null=-null).found == found


def test_undefined_prompts_do_not_count_in_the_null_level():
    departed = np.array([0, 0, 0, 0, 0, 0.03, 0.03, 0.03, 0.03])[:, None] * np.random.default_rng(10).normal(
        1, 0.02, 20
    )
    null, broken = np.ones((9, 20)), departed.copy()
    null[:, 3], broken[4, 3] = 100, np.nan
    assert onset(STEPS, broken, null=null) == onset(STEPS, np.delete(departed, 3, 1), null=1.0)


@pytest.mark.slow
def test_chance_alignment_of_untrained_models():
    """The numbers in docs/measurements.md: mean distances from the null level, as shares of it."""
    sizes = transformers.GPTNeoXConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, vocab_size=200
    )
    shares = {name: [] for name in MISCOUPLINGS}
    for seed in range(6):
        torch.manual_seed(seed)
        model = transformers.GPTNeoXForCausalLM(sizes).eval()
        ds = tracker.measure(model, torch.randint(0, 200, (6, 16)), measures="coupling", k=10)
        for name, found in shares.items():
            curve, null = (
                over_pairs(m.astype(float)).sel(pairs="mean_offdiag").mean() for m in (ds[name], null_level(ds, name))
            )
            found.append(float(1 - curve / null))
    largest = {name: max(map(abs, found)) for name, found in shares.items()}
    assert LEAST < max(shares["offdiag"]) < 0.03 and largest.pop("offdiag") < 0.03
    assert max(largest.values()) < 0.01 < LEAST


def test_two_grids_of_one_run():
    """A tiny GPT-NeoX trained on text, offdiag_normalized at K = 10: interpolated, the onsets would be 2.5 and 0.5."""
    steps = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 300])
    curve = np.array([0, 0.0017, 0.0172, 0.0822, 0.1647, 0.2359, 0.2646, 0.3553, 0.3563, 0.2298, 0.1609, 0.1255])
    prompts = curve[:, None] * np.random.default_rng(16).normal(1, 0.05, 8)
    fine = onset(steps, prompts)
    kept = steps % 64 == 0
    coarse = onset(steps[kept], prompts[kept])
    assert (fine.earlier, fine.later) == (2, 4) and (coarse.earlier, coarse.later) == (0, 64)
    assert coarse.low <= fine.earlier and fine.later <= coarse.high
    assert fine.words.startswith("between steps 2 and 4 ") and coarse.words.startswith("between steps 0 and 64 ")


@given(
    gaps=st.lists(st.integers(1, 1000), min_size=3, max_size=12),
    rises=st.lists(st.floats(0, 1), min_size=13, max_size=13),
    data=st.data(),
)
def test_fewer_steps_never_move_the_onset_off_the_truth(gaps, rises, data):
    """Of noise-free curves that rise and then fall, measured at any steps that include the first and the highest."""
    steps = np.concatenate([[0], np.cumsum(gaps)])
    S = len(steps)
    peak = data.draw(st.integers(1, S - 1))
    curve = np.cumsum([0, *rises])[:S]
    curve[peak:] = np.minimum(curve[peak], curve[peak] - 0.5 * (np.arange(S - peak)) / S * curve[peak])
    curve = curve / (curve[peak] or 1) * (curve[peak] > 1e-3)
    kept = np.array([data.draw(st.booleans()) or i in (0, peak) for i in range(S)])
    prompts = curve[:, None] * np.linspace(0.9, 1.1, 4)
    whole, part = onset(steps, prompts), onset(steps[kept], prompts[kept])
    assert whole.found == part.found == bool(curve[peak])
    if part.found:
        for one in (whole, part):
            assert 0 <= one.low <= one.earlier <= one.later <= one.high
        assert part.low <= whole.earlier and whole.later <= part.high
        assert part.earlier <= whole.earlier and whole.later <= part.later
