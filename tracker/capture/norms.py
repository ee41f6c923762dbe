"""Norms, recognised by what they compute: they return the same for an input at every scale."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SCALES = 4, 16  # of the root mean square: at both, the epsilon of a norm is negligible
SAME = 1e-2  # of the largest entry
EQUAL_LENGTHS = 1e-5  # relative: the rounding of float32
DISTINCT = 1e-3  # of the largest entry

_FUNCTIONS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)


def has_no_matrices(module: nn.Module) -> bool:
    """Whether all parameters and buffers of a module are vectors or scalars, of whatever shape, if it has any."""
    return all(sum(size > 1 for size in t.shape) < 2 for t in (*module.parameters(), *module.buffers()))


def is_norm(module: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any], output: Tensor) -> bool:
    """Whether a module that was called with these arguments changes those of the output's shape, and equally at every scale."""

    def scaled(value: Any, scale: float) -> Any:
        if not isinstance(value, Tensor) or value.shape != output.shape or not value.is_floating_point():
            return value
        return value * (scale / value.square().mean().sqrt().clamp_min(torch.finfo(value.dtype).tiny))

    def run(scale: float) -> Tensor:
        return module(*(scaled(a, scale) for a in args), **{name: scaled(a, scale) for name, a in keywords.items()})

    if any(isinstance(a, Tensor) and a.shape == output.shape and torch.equal(a, output) for a in args):
        return False
    small, large = map(run, SCALES)
    return torch.allclose(small, large, rtol=0, atol=SAME * float(large.abs().max()))


class NormWatch(TorchFunctionMode):
    """What the norms of a running block, or of a part of a pass, have returned.

    Norms are modules without matrices that compute one (`is_norm`), and PyTorch's functions for layer norm and RMS norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trying = False  # whether a module is called again, to see what it computes
        self._returned: list[_Returned] = []

    @contextmanager
    def watch(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Watch the pass that runs in this context, and those of these modules that have no matrices."""
        with ExitStack() as stack:
            for module in {id(module): module for module in modules if has_no_matrices(module)}.values():
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            stack.enter_context(self)
            yield

    def forget(self) -> None:
        """Forget what was returned so far."""
        self._returned = []

    def returned(self, y: Tensor) -> bool:
        """Whether y (..., d) is what a norm returned, or has rows of one length; forget what was returned so far."""
        alike = [one for one in self._returned if one.is_unchanged() and one.output.shape == y.shape]
        self.forget()
        same = [(one.output.to(y.dtype) == y).all() for one in alike]
        of_one_length, *same = torch.stack([_have_one_length(y), *same]).tolist()  # one wait for the device
        self.trying = True
        of_norm = any(one.is_of_norm() for one, holds in zip(alike, same, strict=True) if holds)
        self.trying = False
        return of_norm or of_one_length

    def _leave(self, module: nn.Module, args: tuple, keywords: dict, output: Any) -> None:
        if isinstance(output, Tensor) and not self.trying:
            self._returned.append(_Returned(output, output._version, module, args, keywords))

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Note what a norm over the last axis returns."""
        output = function(*args, **(kwargs or {}))
        if function in _FUNCTIONS and not self.trying:
            shape = args[1] if len(args) > 1 else (kwargs or {})["normalized_shape"]
            if len(shape) == 1:
                self._returned.append(_Returned(output, output._version))
        return output


@dataclass(frozen=True)
class _Returned:
    """A tensor, and the module that returned it; without a module, the function that did so is a norm."""

    output: Tensor
    version: int
    module: nn.Module | None = None
    args: tuple = ()
    keywords: Any = None

    def is_unchanged(self) -> bool:
        """Whether nothing was written to the tensor since."""
        return self.output._version == self.version

    def is_of_norm(self) -> bool:
        """Whether what returned the tensor is a norm."""
        return self.module is None or is_norm(self.module, self.args, self.keywords, self.output)


def _have_one_length(y: Tensor) -> Bool[Tensor, ""]:
    """Whether the first rows of y (..., d), not all alike, have one length, as a norm without weights gives them."""
    rows = y.flatten(0, -2)[:64]
    lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    differ = (rows - rows[0]).abs().max() > DISTINCT * rows.abs().max()
    return differ & (lengths.max() - lengths.min() <= EQUAL_LENGTHS * lengths.max())
