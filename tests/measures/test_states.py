"""Measures of the states of a batch with padding, and what is undefined."""

import pytest
import torch

from tests.support.models import random
from tracker.measures.states import cosine_to, principal_axes_of_samples
from tracker.measures.trajectory import principal_axes


def test_the_cosine_with_a_state_of_zero_is_undefined():
    clean = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    (first, same) = cosine_to([clean + torch.tensor([1.0, 0.0]), clean], clean)
    expected = torch.tensor([[torch.nan, (4 * 3 + 4 * 4) / (32**0.5 * 5)]])
    torch.testing.assert_close(first, expected, equal_nan=True)
    torch.testing.assert_close(same, torch.tensor([[torch.nan, 1.0]]), equal_nan=True)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
def test_principal_axes_are_those_of_states_without_padding(lengths):
    y = random(2, 5, 8)
    found = principal_axes_of_samples(y, [range(n) for n in lengths])
    for n, x, *of_sample in zip(lengths, y, *found, strict=True):
        torch.testing.assert_close(tuple(of_sample), principal_axes(x[:n]))
