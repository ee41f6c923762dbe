"""Tensors kept within a budget of memory, and beyond it in files.

A file has no name by the time it is used, so it goes when its last tensor does, also when the process is killed. Its pages
are the operating system's to write out and read back.
"""

import errno
import tempfile

import torch
from torch import Tensor

from tracker.errors import UsageError


class Spill:
    """Keeps tensors: as many bytes as `memory` where they are, the others in files (on the CPU, whatever their device)."""

    def __init__(self, memory: int) -> None:
        self.memory = memory  # bytes left

    def keep(self, tensor: Tensor) -> Tensor:
        """The same values, apart from any larger storage that they are a part of.

        Raises:
            UsageError: if the directory of temporary files has no room for them.
        """
        if tensor.nbytes > self.memory:
            return _in_file(tensor)
        self.memory -= tensor.nbytes
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _in_file(tensor: Tensor) -> Tensor:
    try:
        with tempfile.NamedTemporaryFile(prefix="tracker-") as file:
            file.write(
                tensor.cpu().contiguous().view(torch.uint8).numpy().data
            )  # not mapped yet: a full disk raises here
            file.flush()
            return torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UsageError(
            f"recorded hidden states are larger than their part of the memory budget, and {tempfile.gettempdir()} has no "
            f"room for another {tensor.nbytes / 1e9:.3g} GB; name a directory with more in TMPDIR, raise the budget, or "
            "give shorter inputs"
        ) from error
