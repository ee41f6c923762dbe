"""Trajectory measures: exact cases, the paper's recursion, windows, and what is undefined."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracker.measures import trajectory


def states(seed: int = 0, L: int = 8, n: int = 5, d: int = 6):
    return torch.randn(L + 1, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumsum(0)


def lss_by_recursion(x):
    """Eq. 15-16 to the letter, one token."""
    moved = x[0].clone()
    for l in range(1, len(x)):
        moved = moved + (x[l] - x[l - 1]) / (x[l] - x[l - 1]).norm()
    return (len(x) - 1) / float((moved - x[0]).norm())


def expodistance_by_hand(x):
    alpha = [math.log(float(x[l].norm() / x[l - 1].norm())) for l in range(1, len(x))]
    mean = sum(alpha) / len(alpha)
    return sum((a - mean) ** 2 for a in alpha) / len(alpha) / mean**2


def test_against_the_formulas_token_by_token():
    X = states()
    for i in range(X.shape[1]):
        assert float(trajectory.lss(X)[i]) == pytest.approx(lss_by_recursion(X[:, i]), rel=1e-12)
        assert float(trajectory.expodistance(X)[i]) == pytest.approx(expodistance_by_hand(X[:, i]), rel=1e-10)


def test_update_ratio_of_each_block_and_token():
    X = states()
    X[3, 1] = 0
    ratio = trajectory.update_ratio(X)
    assert ratio.shape == (8, 5)
    for l in range(1, 9):
        for i in range(5):
            before = math.sqrt(sum(float(x) ** 2 for x in X[l - 1, i]))
            moved = math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(X[l, i], X[l - 1, i], strict=True)))
            expected = moved / before if before > 0 else math.nan
            assert float(ratio[l - 1, i]) == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert ratio.isnan().sum() == 1 and ratio[3, 1].isnan()


def test_windows_are_the_measures_of_the_states_around_a_layer():
    X, width, L = states(L=9), 5, 9
    lss, growth = trajectory.lss_window(X, width), trajectory.expodistance_window(X, width)
    even = trajectory.equidistance_window(X, width)
    for l in range(1, L + 1):
        fits = 2 <= l <= L - 2
        assert lss[l - 1].isfinite().all() == fits and growth[l - 1].isfinite().all() == fits
        if fits:
            around = X[l - 2 : l + 3]
            torch.testing.assert_close(lss[l - 1], trajectory.lss(around))
            torch.testing.assert_close(growth[l - 1], trajectory.expodistance(around))
            torch.testing.assert_close(even[l - 1], trajectory.equidistance(around))


def test_straight_lines_and_exponential_growth():
    direction = torch.randn(6, dtype=torch.float64)
    pace = torch.tensor([0.0, 1.0, 1.5, 4.0, 9.0], dtype=torch.float64)
    line = (3 + pace)[:, None, None] * direction
    assert float(trajectory.lss(line)) == pytest.approx(1, abs=1e-12)
    growing = 1.3 ** torch.arange(7, dtype=torch.float64)[:, None, None] * direction
    assert float(trajectory.expodistance(growing)) == pytest.approx(0, abs=1e-20)
    even = torch.arange(1, 7, dtype=torch.float64)[:, None, None] * direction
    assert float(trajectory.equidistance(even)) == pytest.approx(0, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_invariances(seed, scale):
    X = states(seed)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    for measure in (trajectory.lss, trajectory.expodistance, trajectory.equidistance):
        torch.testing.assert_close(measure(scale * X @ Q), measure(X), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(trajectory.update_ratio(scale * X @ Q), trajectory.update_ratio(X))
    shift = torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(trajectory.lss(X + shift), trajectory.lss(X))
    assert (trajectory.lss(X) >= 1 - 1e-12).all()


def test_what_is_undefined_is_nan():
    X = states()
    X[3, 0] = X[2, 0]  # token 0 stands still once
    assert trajectory.lss(X)[0].isnan() and trajectory.lss(X)[1:].isfinite().all()
    turning = torch.tensor([[1.0, 0], [0, 1.0], [-1.0, 0], [0, -1.0]])[:, None]  # constant norm
    assert trajectory.expodistance(turning).isnan().all()
    back_and_forth = torch.tensor([[1.0, 0], [2.0, 0], [1.0, 0]])[:, None]
    assert trajectory.lss(back_and_forth).isnan().all()
    assert trajectory.expodistance(states(L=1)).isnan().all()


@pytest.mark.parametrize(("L", "width"), [(2, 3), (3, 3), (4, 3), (6, 3), (8, 5), (12, 7), (19, 9), (20, 11), (36, 11)])
def test_default_width(L, width):
    """11 where L >= 20, else the largest odd number <= L/2 + 1, at least 3."""
    assert trajectory.default_width(L) == width
