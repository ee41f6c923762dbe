"""Jacobians of functions that act on each row separately: dense, or as products with blocks of vectors.

For f: (R, d) -> (R, d) whose output row r depends on input row r alone,

    J[r, i, j] = d f(x)[r, i] / d x[r, j]        (R, d, d), row = output coordinate, column = input coordinate (eq. 8).

Reverse mode gives J^T u. J^T u is linear in u, so its derivative with respect to u, by reverse mode again, gives J v: no
operation needs a forward-mode rule. Cost: one forward pass of R rows, then one backward pass of R rows for each cotangent and
for each tangent; the dense J takes d cotangents, less what rows of an identity save (`linear`). Memory: one chunk of
cotangents.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.linalg.linear import identity_matrix
from tracker.linalg.precision import float32_products

RowFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearization:
    """A function linearized at x: its value f(x), and products with its Jacobian; entry (c, r) of each belongs to row r.

    The autograd graph lives as long as this object.
    """

    y: Float[Tensor, "R d"]
    pullback: Callable[[Tensor], Tensor]  # (C, R, d) -> (C, R, d): J[r]^T u[c, r]
    pushforward: Callable[[Tensor], Tensor]  # (C, R, d) -> (C, R, d): J[r] v[c, r]
    tangent: Float[Tensor, "R d"] | None = None  # J v by forward mode, if it was asked for and every operation has it
    no_tangent: str = ""  # why there is none
    rounded: bool = False  # whether f's own code rounds to a lower precision than that of x
    least_bytes: int = 8  # of the numbers that it rounds to


class GradientsStayOn(TorchFunctionMode):
    """While active, code can't switch gradients off or on.

    A block of a reversible network computes under `torch.no_grad`, and its sequence recomputes it with gradients. Its Jacobian
    is that of what it computes, so the switch is ignored, as in forward mode. `detach` is not.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch._C._set_grad_enabled:
            return None
        return function(*arguments, **(keywords or {}))


@contextmanager
def keeping_at_most(size: int) -> Iterator[None]:
    """Limit the memory that linearizations in this context keep for their products.

    Args:
        size: in bytes. Memory that is given back and used again counts once.

    Raises:
        UsageError: from the operation that exceeds it.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        if sum(kept.values()) > size:
            raise UsageError(
                f"its derivative needs more than {size / 1e9:.3g} GB of memory; give a larger memory_budget"
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


def linearize(f: RowFunction, x: Float[Tensor, "R d"], v: Float[Tensor, "R d"] | None = None) -> Linearization:
    """Linearize f at x, detached from the caller's graph; with v, compute J v by forward mode in the same pass."""
    tangent, reason = None, ""
    if v is not None:
        _import_forward_mode()
    try:
        with torch.enable_grad(), GradientsStayOn(), nullcontext() if v is None else forward_ad.dual_level():
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
    if reason:  # outside the handler, which would keep the traceback and so the failed attempt's tensors
        return replace(linearize(f, x), no_tangent=reason)
    transposed: list[tuple[Tensor, Tensor]] = []  # u and J^T u, from the first tangent on

    def pullback(u: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
        return _gradients(y, leaf, u)

    def pushforward(v: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
        if not transposed:
            with torch.enable_grad():
                u = torch.zeros_like(y).requires_grad_()
                options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
                transposed.append((u, torch.autograd.grad(y, leaf, u, **options)[0] if y.requires_grad else u.detach()))
        u, back = transposed[0]
        return _gradients(back, u, v)

    return Linearization(y.detach(), pullback, pushforward, tangent)


def _gradients(y: Tensor, x: Tensor, cotangents: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
    """Return the gradients of y with respect to x for C cotangents at once."""
    if not y.requires_grad:  # y does not depend on x
        return torch.zeros_like(cotangents)
    gradient = partial(torch.autograd.grad, y, x, retain_graph=True, allow_unused=True, materialize_grads=True)
    if len(cotangents) == 1:
        return gradient(cotangents[0])[0][None]
    return for_each(gradient, cotangents, 0)[0]


def for_each(products: Callable[[Tensor], tuple[Tensor, ...]], cotangents: Tensor, axis: int) -> Sequence[Tensor]:
    """Return products with each of the cotangents along an axis, stacked along that axis; all at once where it can be."""
    try:
        return torch.vmap(products, axis, axis)(cotangents)
    except RuntimeError as error:  # an operation without a vmap rule, such as bloom's own GELU
        raise_device_errors(error)
    # Outside the handler, which would keep the traceback and so the failed attempt's tensors.
    return [torch.stack(parts, axis) for parts in zip(*map(products, cotangents.unbind(axis)), strict=True)]


def dense_jacobian(
    pullback: Callable[[Tensor], Tensor], y: Float[Tensor, "R d"], chunk: int, identity: bool = False
) -> Float[Tensor, "R d d"]:
    """Return the Jacobian of every row, `chunk` cotangents at a time; with `identity`, less the identity."""
    R, d = y.shape
    J = y.new_empty(R, d, d)
    cotangents = identity_matrix(d, y)
    for start in range(0, d, chunk):
        e = cotangents[start : start + chunk]  # (C, d): cotangent c picks output coordinate start + c of every row
        J[:, start : start + chunk] = pullback(e[:, None].expand(-1, R, -1)).transpose(0, 1)
    J.diagonal(dim1=-2, dim2=-1).sub_(int(identity))
    return J


@dataclass(frozen=True)
class LinearOperator:
    """The Jacobians J of a residual function f = block - 1 at R rows, as products with blocks of m vectors.

    J = J_block - I is formed exactly: the identity is subtracted from products, not the states from each other.
    """

    apply: Callable[[Tensor], Tensor]  # (R, d, m) -> (R, d, m): J V
    apply_transpose: Callable[[Tensor], Tensor]  # (R, d, m) -> (R, d, m): J^T U
    dense: Callable[[], Tensor]  # () -> (R, d, d)


def residual_operator(block: Linearization, chunk: int, identity: bool = True) -> LinearOperator:
    """Return the operator J_block - I, at most `chunk` products at a time; without `identity`, the operator J_block."""

    def minus_identity(product: Callable[[Tensor], Tensor], X: Float[Tensor, "R d m"]) -> Float[Tensor, "R d m"]:
        columns = X.movedim(-1, 0).contiguous()  # on a transposed view the products take five times as long
        return torch.cat([product(part) - identity * part for part in columns.split(chunk)]).movedim(0, -1)

    dense = partial(dense_jacobian, block.pullback, block.y, chunk, identity)
    return LinearOperator(partial(minus_identity, block.pushforward), partial(minus_identity, block.pullback), dense)


def dense_operator(dense: Callable[[], Float[Tensor, "R d d"]]) -> LinearOperator:
    """Return the operator of Jacobians that are formed for each product."""
    return LinearOperator(lambda V: dense() @ V, lambda U: dense().mT @ U, dense)


def converting_operator(operator: LinearOperator, compute_dtype: torch.dtype, dtype: torch.dtype) -> LinearOperator:
    """Return an operator on tensors of `dtype` that computes in `compute_dtype`."""
    return LinearOperator(
        lambda V: operator.apply(V.to(compute_dtype)).to(dtype),
        lambda U: operator.apply_transpose(U.to(compute_dtype)).to(dtype),
        lambda: operator.dense().to(dtype),
    )


def stacked_operator(operators: Sequence[LinearOperator], sizes: Sequence[int]) -> LinearOperator:
    """Stack operators of R_1, R_2, ... rows into one of R_1 + R_2 + ... rows."""
    if len(operators) == 1:
        return operators[0]
    return LinearOperator(
        lambda V: torch.cat([o.apply(part) for o, part in zip(operators, V.split(list(sizes)), strict=True)]),
        lambda U: torch.cat([o.apply_transpose(part) for o, part in zip(operators, U.split(list(sizes)), strict=True)]),
        lambda: torch.cat([o.dense() for o in operators]),
    )


def tf32_operator(operator: LinearOperator) -> LinearOperator:
    """Return the operator with its float32 products computed in TF32, if the device has it."""

    def in_tf32(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*X: Tensor) -> Tensor:
            with float32_products("tf32"):
                return product(*X)

        return run

    return LinearOperator(in_tf32(operator.apply), in_tf32(operator.apply_transpose), in_tf32(operator.dense))
