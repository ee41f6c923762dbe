"""How far rounding moves a result: a bound that holds for the kernels of every processor."""

import torch

BLOCK = 30  # a block's Jacobian and its decomposition: some 30 products, norms and functions, one after another


def rounding(dtype: torch.dtype, operations: int = BLOCK, amplified: float = 1.0) -> float:
    """Bound the error of a value, relative to its scale: 3 eps for each operation, times what the formula amplifies.

    The kernels of processors add the terms of a product in different orders. As the roundings of a sum are independent, it errs
    by one or two eps of its scale, whatever its length; two results that are compared differ by up to twice that. In float32 the
    bound of a block is 1.1e-5, which neither a wrong factor of 1.01 passes nor a product in TF32 or bfloat16, off by 1e-4 or more.

    Args:
        operations: how many there are one after another.
        amplified: error of the value over that of what it is computed from, both relative to their scales: 1 for singular values
            relative to s_1 (Weyl), s_1 over the gap to the next singular value for singular vectors (Wedin).
    """
    return 3 * operations * torch.finfo(dtype).eps * amplified
