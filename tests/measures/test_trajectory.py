"""Trajectory measures: each token by itself in NumPy, what is undefined, and the default width of windows."""

import numpy as np
import pytest
import torch

from tests.support.formulas import OF_PATHS
from tests.support.models import random
from tracker.measures import trajectory


def states(seed: int = 0, L: int = 8, n: int = 5, d: int = 6):
    return random(L + 1, n, d, seed=seed).cumsum(0)


def test_what_is_undefined_is_nan():
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


@pytest.mark.parametrize("name", [name for name in OF_PATHS if name != "norm"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_each_token_by_itself(name, scale):
    X = scale * states()
    X[3, 0] = X[2, 0]  # token 0 stands still once
    if name.startswith(("update", "block")):
        X[3, 1] = 0
    measure, paths = getattr(trajectory, name.removesuffix("_window")), X.movedim(1, 0).numpy()
    windows = [{"window": width} for width in (3, 5, 9, 11)]
    for options in windows if name.endswith("_window") else [{}]:
        expected = np.stack([OF_PATHS[name](path, **options) for path in paths], -1)
        np.testing.assert_allclose(measure(X, *options.values()), expected, rtol=1e-10, atol=1e-15)


def test_growth_that_is_zero_but_for_rounding_has_no_expodistance():
    norms = 1 + torch.tensor([0.0, 4, 0, 4, 0]).double() * torch.finfo(torch.float64).eps
    assert trajectory.expodistance(norms[:, None, None]).isnan().all()
    grown = torch.tensor([1.0, 1 + 1e-9, 1 + 4e-9], dtype=torch.float64)[:, None, None]
    assert float(trajectory.expodistance(grown)) == pytest.approx(0.25, rel=1e-5)


def test_principal_axes():
    """Eigenvectors of the covariance, whose largest entries are positive; none without variance along it."""
    x = random(20, 6, seed=4)
    x = x * torch.tensor([1, 9.0, 2, 5, 1, 0.5]) + 3
    for rows in (x, -x):
        mean, axes = trajectory.principal_axes(rows)
        torch.testing.assert_close(mean, rows.sum(0) / 20)
        values, vectors = np.linalg.eigh(np.cov(rows.numpy().T))
        for i in range(2):
            largest = vectors[np.abs(vectors[:, -1 - i]).argmax(), -1 - i]
            expected = vectors[:, -1 - i] * np.sign(largest)
            np.testing.assert_allclose(axes[:, i], expected, atol=1e-10)
    for rows, defined in ((x[:2], 1), (x[:1], 0), (1e-3 * x[:3], 2), (x[:, :1] * x[0], 1)):
        _, axes = trajectory.principal_axes(rows)
        assert axes.shape == (6, 2) and axes.isfinite().all(0).sum() == defined
