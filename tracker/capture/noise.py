"""Noise for checks by forward passes: added to a value, it changes whatever depends on that value."""

import torch
from torch import Tensor

from tracker.linalg.transfer import SEED


def noise_like(values: Tensor) -> Tensor:
    """Return noise of the size of these values (1 if they are all zero), the same at every call with the same shape."""
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return noise * (1 + values.square().mean().sqrt())
