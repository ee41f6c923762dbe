"""Compare the fast reading of mis-couplings with the curve points of the whole store."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import neox, tokens
from tracker.analysis.curves import curves
from tracker.analysis.reduction import read_miscouplings
from tracker.measures.registry import MISCOUPLINGS
from tracker.store import Store


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
    # When steps were measured differs between the cells of a grid
    assert read.coords.keys() <= read.sizes.keys()
    for token in (0, 1):
        points = curves(whole.isel(token=[token]))
        for name in MISCOUPLINGS:
            for part, kind in (("", "miscoupling"), ("_null", "null")):
                expected = points[f"{name}{part}"].transpose("step", "k", "pairs").values
                np.testing.assert_allclose(
                    read[kind].sel(measure=name).isel(token=token), expected, rtol=1e-12
                )


@pytest.mark.slow
def test_measures_can_be_chosen_and_damage_is_named(store, tmp_path):
    read = read_miscouplings(store, ["offdiag", "unknown"])
    assert read.measure.values.tolist() == ["offdiag"]
    with pytest.raises(FileNotFoundError):
        read_miscouplings(tmp_path)
    damaged = Store(tmp_path)
    damaged.units.mkdir()
    damaged.file(3).write_bytes(Store(store).file(0).read_bytes()[:5000])
    with pytest.raises(ValueError, match="step00000003.nc is damaged"):
        read_miscouplings(tmp_path)
