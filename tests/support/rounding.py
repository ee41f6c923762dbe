"""How far rounding moves a result: a bound that holds for the kernels of every processor."""

import torch
import xarray as xr

# A block's Jacobian and its decomposition: some 30 products, norms and functions, one after another
BLOCK = 30


def rounding(dtype: torch.dtype, operations: int = BLOCK, amplified: float = 1.0) -> float:
    """Bound the error of a value, relative to its scale: 3 eps for each operation, times what the formula amplifies.

    The kernels of processors add the terms of a product in different orders. As the roundings of a sum are independent, it errs
    by one or two eps of its scale, whatever its length; two results that are compared differ by up to twice that. In float32 the
    bound of a block is 1.1e-5: it shows a wrong factor of 1.01, and products in TF32 or bfloat16, which err by 1e-4 and more.

    Args:
        operations: how many there are one after another.
        amplified: error of the value over that of what it is computed from, both relative to their scales: 1 for singular values
            relative to s_1 (Weyl), s_1 over the gap to the next singular value for singular vectors (Wedin).
    """
    return 3 * operations * torch.finfo(dtype).eps * amplified


def of_miscouplings(ds: xr.Dataset, dtype: torch.dtype | None = None) -> float:
    """Bound the error of mis-couplings at any of a Dataset's rows, blocks and k: that of singular vectors, on both sides.

    Args:
        dtype: in which the least exact part was computed; that of the Dataset if None.
    """
    gap = float(ds.diagnostics_singular_gap.min())
    return of_vectors(dtype or getattr(torch, ds.attrs["dtype"]), ds.attrs["width"], gap)


def of_vectors(dtype: torch.dtype, d: int, gap: float) -> float:
    """Bound the error of mis-couplings from the smallest gap between singular values, relative to s_1.

    Two vectors turn into each other by the error between them over their gap. Rounding errors have no direction: of those of a
    (d, d) matrix, two vectors see 1/sqrt(d).
    """
    bound = rounding(dtype, amplified=2 / (gap * d**0.5))
    assert bound < 1e-2, f"gaps down to {gap:.0e} leave no digit that shows a wrong factor of 1.01"
    return bound
