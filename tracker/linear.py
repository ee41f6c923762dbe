"""Linear layers of frozen float32 weights on a CPU, by oneDNN: x W^T forward, g W backward, and so on.

PyTorch gives these products to BLAS, which here and there is far from what the machine can do: measured on an AMD EPYC
at d = 4096 (`benchmarks/`), MKL takes three times as long as oneDNN for 16 rows, and 1.4 times for a thousand. Both
multiply in float32.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Product(torch.autograd.Function):
    """x W^T. Its derivative is the same with W transposed, as often as is asked for."""

    @staticmethod
    def forward(x: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*B o"]:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Product.apply(gradients[0], ctx.weight.mT), None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, _: None) -> Tensor:
        return _Product.apply(x, ctx.weight)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        if in_dims[1] is None and in_dims[0] is not None:
            return _Product.apply(x.movedim(in_dims[0], 0), weight), 0
        # Weights of their own for each, as of experts that are run side by side: one product each, by BLAS.
        many, one = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, weight), in_dims, strict=True))
        return torch.einsum("b...i,boi->b...o" if in_dims[0] is not None else "...i,boi->b...o", many, one), 0


class LinearByOneDNN(TorchFunctionMode):
    """While it lasts, `torch.nn.functional.linear` takes this way wherever it can; elsewhere its own."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function is torch.nn.functional.linear and (asked := _taken(*arguments, **keywords)):
            x, weight, bias = asked
            product = _Product.apply(x, weight)
            return product if bias is None else product + bias
        return function(*arguments, **keywords)


def _taken(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The arguments, if oneDNN can multiply them and nobody wants the weight's gradient or another precision."""
    given = [t for t in (input, weight, bias) if t is not None]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided for t in given)
    alike = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in given) and weight.dim() == 2
    wanted = plain and alike and not weight.requires_grad and not torch.is_autocast_enabled("cpu")
    onednn: Any = torch.backends.mkldnn
    return (input, weight, bias) if wanted and onednn.is_available() and onednn.enabled else None
