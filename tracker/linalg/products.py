"""Singular values of long products of matrices, without loss of the small ones.

    P_l = M_l M_{l-1} ... M_1 = Q T        Q orthogonal, T upper triangular
    M_l Q = Q' R, T' = R T                 a QR step

The product itself holds its singular values to the rounding of the largest. Row i of T falls in size with the direction i
that it belongs to, and as R is upper triangular it is computed from the rows i, i + 1, ... alone: each row is accurate
relative to itself, also in float32. The values are those of T, decomposed in float64.

A QR step costs some three products. Neighbouring matrices are multiplied directly while the spread of their singular values,
read off the last R, is far from the precision: on the diagonal of R are the factors by which directions grow.
Cost for each matrix: a product, and a QR step and a product for each group of 1 to `MOST` matrices.
"""

from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.cores import batch_on_cores
from tracker.linalg.precision import float32_products
from tracker.linalg.svd import SMALL

MOST = 8  # matrices that are multiplied without a QR step


class Chain:
    """The product of matrices, each multiplied from the left as it comes; R products side by side."""

    def __init__(self) -> None:
        self._product: Tensor | None = None  # of the matrices since the last QR step, and Q
        self._triangle: Tensor | None = None
        self._since, self._group = 0, 1

    def multiply(self, M: Float[Tensor, "R d d"]) -> None:
        """Multiply the product by M from the left."""
        with float32_products("ieee"):
            self._product = M if self._product is None else M @ self._product
        self._since += 1
        if self._since == self._group:
            self._orthogonalize()

    def singular_values(self) -> Float[Tensor, "R d"]:
        """Return the singular values of the product so far, in float64."""
        if self._since:
            self._orthogonalize()
        assert self._triangle is not None
        return singular_values(self._triangle)

    def _orthogonalize(self) -> None:
        assert self._product is not None
        self._product, R = torch.linalg.qr(self._product)
        with float32_products("ieee"):
            self._triangle = R if self._triangle is None else R @ self._triangle
        growth = torch.linalg.diagonal(R).abs()
        spread = float((growth.amax(-1) / growth.amin(-1)).amax())
        # NaN: a zero matrix
        of_each = log(spread) / self._since if spread < float("inf") else float("inf")
        # The columns may spread by half of the digits before QR: the other half is left for their directions.
        allowed = -0.5 * log(torch.finfo(R.dtype).eps)
        if of_each > 0:
            self._group = max(1, min(MOST, int(allowed / of_each)))
        else:
            self._group = MOST if of_each == 0 else 1
        self._since = 0


def singular_values(A: Float[Tensor, "B d d"]) -> Float[Tensor, "B d"]:
    """Return all singular values, computed in float64; those of small matrices on the CPU, one per core."""
    wide = A.double()
    if wide.shape[-1] > SMALL:
        return torch.linalg.svdvals(wide)
    (values,) = batch_on_cores(lambda part: (torch.linalg.svdvals(part),), wide.cpu())
    return values.to(A.device)
