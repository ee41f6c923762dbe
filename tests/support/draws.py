"""Numbers that are drawn from a generator of their own, so that they do not depend on what was drawn before."""

import torch
from torch import Tensor, nn


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def integers(low: int, high: int, *shape: int, seed: int = 1) -> Tensor:
    """Return integers from `low` to below `high`."""
    return torch.randint(low, high, shape, generator=seeded(seed))


@torch.no_grad()
def perturbed(model: nn.Module, seed: int) -> nn.Module:
    """Change all weights in place, so that norms and biases are not the identity; return the model."""
    numbers = seeded(seed)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype))
    return model
