"""Trajectory measures: what is undefined, and the default width of windows."""

import pytest
import torch

from tracker.measures import trajectory


def states(seed: int = 0, L: int = 8, n: int = 5, d: int = 6):
    return torch.randn(
        L + 1, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).cumsum(0)


def test_what_is_undefined_is_nan():
    X = states()
    X[3, 0] = X[2, 0]  # token 0 stands still once
    assert trajectory.lss(X)[0].isnan() and trajectory.lss(X)[1:].isfinite().all()
    X[3, 1] = 0
    assert trajectory.update_ratio(X).isnan().nonzero().tolist() == [[3, 1]]
    assert trajectory.update_cosine(X).isnan().nonzero().tolist() == [[2, 0], [3, 1]]
    assert trajectory.block_influence(X).isnan().nonzero().tolist() == [[2, 1], [3, 1]]
    turning = torch.tensor([[1.0, 0], [0, 1.0], [-1.0, 0], [0, -1.0]])[:, None]  # constant norm
    assert trajectory.expodistance(turning).isnan().all()
    back_and_forth = torch.tensor([[1.0, 0], [2.0, 0], [1.0, 0]])[:, None]
    assert trajectory.lss(back_and_forth).isnan().all()
    assert trajectory.expodistance(states(L=1)).isnan().all()


@pytest.mark.parametrize(
    ("L", "width"), [(2, 3), (3, 3), (4, 3), (6, 3), (8, 5), (12, 7), (19, 9), (20, 11), (36, 11)]
)
def test_default_width(L, width):
    """11 where L >= 20, else the largest odd number <= L/2 + 1, at least 3."""
    assert trajectory.default_width(L) == width
