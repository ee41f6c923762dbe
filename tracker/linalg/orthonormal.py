"""Orthonormal rows by Cholesky factorisation, against each other and against a basis.

Two passes make the rows of a block orthonormal: Q R of the rows, then Q R of what is left of them outside the basis. Whether
that was enough is known afterwards, from the pivots of the Cholesky factors. On a CPU they are tested at once, and another
method is used where they are small. On an accelerator every test would wait for the device, so the pivots are collected, and
the caller reads them with the next results that it copies to the host; if they were too small, it repeats the steps, tested.
"""

import torch
from torch import Tensor

from tracker.linalg.transfer import standard_normal

# Pivot of rows of length 1 from which Cholesky is accurate enough for a second pass to correct it
SEPARATED = 1e-2
# Length above which what is left of a row of length 1 outside the basis is orthogonal to it
OUTSIDE = 0.1


class Orthonormaliser:
    """Orthonormalise blocks of rows, against each other and against a basis.

    Every block is tested at once on a CPU; elsewhere `pivots` has to be tested by `passed` before a result is used.

    Args:
        like: a tensor of the rows' batch axes, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.tested = like.device.type == "cpu"
        # The scale of the matrices: entries far below it are rounding, not directions.
        self.scale = like.new_zeros(*like.shape[:-2], 1, 1)
        self._pivots: list[tuple[Tensor, Tensor]] = []
        self._info: list[Tensor] = []

    def update_scale(self, W: Tensor) -> Tensor:
        """Return W, a product with the matrices, after updating their scale from it."""
        if self.tested:
            self.scale = torch.maximum(self.scale, _longest(W))
        return W

    def __call__(self, W: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, L and c with W = L Q + c basis, the rows of Q orthonormal and orthogonal to the basis.

        In exact arithmetic c = 0, as the caller has subtracted the components of W in the basis. What rounding left of them
        is subtracted from the normalised rows here.
        """
        return self._test_at_once(W, basis) if self.tested else self._collect_pivots(W, basis)

    def pivots(self) -> list[Tensor]:
        """Return the pivots collected since the last call, in the rows' dtype, for `passed` on the host."""
        if self.tested:
            return []
        of_rows, of_rest = (torch.stack(pivots) for pivots in zip(*self._pivots, strict=True))
        info = torch.stack(self._info).to(of_rows.dtype)
        self._pivots, self._info = [], []
        return [of_rows, of_rest, info]

    def passed(self, pivots: list[Tensor]) -> bool:
        """Whether the rows whose pivots these are were well separated, and orthogonal to the basis."""
        if self.tested:
            return True
        of_rows, of_rest, info = pivots
        # False where NaN
        return bool((of_rows > SEPARATED).all() & (of_rest > OUTSIDE).all() & (info == 0).all())

    def test_from_now(self, scale: Tensor) -> None:
        """Test every block from now on; `scale` is a lower bound of the matrices' norms."""
        self.tested, self.scale = True, scale

    def _test_at_once(self, W: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Repeat the second pass as long as it shortens a row much: usually once.

        What replaces absent directions is drawn by step and pass, the same for all matrices of a batch.
        """
        scale = torch.where(self.scale > 0, self.scale, 1)
        seed = 100 * basis.shape[-2] + 1
        Q, L, _ = _orthonormal_rows(W / scale, seed)
        L, c, shortest = L * scale, torch.zeros_like(Q @ basis.mT), 0.0
        while shortest < OUTSIDE:
            overlap, seed = Q @ basis.mT, seed + 1
            Q, factor, shortest = _orthonormal_rows(Q - overlap @ basis, seed)
            L, c = L @ factor, c + L @ overlap
        return Q, L, c

    def _collect_pivots(self, W: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make two passes, without a test. Rows are scaled to length 1: they may be short where singular values fall."""
        lengths = torch.linalg.vector_norm(W, dim=-1, keepdim=True)
        Q, L = self._cholesky_rows(W / lengths)
        first, L = L, lengths * L
        overlap = Q @ basis.mT
        Q, factor = self._cholesky_rows(minus_product(Q, overlap, basis))
        self._pivots.append((torch.linalg.diagonal(first), torch.linalg.diagonal(factor)))
        return Q, L @ factor, L @ overlap

    def _cholesky_rows(self, W: Tensor) -> tuple[Tensor, Tensor]:
        L, info = torch.linalg.cholesky_ex(W @ W.mT)
        self._info.append(info)
        return torch.linalg.solve_triangular(L, W, upper=False), L


def minus_product(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Compute W - A B, on an accelerator by one launch."""
    return W - A @ B if W.device.type == "cpu" else torch.baddbmm(W, A, B, alpha=-1)


def _longest(W: Tensor) -> Tensor:
    """Return the norm of the longest row, computed without underflow of squared entries."""
    largest = W.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    return largest * torch.linalg.vector_norm(W / unit, dim=-1, keepdim=True).amax(-2, keepdim=True)


def _orthonormal_rows(W: Tensor, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return Q and L with W = L Q, to the rounding of rows of length 1, and the length of the shortest row.

    Use Cholesky, a few products on any device, if the rows are well separated. If they are not (a rank-deficient or zero
    matrix, an exhausted space), use the SVD and replace directions that are only rounding by random ones.
    """
    L, info = torch.linalg.cholesky_ex(W @ W.mT)
    shortest = float(torch.where(info == 0, torch.linalg.diagonal(L).amin(-1), 0).min())
    if shortest > SEPARATED:
        return torch.linalg.solve_triangular(L, W, upper=False), L, shortest
    A, s, Q = torch.linalg.svd(W, full_matrices=False)
    # A row within rounding of the others has no direction of its own: a random one takes its place, with length 0.
    absent = s <= 10 * torch.finfo(W.dtype).eps
    others = standard_normal(Q.shape[-2:], Q, seed) / W.shape[-1] ** 0.5
    return (
        torch.where(absent[..., None], others, Q),
        A * torch.where(absent, 0, s)[..., None, :],
        float(s.min()),
    )
