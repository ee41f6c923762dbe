"""Curve points against plain loops over the Dataset."""

import numpy as np
import pytest

import tracker
from tests.models import neox, tokens
from tracker.statistics import by_distance, curves, scalars


@pytest.fixture(scope="module")
def ds():
    return tracker.measure(neox(), tokens(3), k=[2, 4], tokens=[0, -1])


def test_means_over_pairs_and_prompts(ds):
    L, points = ds.sizes["layer"], curves(ds)
    pairs = {
        "mean": [(l, m) for l in range(L) for m in range(L)],
        "mean_offdiag": [(l, m) for l in range(L) for m in range(L) if l != m],
        "mean_adjacent": [(l, m) for l in range(L) for m in range(L) if abs(l - m) == 1],
    }
    for measure in ("miscoupling", "miscoupling_release", "offdiag", "offdiag_normalized"):
        values = ds[measure].sel(k=4).values  # (prompt, token, l, m)
        for name, chosen in pairs.items():
            per_prompt = np.mean([values[:, :, l, m] for l, m in chosen], 0)
            point = points.sel(k=4, pairs=name)
            assert float(point[measure]) == pytest.approx(per_prompt.mean(), rel=1e-6)
            assert float(point[f"{measure}_q25"]) == pytest.approx(np.quantile(per_prompt, 0.25), rel=1e-6)
            null = ds[f"{measure}_null"].sel(k=4).values  # (prompt, token, l), of the block described
            expected = np.mean([null[:, :, l] * (l != m) for l, m in chosen])
            assert float(point[f"{measure}_null"]) == pytest.approx(expected, rel=1e-6)


def test_medians_over_tokens_and_prompts(ds):
    points = curves(ds)
    for name in ("lss", "expodistance_raw", "alpha_mean"):
        for statistic, q in (("q25", 0.25), ("median", 0.5), ("q75", 0.75)):
            assert float(points[name].sel(statistic=statistic)) == pytest.approx(
                np.quantile(ds[name].values, q), rel=1e-6
            )


def test_profile_by_distance(ds):
    values = ds.miscoupling.mean(("prompt", "token")).sel(k=2)
    L = ds.sizes["layer"]
    for r in range(1, L):
        expected = np.mean([values.values[l, m] for l in range(L) for m in range(L) if abs(l - m) == r])
        assert float(by_distance(values).sel(distance=r)) == pytest.approx(expected, rel=1e-6)


def test_scalars_are_the_curve_points_under_flat_names(ds):
    flat, points = scalars(ds), curves(ds)
    assert flat["coupling/miscoupling/k4/mean_offdiag"] == float(points.miscoupling.sel(k=4, pairs="mean_offdiag"))
    assert flat["trajectory/lss/median"] == float(points.lss.sel(statistic="median"))
    assert all(isinstance(value, float) for value in flat.values())
