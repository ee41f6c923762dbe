"""The switches that let a device multiply float32 numbers less exactly: set for a while, and put back as they were.

PyTorch has two sets of them, an older and a newer, and refuses some questions about the older when the newer disagrees.
What is as wanted already is therefore not touched, and everything else is put back through the set that it came from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

OLDER = {"ieee": "highest", "tf32": "high"}


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Matrix products and convolutions of float32 in full ("ieee"), or in TF32 where the device has it."""
    before = [switch.fp32_precision for switch in switches()]
    cudnn: Any = torch.backends.cudnn
    older, convolutions = _older(), cudnn.conv.fp32_precision
    try:
        if older not in (None, OLDER[precision]):
            torch.set_float32_matmul_precision(OLDER[precision])
        if convolutions != precision:
            cudnn.allow_tf32 = precision == "tf32"
        for switch in switches():
            if switch.fp32_precision != precision and (precision, switch.fp32_precision) != ("ieee", "none"):
                switch.fp32_precision = precision
        yield
    finally:
        if older not in (None, OLDER[precision]):
            torch.set_float32_matmul_precision(older)
        if cudnn.conv.fp32_precision != convolutions:
            cudnn.allow_tf32 = convolutions == "tf32"
        for switch, value in zip(switches(), before, strict=True):
            if switch.fp32_precision != value:
                switch.fp32_precision = value


def switches() -> list[Any]:
    """The newer set; each stands for itself or, at "none", for the one above it."""
    backends: Any = torch.backends
    onednn, cudnn = backends.mkldnn, backends.cudnn
    return [backends.cuda.matmul, onednn.matmul, onednn.conv, cudnn.conv, cudnn.rnn]


def _older() -> str | None:
    """The older switch of matrix products; None where the newer ones have been used beside it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
