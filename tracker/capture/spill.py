"""Keep tensors in memory up to a budget, and beyond it in memory-mapped temporary files, or in the host's memory.

A file is unlinked before it is used, so it disappears with its last tensor, also if the process is killed. The operating
system writes its pages out and reads them back.
"""

import os
import tempfile

import torch
from torch import Tensor

from checkpoints.errors import NO_SPACE
from tracker.errors import UsageError
from tracker.linalg.transfer import copies_beside_work


class Spill:
    """A budget of `memory` bytes: tensors within it stay where they are, the others go to files (on the CPU)."""

    def __init__(self, memory: int) -> None:
        self.memory = memory  # bytes left

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the same values in a storage of their own size, in memory or in a file.

        Raises:
            UsageError: if the directory of temporary files has no space for them.
        """
        if tensor.nbytes > self.memory:
            return _in_file(tensor)
        self.memory -= tensor.nbytes
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def host_memory() -> int:
    """Return how many bytes of the host's memory an accelerator's tensors may take: a quarter of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, for later use on its device alone: the device may still be filling the copy."""
    pinned = copies_beside_work(tensor.device)
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return kept.copy_(tensor, non_blocking=pinned)


def _in_file(tensor: Tensor) -> Tensor:
    try:
        with tempfile.NamedTemporaryFile(prefix="tracker-") as file:
            # Not mapped yet: a full disk raises here.
            file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
            file.flush()
            return torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise UsageError(
            f"recorded hidden states exceed their part of the memory budget, and {tempfile.gettempdir()} has no space for "
            f"another {tensor.nbytes / 1e9:.3g} GB; set TMPDIR to a directory with more space, raise the budget, or give "
            "shorter inputs"
        ) from error
