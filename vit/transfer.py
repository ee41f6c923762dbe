"""Copies of small CPU tensors to the training device, for which the host does not wait."""

import torch
from torch import Tensor

UNPINNED = ("cpu", "mps")  # devices that share the host's memory
ALIGNMENT = 16  # bytes: a multiple of every dtype's size, so that each part can be viewed as its dtype


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy CPU tensors to a device in one transfer, or return them if the device is the CPU.

    They are packed into pinned memory, from which an accelerator copies asynchronously. From pageable memory each copy
    would wait until the device has finished what it was given before.

    >>> to_device(torch.device("cpu"), torch.arange(2), torch.zeros(1))
    (tensor([0, 1]), tensor([0.]))
    """
    if device.type == "cpu":
        return tensors
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type not in UNPINNED)
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    parts = packed.to(device, non_blocking=True).split(sizes)
    return tuple(
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    )
