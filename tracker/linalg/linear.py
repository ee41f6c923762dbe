"""Products with frozen weights: y = x W^T (rows x) forward, g W backward.

Float32 on a CPU goes to oneDNN, everything else to PyTorch, which on a CPU
calls BLAS. Measured on an AMD EPYC at d = 4096 (`benchmarks/`), MKL takes three times as long as oneDNN for 16 rows, and 1.4
times as long for a thousand. Both multiply in float32.

A product of few rows is bound by reading the weights, so it is computed as (W x^T)^T: for 16 rows that takes three quarters
of the time of x W^T. With W^T it needs rows that are not contiguous. A contiguous copy takes as long as four to six
products, and halves the time of those that follow. So iterations copy (`row_products`). Cotangents of a Jacobian pass in larger
groups.

Identity matrices are recognised after autograd has passed them on: e_c W is row c of W, without arithmetic. The cotangents of a
dense Jacobian are the rows of an identity. The derivative of a residual sum passes them on unchanged to both terms, so they
reach a block's last linear layer unchanged, unless a norm or a scale follows that layer. Rows are recognised by their memory
address, so a copy of them is not.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The matrices in use, by memory address
identities: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def identity_matrix(d: int, like: Tensor) -> Float[Tensor, "d d"]:
    """Return an identity matrix whose rows `rows_of_identity` recognises. Do not write to it."""
    matrix = torch.eye(d, dtype=like.dtype, device=like.device)
    identities[matrix.untyped_storage().data_ptr()] = matrix
    return matrix


def rows_of_identity(x: Tensor) -> slice | None:
    """Return the rows of an identity that x (C, *B, d) consists of, x[c] being the same row for all B; None if it does not."""
    if x.layout != torch.strided or x.dim() < 2 or x._is_zerotensor():
        return None
    identity = identities.get(x.untyped_storage().data_ptr())
    if identity is None or x.dtype != identity.dtype or x.device != identity.device or x.is_neg():
        return None
    if identity._version != 0:  # written to
        return None
    C, *B, d = x.shape
    along_C, *over_B, along_d = x.stride()
    repeated = not any(stride for stride, size in zip(over_B, B, strict=True) if size > 1)
    # Rows of the identity in order, each as a whole: any other view of its memory is another matrix.
    whole_rows = d == len(identity) and along_d == 1 and x.storage_offset() % d == 0
    if not whole_rows or not repeated or (C > 1 and along_C != d):
        return None
    start = x.storage_offset() // d
    return slice(start, start + C)


FEW = range(
    16,
    65,
    # Rows for which (W x^T)^T takes less time: above, both ways take equally long, and below up to twice as long
)
LARGE = 1 << 21  # a weight's scalars (8 MB) from which it does not fit a core's own cache
# Products of few rows before a copy is made: the second one is a sign of an iteration
COPY_AFTER = 2


def signed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep a function's signature, which `torch.autograd.Function` takes apart again at every call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


class FrozenProduct(torch.autograd.Function):
    """x W^T + b; differentiable in x any number of times, its derivative being the product with W^T."""

    @staticmethod
    @signed
    def forward(
        x: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"], bias: Tensor | None
    ) -> Tensor:
        """Compute the product by the fastest method for its shape."""
        product = multiply(x, weight)
        return product if bias is None else product.add_(bias)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        """Save the weight for the backward pass."""
        _, ctx.weight, _ = inputs
        ctx.set_materialize_grads(False)  # a derivative of zeros would be allocated for the weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Compute the product with W^T, itself differentiable."""
        (g,) = gradients
        product = None if g is None else FrozenProduct.apply(g, ctx.weight.mT, None)
        return product, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, *_: Any) -> Tensor | None:
        """Compute the same product of the tangent."""
        return None if x is None else FrozenProduct.apply(x, ctx.weight, None)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, int]:
        """Fold a batch of inputs into the rows."""
        batched_x, batched_weight, batched_bias = (dim is not None for dim in in_dims[:3])
        x, weight = (
            t if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, weight), in_dims[:2], strict=True)
        )
        if batched_weight:  # such as experts run in parallel: one product for each, by BLAS
            product = torch.einsum(f"{'b' * batched_x}...i,boi->b...o", x, weight)
        else:
            product = FrozenProduct.apply(x, weight, None)
            product = product if batched_x else product[None]
        if bias is not None and batched_bias:
            bias = bias.view(len(bias), *[1] * (product.dim() - 2), -1)
        return product if bias is None else product + bias, 0


def multiply(
    x: Float[Tensor, "*B i"],
    weight: Float[Tensor, "o i"],
    copied: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Compute x W^T into memory of its own.

    Args:
        copied: returns the rows of the weight in contiguous memory, if they were copied; asked if it is not contiguous itself.
    """
    if (picked := rows_of_identity(x)) is not None:
        columns = weight.mT[picked].view(len(x), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], -1)
        # A copy: a backward pass that writes into its gradient must not write into the weight.
        return columns.clone(memory_format=torch.contiguous_format)
    if not uses_onednn(x):
        return torch.nn.functional.linear(x, weight)
    if weight.numel() >= LARGE and x.numel() // x.shape[-1] in FEW:
        rows = weight if weight.is_contiguous() else copied()
        if rows is not None:
            product = onednn_linear(rows, x.reshape(-1, x.shape[-1])).mT
            return product.contiguous().view(*x.shape[:-1], len(rows))
    return onednn_linear(x, weight)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, by oneDNN."""
    # With other strides oneDNN takes a thousand times as long.
    x, weight = x.contiguous(), weight if weight.mT.is_contiguous() else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def uses_onednn(x: Tensor) -> bool:
    """Whether products of such tensors go to oneDNN."""
    onednn: Any = torch.backends.mkldnn
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and onednn.is_available()
        and onednn.enabled
    )


def row_products(
    M: Float[Tensor, "o i"],
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return x -> x M^T and y -> y M for rows x (m, i) and y (m, o), for repeated use; not differentiable."""
    uses, copy = count(1), cache(M.mT.contiguous)

    def copied() -> Tensor | None:
        return copy() if next(uses) >= COPY_AFTER else None

    return lambda x: multiply(x, M), lambda y: multiply(y, M.mT, copied)


def inner_products(X: Float[Tensor, "B m d"], Y: Float[Tensor, "B k d"]) -> Float[Tensor, "B m k"]:
    """Compute X Y^T; not differentiable."""
    return (
        stacked([onednn_linear(x, y) for x, y in zip(X, Y, strict=True)])
        if uses_onednn(X)
        else X @ Y.mT
    )


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors as torch.stack does, without a copy if there is only one."""
    return torch.stack(tuple(parts)) if len(parts) > 1 else parts[0][None]


class FrozenLinear(TorchFunctionMode):
    """While active, linear layers (and GPT-2's Conv1D) use `FrozenProduct` where possible."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        layer = _linear_layer(function, arguments, keywords)
        if layer is None:
            return function(*arguments, **keywords)
        x, weight, bias = layer
        if bias is None or not bias.requires_grad:
            return FrozenProduct.apply(x, weight, bias)
        return FrozenProduct.apply(x, weight, None) + bias


def _linear_layer(
    function: Any, arguments: Any, keywords: Any
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return x, W and b if the function computes x W^T + b with frozen weights, else None."""
    if function is torch.nn.functional.linear:
        return _product_arguments(*arguments, **keywords)
    if function is torch.addmm and len(arguments) == 3 and not keywords:
        bias, x, transposed = arguments
        if x.dim() == transposed.dim() == 2 and bias.dim() < 2:
            return _product_arguments(x, transposed.mT, bias)
    return None


def _product_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return x, W and b of x W^T + b if `FrozenProduct` can compute it, else None.

    It can if all are plain tensors of one floating dtype and device, W is a matrix without gradient, and autocast is off.
    """
    operands = [t for t in (input, weight, bias) if t is not None]
    plain = all(
        type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta
        for t in operands
    )
    floating = input.is_floating_point()
    alike = floating and all(t.dtype == input.dtype and t.device == input.device for t in operands)
    frozen = weight.dim() == 2 and not weight.requires_grad
    # Autocast would multiply in another dtype than the operands'.
    if not (plain and alike and frozen) or torch.is_autocast_enabled(input.device.type):
        return None
    return input, weight, bias
