"""Jacobians of functions that act on each row separately.

For f: (R, d) -> (R, d) whose output row r depends on input row r alone,

    J[r, i, j] = d f(x)[r, i] / d x[r, j]        (R, d, d), row = output coordinate, column = input coordinate (eq. 8).

Reverse mode gives J^T u. Cost: one forward pass of R rows, then one backward pass of R rows for each cotangent; J takes d
cotangents, less what rows of an identity save (`linear`). Memory: one chunk of cotangents.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from tracker.common.errors import UsageError
from tracker.common.text import size
from tracker.devices import raise_device_errors
from tracker.linalg.linear import identity_matrix

RowFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearization:
    """A function linearized at x: its value f(x), and products with its Jacobian; entry (c, r) of each belongs to row r.

    The autograd graph lives as long as this object.
    """

    y: Float[Tensor, "R d"]
    pullback: Callable[[Tensor], Tensor]  # (C, R, d) -> (C, R, d): J[r]^T u[c, r]
    # J v by forward mode, if it was asked for and every operation has it
    tangent: Float[Tensor, "R d"] | None = None
    no_tangent: str = ""  # why there is none
    rounded: bool = False  # whether f's own code rounds to a lower precision than that of x


class GradientsStayOn(TorchFunctionMode):
    """While active, code can't switch gradients off or on.

    A block of a reversible network computes under `torch.no_grad`, and its sequence recomputes it with gradients. Its Jacobian
    is that of what it computes, so the switch is ignored, as in forward mode. `detach` is not.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch._C._set_grad_enabled:
            return None
        return function(*arguments, **(keywords or {}))


@contextmanager
def keeping_at_most(most: int) -> Iterator[None]:
    """Limit the memory that linearizations in this context keep for their products.

    Args:
        most: in bytes. Memory that is given back and used again counts once.

    Raises:
        UsageError: from the operation that exceeds it.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage: views of one tensor are saved many times, and take its memory once.
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        if sum(kept.values()) > most:
            raise UsageError(
                f"its derivative needs more than {size(most)} of memory; give a larger memory_budget"
            )
        return tensor.detach()  # the tensor itself would keep the graph alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


@cache
def _import_forward_mode() -> None:
    """Import what `make_dual` imports at its first use, without warnings of what torch itself uses.

    It takes 0.2 s, which readers of results need not wait for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import_module("torch._decomp.decompositions_for_jvp")


def linearize(
    f: RowFunction, x: Float[Tensor, "R d"], v: Float[Tensor, "R d"] | None = None
) -> Linearization:
    """Linearize f at x, detached from the caller's graph; with v, compute J v by forward mode in the same pass."""
    tangent, reason = None, ""
    if v is not None:
        _import_forward_mode()
    try:
        with (
            torch.enable_grad(),
            GradientsStayOn(),
            nullcontext() if v is None else forward_ad.dual_level(),
        ):
            leaf = x.detach().clone().requires_grad_()
            argument = leaf if v is None else forward_ad.make_dual(leaf, v)
            y = f(argument.clone())  # a block may work in place, which a leaf does not allow
            if v is not None:
                y, tangent = forward_ad.unpack_dual(y)
                tangent = torch.zeros_like(x) if tangent is None else tangent.detach()
    except RuntimeError as error:  # an operation without forward mode
        raise_device_errors(error)
        if v is None:
            raise
        reason = str(error).partition("\n")[0]
    # Outside the handler, which would keep the traceback and so the failed attempt's tensors
    if reason:
        return replace(linearize(f, x), no_tangent=reason)

    def pullback(u: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
        return _gradients(y, leaf, u)

    return Linearization(y.detach(), pullback, tangent)


def _gradients(y: Tensor, x: Tensor, cotangents: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
    """Return the gradients of y with respect to x for C cotangents at once."""
    if not y.requires_grad:  # y does not depend on x
        return torch.zeros_like(cotangents)

    def gradient(u: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        (of_x,) = torch.autograd.grad(
            y, x, u, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return of_x

    if len(cotangents) == 1:
        return gradient(cotangents[0])[None]
    try:
        return torch.vmap(gradient)(cotangents)
    except RuntimeError as error:  # an operation without a vmap rule, such as bloom's own GELU
        raise_device_errors(error)
    # Outside the handler, which would keep the traceback and so the failed attempt's tensors.
    return torch.stack([gradient(u) for u in cotangents])


def dense_jacobian(of: Linearization, chunk: int, identity: bool = False) -> Float[Tensor, "R d d"]:
    """Return the Jacobian of every row, `chunk` cotangents at a time; with `identity`, less the identity."""
    R, d = of.y.shape
    J = of.y.new_empty(R, d, d)
    cotangents = identity_matrix(d, of.y)
    for start in range(0, d, chunk):
        # (C, d): cotangent c picks output coordinate start + c of every row
        e = cotangents[start : start + chunk]
        J[:, start : start + chunk] = of.pullback(e[:, None].expand(-1, R, -1)).transpose(0, 1)
    torch.linalg.diagonal(J).sub_(int(identity))
    return J
