import warnings
from functools import partial
from inspect import currentframe

import pytest

from tracker.common import errors
from tracker.common.errors import warn_caller

CALL = "def call(f):\n    f()\n"


def line() -> int:
    return currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_a_warning_points_at_the_callers_line():
    with pytest.warns(UserWarning, match="look here") as caught:
        at = line() + 1
        warn_caller("look here")
    assert (caught[0].filename, caught[0].lineno) == (__file__, at)


def test_frames_of_the_package_and_of_frameworks_are_skipped(tmp_path):
    package = {"__name__": "tracker.measurement"}
    lightning = {"__name__": "lightning.pytorch.trainer"}
    exec(compile(CALL, f"{errors.WITHIN}measurement.py", "exec"), package)
    exec(compile(CALL, str(tmp_path / "trainer.py"), "exec"), lightning)
    inner = partial(lightning["call"], partial(package["call"], partial(warn_caller, "deep")))
    with pytest.warns(UserWarning, match="deep") as caught:
        at = line() + 1
        package["call"](inner)
    assert (caught[0].filename, caught[0].lineno) == (__file__, at)


def test_the_same_warning_is_shown_once_for_a_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_caller("often")
    assert len(caught) == 1
