"""Smooth images that augmentation is compared on, its operations, and the grey that it fills with."""

import torch

from vit.augment import parse

POLICY = parse("rand-m9-mstd0.5-inc1")
MEAN = torch.tensor([0.51, 0.4, 0.31])


def photographs(count: int) -> torch.Tensor:
    """Return smooth random images with all grey levels."""
    small = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    large = torch.nn.functional.interpolate(small, 32, mode="bicubic").clamp(0, 1)
    return (255 * large).round().to(torch.uint8)
