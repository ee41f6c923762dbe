"""The device of the GPU tests: CUDA (`pytest -m gpu`) or, so that their code runs everywhere, the pretend device."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.lightning_runs import ON_PRETEND_DEVICE
from tests.support.models import Size


class Cuda:
    """A CUDA device, with sizes beside which the libraries' own workspaces are small."""

    device = torch.device("cuda", 0)
    trainer = {"accelerator": "gpu", "devices": 1}
    size = Size(width=256, depth=4, tokens=64)
    # Memory budgets that hold the Jacobians of a model of this size, and that do not
    budgets = (1 << 30, 1 << 26)

    def live(self) -> int:
        """Return the bytes of all tensors on the device."""
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak(self, run: Callable[[], Any]) -> int:
        """Run; return the largest number of bytes beyond those before."""
        before = self.live()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    @contextmanager
    def limited(self, extra: int) -> Iterator[None]:
        """Return the context in which only so many more bytes can be had."""
        before = self.live()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        # The fraction limits what the allocator has reserved: segments of tensors, with the gaps between them.
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((max(before, reserved) + extra) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


class Pretended:
    """The pretend device, with sizes that a CPU core computes in seconds."""

    trainer = ON_PRETEND_DEVICE
    size = Size(width=32, depth=2, tokens=8)
    budgets = (1 << 22, 1 << 18)

    def __init__(self, pretend: Any):
        self.pretend = pretend
        self.device = pretend.device

    def live(self) -> int:
        gc.collect()
        return self.pretend.live_bytes()

    def peak(self, run: Callable[[], Any]) -> int:
        before = self.live()
        self.pretend.reset_peak()
        run()
        return self.pretend.peak_bytes() - before

    @contextmanager
    def limited(self, extra: int) -> Iterator[None]:
        with self.pretend.memory_limit(self.live() + extra):
            yield


@pytest.fixture
def accelerator(request) -> Cuda | Pretended:
    return Cuda() if request.param == "cuda" else Pretended(request.getfixturevalue("pretend"))
