"""Jacobians that wait for the singular vectors of other blocks: on their device, in the host's memory or in a file.

Each of these keeps J, any number of matrices, and returns a function that gives J back, on its device.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tracker.model.recording import space_for, to_host

Jacobian = Callable[[], Tensor]  # () -> J, on its device


def on_device(J: Tensor) -> Jacobian:
    """Keep J where it is."""
    return lambda: J


def on_host(J: Tensor) -> Jacobian:
    """Keep J in the host's memory."""
    return partial(to_host(J).to, J.device, non_blocking=True)


class JacobianFile:
    """Keeps Jacobians in one temporary file, which has no name, so that it disappears with its last user.

    It is read and not mapped, as pages of a map count as the process's memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tracker-")

    def keep(self, J: Tensor) -> Jacobian:
        """Write J at the end of the file.

        Raises:
            UsageError: if the directory of temporary files has no space for it.
        """
        start = self._file.seek(0, os.SEEK_END)
        with space_for(J.nbytes):
            np.save(self._file, J.cpu().contiguous().numpy())
            self._file.flush()
        device = J.device

        def read() -> Tensor:
            self._file.seek(start)
            return torch.from_numpy(np.load(self._file)).to(device)

        return read
