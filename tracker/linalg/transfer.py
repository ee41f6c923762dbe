"""Copies between the host and an accelerator, several tensors at once: a copy costs a launch and a wait, whatever its size."""

from collections.abc import Sequence

import torch
from torch import Tensor


def moved(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return tensors of one device on another, in their common dtype, by a single copy; unchanged if they are there."""
    device = torch.device(device)
    if tensors[0].device.type == device.type:
        return list(tensors)
    together = torch.cat([t.reshape(-1) for t in tensors]).to(device)
    sizes = [t.numel() for t in tensors]
    return [part.view(t.shape) for part, t in zip(together.split(sizes), tensors, strict=True)]
