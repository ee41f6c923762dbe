"""The bytes that a model's weights take, and the release of what a failed measurement has held."""

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracker.blocks.find import unwrap

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tracker.blocks.find import Blocks


def release_memory(device: "torch.device") -> None:
    """Free what a measurement that failed has left on a device. Its error must be gone, or have no traceback.

    The frames of the error may be part of reference cycles, and what they held is in the allocator's cache, in pieces.
    """
    gc.collect()
    if device.type != "cpu":
        import torch

        torch.get_device_module(device).empty_cache()


def weights_memory(model: "nn.Module", blocks: "Blocks", dtype: "torch.dtype") -> int:
    """Return the bytes that a model's weights take on an accelerator.

    Counted are all weights as they are stored, and in the measuring dtype those outside the blocks and of the largest block.
    """
    stored, converted = bytes_of(unwrap(model), dtype)
    of_blocks = _converted_blocks(model, blocks, dtype)
    return stored + converted - sum(of_blocks) + max(of_blocks, default=0)


def converted_block(model: "nn.Module", blocks: "Blocks", dtype: "torch.dtype") -> int:
    """Return the bytes of the largest block's weights in the measuring dtype, if they are stored in another."""
    return max(_converted_blocks(model, blocks, dtype), default=0)


def _converted_blocks(model: "nn.Module", blocks: "Blocks", dtype: "torch.dtype") -> Sequence[int]:
    names = [] if blocks.spans else blocks.names
    return [bytes_of(unwrap(model).get_submodule(name), dtype)[1] for name in names]


def bytes_of(module: "nn.Module", dtype: "torch.dtype") -> tuple[int, int]:
    """Return the bytes of a module's weights as stored, and of copies of those in another dtype in `dtype`."""
    tensors = [*module.parameters(), *module.buffers()]
    other = sum(t.numel() for t in tensors if t.is_floating_point() and t.dtype != dtype)
    return sum(t.nbytes for t in tensors), other * dtype.itemsize
