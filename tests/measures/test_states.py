"""Measures of the states: what is undefined."""

import torch

from tracker.measures.states import _cosine


def test_the_cosine_with_a_state_of_zero_is_undefined():
    clean = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    (first, same) = _cosine([clean + torch.tensor([1.0, 0.0]), clean], clean)
    expected = torch.tensor([[torch.nan, (4 * 3 + 4 * 4) / (32**0.5 * 5)]])
    torch.testing.assert_close(first, expected, equal_nan=True)
    torch.testing.assert_close(same, torch.tensor([[torch.nan, 1.0]]), equal_nan=True)
