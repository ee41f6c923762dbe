"""Relative error of a residual function, and how large it may be."""

from functools import partial

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = {torch.float32: 1e-2, torch.float64: 1e-5}  # of |f| / |x|: where rounding of x + f reaches the tolerance


def relative_error(f: Tensor, reference: Tensor, scale: Tensor, reference_dtype: torch.dtype) -> float:
    """Largest over the rows of |f - reference| / max(|reference|, floor |scale|); 0 where they agree exactly.

    The floor is that of the precision the reference is known in, whatever precision it is compared in.
    """
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)  # squares of large states overflow float32
    size = torch.maximum(norm(reference), FLOOR[reference_dtype] * norm(scale))
    difference = norm(f - reference)
    return float(torch.where(difference == 0, 0.0, difference / size).max())
