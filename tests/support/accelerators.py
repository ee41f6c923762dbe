"""What the GPU tests need of a device, and the parameters that run a test on each."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.support.models import Size

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Accelerator(Protocol):
    """A device with a count of its memory and a limit to it."""

    device: torch.device
    trainer: dict[str, Any]  # options of a Lightning trainer
    size: Size
    # Memory budgets that hold the Jacobians of a model of this size, and that do not
    budgets: tuple[int, int]

    def live(self) -> int:
        """Return the bytes of all tensors on the device."""
        ...

    def peak(self, run: Callable[[], Any]) -> int:
        """Run; return the largest number of bytes beyond those before."""
        ...

    def limited(self, extra: int) -> AbstractContextManager[None]:
        """Return the context in which only so many more bytes can be had."""
        ...


def on_each(pretend: Sequence[Any] = ((),), cuda: Sequence[Any] = ((),)) -> list[ParameterSet]:
    """Return the parameters of a test: ("cuda", *case) for each case in `cuda`, and the same for the pretend device."""
    named = {"cuda": (cuda, ON_CUDA), "pretend": (pretend, [])}
    return [
        pytest.param(name, *case, marks=marks, id="-".join((name, *map(str, case))))
        for name, (cases, marks) in named.items()
        for case in cases
    ]


DEVICES = pytest.mark.parametrize("accelerator", on_each(), indirect=True)
