"""Relative error of a residual function f = block - 1, and its tolerances; whether entries are finite."""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
ROUNDED = (
    1e-5  # tolerance in float64 of a block that rounds to float32 inside, or was recorded so: some hundred roundings
)
FAST = 5e-2  # tolerance of products in TF32 or bfloat16
FLOOR = {torch.float32: 1e-2, torch.float64: 1e-5}  # of |f| / |x|: below it, rounding of x + f exceeds the tolerance


def tolerance(dtype: torch.dtype, rounded: bool) -> float:
    """Return the largest allowed error on another path.

    Args:
        rounded: whether the block's own code, or the recording, may round to less than this dtype.
    """
    return max(TOLERANCE[dtype], ROUNDED) if rounded else TOLERANCE[dtype]


def relative_error(f: Tensor, reference: Tensor, scale: Tensor, reference_dtype: torch.dtype) -> Float[Tensor, ""]:
    """Return the maximum over the rows of |f - reference| / max(|reference|, floor |scale|); 0 for equal rows.

    The floor is `FLOOR[reference_dtype]`, the precision of the reference, whatever the dtype of the comparison.
    """
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)  # squares of large states overflow float32
    size = torch.maximum(norm(reference), FLOOR[reference_dtype] * norm(scale))
    difference = norm(f - reference)
    return torch.where(difference == 0, 0.0, difference / size).max()


def is_finite(J: Tensor) -> Bool[Tensor, ""]:
    """Whether all entries are finite."""
    return torch.isfinite(torch.stack(J.aminmax())).all()  # NaN where one entry is
