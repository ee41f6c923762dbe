"""Jacobians of functions that act on each row by itself.

For f: (R, d) -> (R, d) whose output row r depends on input row r alone,

    J[r, i, j] = d f(x)[r, i] / d x[r, j]        (R, d, d), row = output coordinate, column = input coordinate (eq. 8).

Reverse mode: one forward pass, then d cotangents in chunks, each shared by all R rows. Cost d backward passes of R rows;
memory that of one chunk of cotangents.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

RowFunction = Callable[[Tensor], Tensor]


def cotangent_chunk(elements_per_cotangent: int, budget_elements: int, d: int) -> int:
    """How many cotangents fit a declared budget of scalars: at least one, at most d."""
    return max(1, min(d, budget_elements // max(1, elements_per_cotangent)))


def linearize(f: RowFunction, x: Float[Tensor, "R d"]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Evaluate f at x and return (y, pullback), both detached from any caller's graph.

    `pullback(u)`, u of shape (C, R, d), is the stack of vector-Jacobian products: entry (c, r) is J[r]^T u[c, r].
    It may be called as often as needed; the recorded graph lives as long as the closure does.
    """
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        y = f(leaf.clone())  # a block may work in place, which a leaf forbids

    def pullback(u: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
        if not y.requires_grad:  # f ignores x
            return torch.zeros_like(u)
        gradient = partial(torch.autograd.grad, y, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)
        if len(u) == 1:
            return gradient(u[0])[0][None]
        try:
            return torch.vmap(lambda one: gradient(one)[0])(u)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation with no rule for batches, such as bloom's own GELU
            return torch.stack([gradient(one)[0] for one in u])

    return y.detach(), pullback


def dense_jacobian(pullback: Callable[[Tensor], Tensor], y: Float[Tensor, "R d"], chunk: int) -> Float[Tensor, "R d d"]:
    """The Jacobian of every row, `chunk` cotangents at a time."""
    R, d = y.shape
    J = y.new_empty(R, d, d)
    identity = torch.eye(d, dtype=y.dtype, device=y.device)
    for start in range(0, d, chunk):
        e = identity[start : start + chunk]  # (C, d): cotangent c picks output coordinate start + c of every row
        J[:, start : start + chunk] = pullback(e[:, None].expand(-1, R, -1)).transpose(0, 1)
    return J
