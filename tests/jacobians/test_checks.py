"""What the checks say of Jacobians whose entries are known."""

import math

import torch

from tracker.jacobians.checks import quality
from tracker.linalg.precision import FLOOR


def test_what_rounding_hides():
    J = torch.eye(16).expand(2, -1, -1).clone()
    J[1] *= FLOOR[torch.float32]
    assert quality(1.01 * J, torch.float32).tolist() == [True, False]
    assert quality(0.99 * J, torch.float32).tolist() == [True, True]
    assert quality(1e-9 * J, torch.float64).tolist() == [True, False]
    J[0, 3, 4] = math.inf
    assert quality(J, torch.float64).tolist() == [False, False]
