"""Products with frozen weights: x W^T forward, g W backward, and so on.

Rows of an identity (`identity`) are read off the weights, float32 on a CPU goes to oneDNN, everything else to PyTorch. On a
CPU that is BLAS, which here and there is far from what the machine
can do: measured on an AMD EPYC at d = 4096 (`benchmarks/`), MKL takes three times as long as oneDNN for 16 rows, and 1.4
times for a thousand. Both multiply in float32.

A product of few rows is bound by reading the weights, row after row, which is why it is computed as (W x^T)^T: for 16
rows three quarters of the time of x W^T. Backward the rows of W^T are wanted, which do not lie in memory as rows. A copy
where they do takes as long as six products, the first, into fresh memory, thirty; it halves the products that follow.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tracker.linalg.identity import rows_of_identity

FEW = 64  # rows up to which the weights' reading counts; beyond, both ways take equally long
LARGE = 1 << 21  # a weight's scalars (8 MB) from which it does not fit a core's own cache
ENOUGH = 2  # products of few rows with which a copy is expected to pay: an iteration has begun
STRIPE = 16  # columns copied at once: one cache line, in a third of the time that all at once take

Spare = list[Tensor]  # memory of copies that nobody reads any more


class _Rows:
    """A weight's rows, as rows in memory."""

    def __init__(self, spare: Spare) -> None:
        self.asked, self.spare = 0, spare
        self.copy: Tensor | None = None

    def of(self, weight: Float[Tensor, "o i"]) -> Float[Tensor, "o i"] | None:
        """The weight itself if it lies so, else a copy; None while a copy would not pay."""
        if weight.is_contiguous():
            return weight
        self.asked += 1
        if self.copy is None and self.asked >= ENOUGH:
            sizes = [memory.numel() for memory in self.spare]
            fits = weight.numel() in sizes
            memory = self.spare.pop(sizes.index(weight.numel())) if fits else weight.new_empty(weight.numel())
            finalize(self, self.spare.append, memory).atexit = False
            self.copy = memory.view(weight.shape)
            for mine, its in zip(self.copy.split(STRIPE, 1), weight.split(STRIPE, 1), strict=True):
                mine.copy_(its)
        return self.copy


class FrozenProduct(torch.autograd.Function):
    """x W^T. Its derivative is the same with W transposed, as often as is asked for; `own` and `other` are the rows of W
    and of W^T.
    """

    @staticmethod
    def forward(x: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"], own: _Rows, other: _Rows) -> Tensor:
        """The product, by the way that is quickest for it."""
        if (picked := rows_of_identity(x)) is not None:
            columns = weight.mT[picked].view(len(x), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], -1)
            # A copy: a backward pass that writes into its gradient must not write into the weight.
            return columns.clone(memory_format=torch.contiguous_format)
        if not uses_onednn(x):
            return torch.nn.functional.linear(x, weight)
        few = weight.numel() >= LARGE and 0 < x.numel() <= FEW * x.shape[-1]
        if few and (rows := own.of(weight)) is not None:
            product = _linear(rows, x.reshape(-1, x.shape[-1])).mT
            return product.contiguous().view(*x.shape[:-1], len(rows))
        return _linear(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, _Rows, _Rows], output: Tensor) -> None:
        """Keep the weight."""
        _, ctx.weight, ctx.own, ctx.other = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The transposed product, itself differentiable."""
        return FrozenProduct.apply(gradients[0], ctx.weight.mT, ctx.other, ctx.own), None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        """The same product of the tangent."""
        return FrozenProduct.apply(x, ctx.weight, ctx.own, ctx.other)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, own: _Rows, other: _Rows
    ) -> tuple[Tensor, int]:
        """Many rows at once as more rows."""
        if in_dims[1] is None and in_dims[0] is not None:
            return FrozenProduct.apply(x.movedim(in_dims[0], 0), weight, own, other), 0
        # Weights of their own for each, as of experts that are run side by side: one product each, by BLAS.
        many, one = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, weight), in_dims[:2], strict=True))
        return torch.einsum("b...i,boi->b...o" if in_dims[0] is not None else "...i,boi->b...o", many, one), 0


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    # Of strides other than these oneDNN makes a product a thousand times as slow.
    x, weight = x.contiguous(), weight if weight.mT.is_contiguous() else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def uses_onednn(x: Tensor) -> bool:
    """Whether products of such tensors are oneDNN's."""
    onednn: Any = torch.backends.mkldnn
    return x.dtype == torch.float32 and x.device.type == "cpu" and onednn.is_available() and onednn.enabled


def row_products(M: Float[Tensor, "o i"]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """For rows x (m, i) and y (m, o), x -> x M^T and y -> y M, which are asked for again and again; not differentiable."""
    own, other = _Rows([]), _Rows([])
    return lambda x: FrozenProduct.forward(x, M, own, other), lambda y: FrozenProduct.forward(y, M.mT, other, own)


def inner_products(X: Float[Tensor, "B m d"], Y: Float[Tensor, "B k d"]) -> Float[Tensor, "B m k"]:
    """X Y^T; not differentiable."""
    return stacked([_linear(x, y) for x, y in zip(X, Y, strict=True)]) if uses_onednn(X) else X @ Y.mT


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """As torch.stack, without a copy where there is one part."""
    return torch.stack(tuple(parts)) if len(parts) > 1 else parts[0][None]


class FrozenLinear(TorchFunctionMode):
    """While it lasts, linear layers (and GPT-2's Conv1D) go through `FrozenProduct` wherever they can.

    Args:
        spare: where copies find the memory of earlier ones and leave theirs: fresh memory can cost more than the copying.
    """

    def __init__(self, spare: Spare | None = None) -> None:
        super().__init__()
        self.spare: Spare = [] if spare is None else spare

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords, asked = keywords or {}, None
        if function is torch.nn.functional.linear:
            asked = _taken(*arguments, **keywords)
        elif function is torch.addmm and len(arguments) == 3 and not keywords:
            bias, x, transposed = arguments
            asked = _taken(x, transposed.mT, bias) if x.dim() == transposed.dim() == 2 and bias.dim() < 2 else None
        if asked is None:
            return function(*arguments, **keywords)
        x, weight, bias = asked
        product = FrozenProduct.apply(x, weight, _Rows(self.spare), _Rows(self.spare))
        return product if bias is None else product + bias


def _taken(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The arguments of x W^T + b, if all are plain tensors of one floating dtype and device, the weight is a matrix that
    wants no gradient, and autocast is off; else None.
    """
    given = [t for t in (input, weight, bias) if t is not None]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta for t in given)
    alike = all(t.dtype == input.dtype and t.device == input.device for t in given) and input.is_floating_point()
    wanted = plain and alike and weight.dim() == 2 and not weight.requires_grad
    return (input, weight, bias) if wanted and not torch.is_autocast_enabled(input.device.type) else None
