"""What the GPU tests need of a device, and the parameters that run a test on each."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_each(pretend: Sequence[Any] = ((),), cuda: Sequence[Any] = ((),)) -> list[ParameterSet]:
    """Return the parameters of a test: ("cuda", *case) for each case in `cuda`, and the same for the pretend device."""
    named = {"cuda": (cuda, ON_CUDA), "pretend": (pretend, [])}
    return [
        pytest.param(name, *case, marks=marks, id="-".join((name, *map(str, case))))
        for name, (cases, marks) in named.items()
        for case in cases
    ]


DEVICES = pytest.mark.parametrize("accelerator", on_each(), indirect=True)
