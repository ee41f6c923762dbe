"""Precision of arithmetic: switches of a device's float32 products, rounding inside a block's code, errors, tolerances, norms.

PyTorch has an older and a newer set of switches that let a device multiply float32 numbers less exactly, and it refuses to
read some of the older ones when the newer ones disagree. So switches that have the right value are not touched, and the
others are restored through the set that they belong to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

OLDER = {"ieee": "highest", "tf32": "high"}

# Tolerances of a residual function f = block - 1.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# In float64 of a block that rounds to float32 inside, or was recorded so: some hundred roundings
ROUNDED = 1e-5
# By bytes of a number. Of the formats of two bytes, bfloat16 is the coarser one.
EPSILON = {
    8: torch.finfo(torch.float64).eps,
    4: torch.finfo(torch.float32).eps,
    2: torch.finfo(torch.bfloat16).eps,
}
FAST = 5e-2  # of products in TF32 or bfloat16
# Of |f| / |x|: below it, rounding of x + f exceeds the tolerance
FLOOR = {torch.float32: 1e-2, torch.float64: 1e-5}


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute float32 matrix products and convolutions in full precision ("ieee"), or in TF32 if the device has it."""
    before = [switch.fp32_precision for switch in switches()]
    cudnn: Any = torch.backends.cudnn
    older, convolutions = _older(), cudnn.conv.fp32_precision
    try:
        if older not in (None, OLDER[precision]):
            torch.set_float32_matmul_precision(OLDER[precision])
        if convolutions != precision:
            cudnn.allow_tf32 = precision == "tf32"
        for switch in switches():
            now = switch.fp32_precision
            if now != precision and (precision, now) != ("ieee", "none"):
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
    """Return the newer switches; one set to "none" follows the switch above it."""
    backends: Any = torch.backends
    onednn, cudnn = backends.mkldnn, backends.cudnn
    return [backends.cuda.matmul, onednn.matmul, onednn.conv, cudnn.conv, cudnn.rnn]


def _older() -> str | None:
    """Return the older switch of matrix products; None if the newer ones have been set to other values."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


class Roundings(TorchFunctionMode):
    """While active, detect whether an operation rounds floating tensors to a lower precision than it was given (`seen`), and to
    how few bytes per number (`least`).

    Many blocks compute routers, norms, softmax and rotary positions in float32, whatever the dtype of the rest. Code
    compiled by `torch.jit` is not observed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.least = torch.float64.itemsize
        self.seen = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        # Other modes would be called for each attribute that is read here
        with torch._C.DisableTorchFunction():
            # An operation that returns None writes to its first argument, which rounds as well.
            results = arguments[:1] if result is None else result
            least = min(_sizes(results), default=torch.float64.itemsize)
            widest = max(_sizes((*arguments, keywords)), default=0)
            if least < min(torch.float64.itemsize, widest):
                self.seen, self.least = True, min(self.least, least)
        return result


def _sizes(nested: Any) -> list[int]:
    """Return the bytes per number of each floating tensor in nested tuples, lists and dictionaries."""
    tensors = (leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor))
    return [tensor.itemsize for tensor in tensors if tensor.is_floating_point()]


def tolerance(dtype: torch.dtype, rounded: bool) -> float:
    """Return the largest allowed error on another path.

    Args:
        rounded: whether the block's own code, or the recording, may round to less than this dtype.
    """
    return max(TOLERANCE[dtype], ROUNDED) if rounded else TOLERANCE[dtype]


def relative_error(
    f: Tensor, reference: Tensor, scale: Tensor, reference_dtype: torch.dtype
) -> Float[Tensor, ""]:
    """Return the maximum over the rows of |f - reference| / max(|reference|, floor |scale|); 0 for equal rows.

    The floor is `FLOOR[reference_dtype]`, the precision of the reference, whatever the dtype of the comparison.
    """
    # Squares of large states overflow float32
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    size = torch.maximum(norm(reference), FLOOR[reference_dtype] * norm(scale))
    difference = norm(f - reference)
    return torch.where(difference == 0, 0.0, difference / size).max()


def frobenius(A: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Return |A|_F, from the norms of the rows.

    On a CPU, torch's norm adds the squares of a float32 matrix to a few running sums. These are so large beside a square that
    the norm of a (2048, 2048) matrix is 8e-5 too small. The sum over a row is short.
    """
    return torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=-1), dim=-1)


def power_of_two(size: Tensor) -> Tensor:
    """Return the power of two not above a size; 1/2 for 0.

    Squares of tiny values underflow, and division by a power of two rounds nothing.
    """
    return torch.exp2(torch.frexp(size).exponent.to(size.dtype) - 1)


def is_finite(J: Tensor) -> Bool[Tensor, ""]:
    """Whether all entries are finite."""
    return torch.isfinite(torch.stack(J.aminmax())).all()  # NaN where one entry is
