"""A store through runs that are resumed, fail and begin again, or are other runs: the same in each way to measure a training."""

import pytest
import torch

from tests.support.drivers import DRIVERS
from tests.support.files import contents
from tests.support.refused import refused
from tests.support.stores import assert_same_results
from tracker.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("train", DRIVERS.values(), ids=DRIVERS)]

ANOTHER = "holds the units of another run|belongs to another training"


def test_a_resumed_run_continues_its_store(train, tmp_path):
    """Its units are those of a whole run; those beyond its checkpoint are set aside, and another run is refused."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(whole, 6)
    train(run, 5)
    train(run, 6, resume=3)
    store = Store(run / "store")
    assert [*contents(store.path / "superseded")] == ["step00000004.nc", "step00000005.nc"]
    assert store.steps() == [0, 1, 2, 3, 4, 5, 6]
    assert_same_results(store.path, whole / "store")
    with refused(ANOTHER):
        train(run, 6)


def test_a_run_is_resumed_beyond_a_damaged_unit(train, tmp_path):
    """What was measured, and how, is read from the last whole unit; the damaged one stays."""
    train(tmp_path, 4)
    store = Store(tmp_path / "store")
    half = store.file(4).read_bytes()[:5000]
    store.file(4).write_bytes(half)
    train(tmp_path, 5, resume=4)
    assert store.steps() == [0, 1, 2, 3, 4, 5] and store.file(4).read_bytes() == half


def test_a_run_that_fails_begins_again(train, tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, 4, fail_at=2)
    with refused(r"k was \[2\], now \[3\].*never mixed"):
        train(tmp_path, 4, k=3)
    store = Store(tmp_path / "store")
    measured = store.steps()
    with pytest.warns(UserWarning, match=f"the run begins again: its {len(measured)} units so far"):
        train(tmp_path, 4)
    assert store.steps() == [0, 1, 2, 3, 4] and measured in ([0, 1, 2], [0, 1])
    assert len(contents(store.path / "superseded")) == len(measured)
