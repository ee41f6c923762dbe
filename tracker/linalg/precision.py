"""Precision of arithmetic: the switches of a device's float32 products, and what a block's own code rounds.

The switches let a device multiply float32 numbers less exactly: set for a while, and put back as they were.

PyTorch has two sets of them, an older and a newer, and refuses some questions about the older when the newer disagrees.
What is as wanted already is therefore not touched, and everything else is put back through the set that it came from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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


class Roundings(TorchFunctionMode):
    """Notice while it lasts whether code rounds floating tensors to a lower precision than it was given them in.

    Many blocks do so in part: routers, norms, softmax and rotary positions in float32 whatever the dtype of the rest.
    Code compiled by `torch.jit` is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if not self.seen:
            given = [t.dtype.itemsize for t in tree_leaves((arguments, keywords)) if _is_floating(t)]
            # What is written into a tensor is rounded as well.
            written = arguments[:1] if result is None else result
            self.seen = any(t.dtype.itemsize < max(given, default=0) for t in tree_leaves(written) if _is_floating(t))
        return result


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
