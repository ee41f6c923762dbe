"""The sentence on the page that says what the first curve shows."""

import numpy as np
import pytest

from tracker.report.texts import findings

OF = "(mis-coupling m_K, K = 4, mean over pairs of different blocks)."
BEGINS = "Coupling begins between steps 1 and 8 and is strongest at step 8: 0.200 (mis-coupling 0.800, null level 1.000)"
LAST = "at the last step, 2,000, it is 0.070 (mis-coupling 0.930, null level 1.000)"


@pytest.mark.parametrize(
    "values, later, said",
    [
        ([1, 0.999, 0.8, 0.93], 8, f"{BEGINS}; {LAST} {OF}"),
        ([1, 0.999, np.nan, 0.8], 8, f"{BEGINS.replace('at step 8', 'at step 2,000')} {OF}"),
        ([1, 0.999, 0.8, np.nan], 8, f"{BEGINS} {OF}"),
        ([1, 1.001, 1, 1.002], None, f"Onset of coupling between steps 1 and 8 (95 %) {OF}"),
        ([1, np.nan, np.nan, np.nan], 8, ""),
    ],
)
def test_onset_maximum_and_end(values, later, said):
    curve = {"mean_offdiag": {"value": values, "null": [1.0] * 4}}
    begins = {"later": later, "words": "between steps 1 and 8 (95 %)"}
    shown = {"layers": 3, "ks": [8, 4], "steps": [0, 1, 8, 2000]}
    shown |= {"curves": {"miscoupling": {4: curve}}, "onset": {"miscoupling": {4: begins}}}
    assert findings(shown) == said
    assert findings({**shown, "layers": 1}) == findings({**shown, "curves": {}}) == ""
