"""The sentence on the page that says what the first curve shows."""

import numpy as np
import pytest

import tracker
from tests.support.stores import generated
from tracker.analysis.onset import onset
from tracker.analysis.reduction import reduced
from tracker.report.contents import contents
from tracker.report.texts import findings

STEPS = (0, 1, 8, 2000)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return contents(
        reduced(tracker.open_results(generated(tmp_path_factory.mktemp("run") / "toy", STEPS)))
    )


def changed(shown, values, null=1.0):
    name, k = "miscoupling", min(shown["ks"])
    curve = {"value": list(values), "null": [null] * len(values)}
    departure = null - np.array(values)[:, None] + 1e-3 * np.arange(3)
    found = onset(
        np.array(shown["steps"]),
        departure,
        (null - np.array(values)[:, None]) * np.linspace(0.8, 1.2, 15),
    )
    begins = {"later": found.later if found.found else None, "words": found.words}
    return {**shown, "curves": {name: {k: {"mean_offdiag": curve}}}, "onset": {name: {k: begins}}}


@pytest.mark.slow
def test_onset_maximum_and_end(shown):
    k = min(shown["ks"])
    assert findings(changed(shown, [1, 0.999, 0.8, 0.93])) == (
        "Coupling begins between steps 1 and 8 and is strongest at step 8: 0.200 (mis-coupling 0.800, null level 1.000); "
        "at the last step, 2,000, it is 0.070 (mis-coupling 0.930, null level 1.000) "
        f"(mis-coupling m_K, K = {k}, mean over pairs of different blocks)."
    )
    assert "last step" not in findings(changed(shown, [1, 0.999, 0.8, 0.7]))


def test_no_onset(shown):
    assert "Onset of coupling none beyond chance (mis-coupling m_K" in findings(
        changed(shown, [1, 1.001, 1, 1.002])
    )


def test_undefined_values_are_left_out(shown):
    assert "strongest at step 8" in findings(changed(shown, [1, 0.999, 0.8, np.nan]))
    assert findings({**shown, "layers": 1}) == "" and findings({**shown, "curves": {}}) == ""
