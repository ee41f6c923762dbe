"""How many Jacobians the mis-couplings of blocks need, with and without the final norm."""

import pytest

import tracker
from tests.models import build

pytestmark = pytest.mark.filterwarnings("ignore")


def test_one_jacobian_more_for_both_conventions(formed):
    """Both conventions take L + 1 Jacobians, one more than a single convention."""
    model, given = build("gpt_neox")
    asked = {"include": [(1, False), (2, False), (3, False), (3, True)]}
    asked["exclude"] = asked["include"][:3]
    for final_norm, expected in asked.items():
        formed.clear()
        tracker.measure(model, given, k=3, final_norm=final_norm)
        calls = [call for ((call, _),) in formed]
        assert [(call.layer, call.final_norm is not None) for call in calls] == expected
