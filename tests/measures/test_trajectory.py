"""Trajectory measures: each token by itself in NumPy, what is undefined, and the default width of windows."""

from math import log

import numpy as np
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


def by_hand(X):
    """Return the measures of one token's states (depth, d)."""
    steps, norms = np.diff(X, axis=0), np.linalg.norm(X, axis=1)
    lengths = np.linalg.norm(steps, axis=1)
    alphas = np.log(norms[1:] / norms[:-1])
    cosines = [
        a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(X, X[1:], strict=False)
    ]
    return {
        "lss": len(steps) / np.linalg.norm((steps / lengths[:, None]).sum(0)),
        "expodistance": alphas.var() / alphas.mean() ** 2,
        "alpha_mean": log(norms[-1] / norms[0]) / len(steps),
        "equidistance": lengths.std() / lengths.mean(),
        "norms": norms,
        "update_ratio": lengths / norms[:-1],
        "block_influence": 1 - np.array(cosines),
        "update_cosine": [
            f @ x / np.linalg.norm(f) / np.linalg.norm(x) for f, x in zip(steps, X, strict=False)
        ],
    }


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_each_token_by_itself(scale):
    X = scale * states()
    for t in range(X.shape[1]):
        for name, expected in by_hand(X[:, t].numpy()).items():
            found = getattr(trajectory, name)(X)[..., t]
            np.testing.assert_allclose(found, expected, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", ["lss", "expodistance", "equidistance"])
@pytest.mark.parametrize("width", [3, 5, 9, 11])
def test_windows_are_of_the_states_around_each_layer(name, width):
    X = states()
    found, half = getattr(trajectory, name)(X, width), width // 2
    assert found.shape == (8, 5)
    for l in range(1, 9):
        fits = half <= l and l + half <= 8
        for t in range(5):
            if fits:
                expected = by_hand(X[l - half : l + half + 1, t].numpy())[name]
                assert float(found[l - 1, t]) == pytest.approx(expected, rel=1e-10)
            else:
                assert found[l - 1, t].isnan()


def test_growth_that_is_zero_but_for_rounding_has_no_expodistance():
    norms = 1 + torch.tensor([0.0, 4, 0, 4, 0]).double() * torch.finfo(torch.float64).eps
    assert trajectory.expodistance(norms[:, None, None]).isnan().all()
    grown = torch.tensor([1.0, 1 + 1e-9, 1 + 4e-9], dtype=torch.float64)[:, None, None]
    assert float(trajectory.expodistance(grown)) == pytest.approx(0.25, rel=1e-5)


def test_principal_axes():
    """Eigenvectors of the covariance, whose largest entries are positive; none without variance along it."""
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
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
