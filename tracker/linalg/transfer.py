"""Copies between the host and a device, with few waits.

The host waits for a device, which then has nothing to do, where a value is read (`item`, `bool`, `tolist`, `cpu`) and at a copy
to it from memory that is not pinned. So values are read together, and copies to a device are packed and pinned.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

# The first of the package's own seeds: states are often drawn with 0, 1 or 42, and noise must not equal them
SEED = 0x5EED
# Bytes: a multiple of every dtype's size, so that each part can be viewed as its dtype
ALIGNMENT = 16


def copies_beside_work(device: torch.device) -> bool:
    """Return whether a device has streams and copies from pinned memory: accelerators but Apple's."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy CPU tensors to a device in one transfer, or return them if the device is the CPU.

    They are packed into pinned memory, from which an accelerator copies asynchronously. From pageable memory each copy
    would wait until the device has finished what it was given before.

    >>> to_device(torch.device("cpu"), torch.arange(2), torch.zeros(1))
    (tensor([0, 1]), tensor([0.]))
    """
    if device.type == "cpu":
        return tensors
    # Each part begins at a multiple of the alignment, so that it can be viewed as its dtype.
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=copies_beside_work(device))
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    parts = packed.to(device, non_blocking=True).split(sizes)
    return tuple(
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    )


def standard_normal(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Draw standard normal numbers of the dtype and on the device of `like`: on the CPU in float64, so that all agree."""
    return to_device(like.device, drawn(shape, SEED + seed).to(like.dtype))[0]


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Draw standard normal numbers on the CPU in float64."""
    return torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def read(values: Sequence[Tensor]) -> list:
    """Return the numbers in tensors of one shape, device and dtype, read together.

    >>> read([torch.tensor(1), torch.tensor(2)])
    [1, 2]
    """
    return torch.stack(tuple(values)).tolist() if values else []


def moved(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return tensors of one device on another, in their common dtype, by a single copy; unchanged if they are there."""
    device = torch.device(device)
    if all(t.device.type == device.type for t in tensors):
        return list(tensors)
    together = torch.cat([t.reshape(-1) for t in tensors]).to(device)
    sizes = [t.numel() for t in tensors]
    return [part.view(t.shape) for part, t in zip(together.split(sizes), tensors, strict=True)]


def to_arrays(values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return floating and Boolean tensors as arrays; those of a device are copied together."""
    parts = moved([*values.values()], "cpu")
    return {
        name: part.to(values[name].dtype).numpy() for name, part in zip(values, parts, strict=True)
    }
