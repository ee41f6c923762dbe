"""Jacobians with singular values that fall as a power, of several kinds."""

import torch

from tests.support.models import random


def falling(d, power, seed):
    """A Jacobian with singular values k^-power in random bases."""
    U, _, V = torch.linalg.svd(random(d, d, seed=seed))
    return U * torch.arange(1, d + 1, dtype=torch.float64) ** -power @ V


def planted(kind, d, power, seed):
    J, I = falling(d, power, seed), torch.eye(d, dtype=torch.float64)
    return {
        "random": J,
        "with a trace": 0.4 * J - 0.2 * I,
        "symmetric": J + J.T,
        "negative": -(J @ J.T) - 0.1 * I,
        "antisymmetric": J - J.T,
    }[kind]


KINDS = ("random", "with a trace", "symmetric", "negative", "antisymmetric")
