"""How many Jacobians the mis-couplings of blocks need, and which rows are measured together."""

import pytest
import torch

import tracker
from tests.support.models import build
from tracker.jacobians.slicing import Rows
from tracker.measures.depthwise import groups_of_rows
from tracker.model.recording import Recording

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


def test_rows_of_two_recordings_in_groups_of_five():
    seven = Rows(torch.arange(7), torch.arange(7))
    first, second = (object.__new__(Recording) for _ in range(2))
    groups = groups_of_rows([(first, seven), (second, seven)], 5)
    assert [[len(rows) for _, rows in group] for group in groups] == [[5], [2, 3], [4]]
