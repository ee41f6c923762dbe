"""Modules outside the blocks that take and return a hidden state, as a block does.

A pass notes the first and the last token's rows of what each takes and returns. So it is seen whether such a module gives the
first block its input, or takes the last one's output. It belongs to the chain of blocks if it *adds* to the state: with J its
Jacobian over all tokens,

    tr J / (B n d) > 1/2,   and J is not the identity

A residual block has J = I + J_f, and the trace of J_f, divided by the number of entries, is small: a sum over random weights.
Of a projection or a head J has no such diagonal; of dropout and position embeddings J = I. A norm has one, and no matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tracker.linalg.transfer import standard_normal
from tracker.model.hidden_state import hidden_state

PROBES = 4
STEP = 1e-2  # of the root mean square of the state
LEAST = 0.5  # of the mean of the diagonal
IDENTITY = 1e-4  # relative

_OTHER_LAYERS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Embedding, nn.EmbeddingBag)


def has_matrices(module: nn.Module) -> bool:
    """Whether a module has two matrices outside convolutions, recurrent layers and embeddings, as attention has."""
    parts = (part for part in module.modules() if not isinstance(part, _OTHER_LAYERS))
    return (
        sum(p is not None and p.dim() > 1 for part in parts for p in part._parameters.values()) > 1
    )


def may_be_block(module: nn.Module) -> bool:
    """Whether a module is no list, and has two matrices, or parts with a matrix or convolution. Norms and projections do not."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    has_parts = bool(module._modules) and any(
        parameter.dim() > 1 for parameter in module.parameters()
    )
    return has_parts or has_matrices(module)


def is_alike(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether a module is of the class of a block, so that it has the same role; a Sequential may be anything."""
    return type(module) is not nn.Sequential and any(
        type(module) is type(block) for block in blocks
    )


@dataclass(frozen=True)
class StateMap:
    """A call of a module that takes and returns a hidden state: the first and the last token's rows of both, (B, 2, d)."""

    name: str
    before: Tensor
    after: Tensor


def ends(state: Tensor) -> Tensor:
    """Return a copy of the rows of the first and the last token of a state (B, n, d)."""
    return state[:, [0, -1]]


def state_given(
    module: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any], output: Any
) -> Tensor | None:
    """Return a module's first argument if it is a hidden state, and the output is one of the same shape; else None."""
    x, y = next(iter((*args, *keywords.values())), None), hidden_state(output)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() != 3 or x.shape != y.shape:
        return None
    return x if x.is_floating_point() else None


def adds(module: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether a module, as a function of its hidden state, adds to the state x. It is called eight times."""
    h = STEP * x.square().mean().sqrt()
    diagonal, apart = 0.0, 0.0
    for seed in range(PROBES):
        v = standard_normal(x.shape, x, seed)
        Jv = (module(x + h * v) - module(x - h * v)) / (2 * h)
        diagonal += float((v * Jv).sum() / v.square().sum()) / PROBES
        apart = max(apart, float((Jv - v).norm() / v.norm()))
    return diagonal > LEAST and apart > IDENTITY
