"""Compare the fast reading of mis-couplings with the curve points of the whole store."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import neox, tokens
from tracker.analysis.miscouplings import _means_over_pairs, read_miscouplings
from tracker.analysis.statistics import curves
from tracker.measures.registry import MISCOUPLINGS
from tracker.results import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    for step in (0, 8):
        torch.manual_seed(step)
        model = neox()
        unit = tracker.measure(model, tokens(3), k=[2, 4], tokens=(0, -1)).assign_coords(step=step)
        Store(directory).units.mkdir(parents=True, exist_ok=True)
        Store(directory).write(step, unit)
    return directory


@pytest.mark.slow
def test_values_are_those_of_the_curves(store):
    read, whole = read_miscouplings(store), tracker.open_results(store)
    assert read.sizes == {"step": 2, "token": 2, "measure": 5, "k": 2, "pairs": 3}
    for token in (0, 1):
        points = curves(whole.isel(token=[token]))
        for name in MISCOUPLINGS:
            for part, kind in (("", "miscoupling"), ("_null", "null")):
                expected = points[f"{name}{part}"].transpose("step", "k", "pairs").values
                np.testing.assert_allclose(read[kind].sel(measure=name).isel(token=token), expected, rtol=1e-12)


@pytest.mark.slow
def test_measures_can_be_chosen_and_damage_is_named(store, tmp_path):
    read = read_miscouplings(store, ["offdiag", "unknown"])
    assert read.measure.values.tolist() == ["offdiag"]
    with pytest.raises(FileNotFoundError):
        read_miscouplings(tmp_path)
    damaged = Store(tmp_path)
    damaged.units.mkdir()
    damaged.file(3).write_bytes(Store(store).file(0).read_bytes()[:5000])
    with pytest.raises(ValueError, match="step00000003.nc can't be read"):
        read_miscouplings(tmp_path)


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_means_over_pairs_are_those_of_a_loop(layers, undefined):
    random = np.random.default_rng(layers)
    values, null = random.random((3, 2, layers, layers)), random.random((3, 2, layers))
    if undefined:
        values[0, 1, -1, 0] = np.nan
    found = _means_over_pairs(values, null)
    kinds = (lambda l, m: True, lambda l, m: l != m, lambda l, m: abs(l - m) == 1)
    for sample in np.ndindex(3, 2):
        for i, counts in enumerate(kinds):
            pairs = [(l, m) for l in range(layers) for m in range(layers)]
            pairs = [(l, m) for l, m in pairs if counts(l, m) and not np.isnan(values[sample][l, m])]
            levels = [null[sample][l] * (l != m) for l, m in pairs]
            expected = [np.mean([values[sample][pair] for pair in pairs]), np.mean(levels)] if pairs else [np.nan] * 2
            np.testing.assert_allclose(found[:, *sample, i], expected, rtol=1e-13)
