"""Jacobians and states from one forward graph of the caller's own model.

Hooks keep the hidden states that enter and leave the blocks while the model runs once with gradients on; a Jacobian is
`torch.autograd.grad` between two of these tensors. No block is replayed, so what else a block was given is what it was given.
"""

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.brute_force import in_one_graph
from tests.support.draws import normal


class Unsuitable(Exception):
    """The graph can't serve as an oracle for this model; the message says why."""


@dataclass
class Call:
    """One call of a module that keeps the shape of its hidden state."""

    name: str
    x: Tensor
    y: Tensor
    other: list[Tensor]  # further outputs of the state's shape


@dataclass
class Graph:
    """One forward pass with gradients: the calls of the requested blocks, of the other blocks of their list, and the output."""

    blocks: list[Call] = field(default_factory=list)
    lists: dict[str, list[Call]] = field(default_factory=dict)  # by the name of the list
    # What norms made of the last block's output
    norms: list[tuple[str, Tensor]] = field(default_factory=list)
    output: Any = None
    batch_first: bool = True

    def dependence(self, y: Tensor, x: Tensor) -> Tensor | None:
        """The gradient of a random projection of y; None where y does not depend on x."""
        weights = normal(*y.shape, seed=5, dtype=torch.float64).to(y.dtype)
        if not y.requires_grad:
            return None
        (grad,) = torch.autograd.grad((y * weights).sum(), x, retain_graph=True, allow_unused=True)
        return None if grad is None or not grad.any() else grad

    def jacobians(self, l: int, b: int, t: int, norm: Tensor | None) -> Tensor:
        """d (x^l - x^{l-1})_t / d x^{l-1}_t of sample b; row = output coordinate. `norm` replaces the last block's output."""
        x, y = self.blocks[l].x, self.blocks[l].y
        y = norm if norm is not None and l == len(self.blocks) - 1 else y
        first, second = (b, t) if self.batch_first else (t, b)
        return in_one_graph(x, y, first, second, second)

    def states(self, norm: Tensor | None) -> Tensor:
        """x^0 .. x^L, (depth, B, n, d)."""
        last = self.blocks[-1].y if norm is None else norm
        stacked = torch.stack([*(call.x for call in self.blocks), last]).detach()
        return stacked if self.batch_first else stacked.transpose(1, 2)


def floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a call's output, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(floats, value.values()))
    elif isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(floats, value))
    elif hasattr(value, "__dataclass_fields__"):
        yield from itertools.chain.from_iterable(map(floats, vars(value).values()))


def first_state(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor] | None:
    """Where a call's hidden state is (position or keyword), and the state."""
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return place, value
    return None


@contextmanager
def quiet() -> Iterator[None]:
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer has no gradients
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def run(
    model: nn.Module,
    inputs: dict[str, Any],
    blocks: Sequence[str],
    cut: int | None = None,
    seed: int | None = None,
) -> Graph:
    """Run the model once, in eval mode and with gradients on.

    Args:
        blocks: names of the blocks measured.
        cut: detach what this call of a block gives (0-based) from what it was made of; the first one's input is a leaf.
        seed: of the random numbers that the model draws.
    """
    graph, open_calls, last = Graph(), [], []
    names = {id(model.get_submodule(name)): name for name in blocks}

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> Any:
        found = first_state(args, kwargs)
        if found is None:
            open_calls.append(None)
            return None
        place, x = found
        if cut is not None and not graph.blocks:
            x = x.detach().requires_grad_()
        elif not x.requires_grad:
            x = x.detach().requires_grad_()
        else:
            # The block's other arguments may depend on its input too, and are kept constant
            x = x.clone()
        open_calls.append(x)
        given = x.clone()  # the block may write to its input
        if isinstance(place, int):
            return (*args[:place], given, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: given}

    def leave(name: str, module: nn.Module, args: tuple, output: Any) -> Any:
        x = open_calls.pop()
        tensors = list(floats(output))
        if x is None or not tensors:
            raise Unsuitable(f"block {name} takes or gives no hidden state")
        y = tensors[0]
        graph.blocks.append(Call(name, x, y, [t for t in tensors[1:] if t.shape == y.shape]))
        given = y.detach().clone().requires_grad_() if cut == len(graph.blocks) - 1 else y.clone()
        last[:] = [given]
        return _replaced(output, y, given)

    def listed(
        container: str, name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any
    ):
        found, tensors = first_state(args, kwargs), list(floats(output))
        if (
            found is not None
            and tensors
            and tensors[0].shape == found[1].shape
            and tensors[0].dim() >= 3
        ):
            graph.lists.setdefault(container, []).append(Call(name, found[1], tensors[0], []))

    def norm(name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any):
        if (
            last
            and any(value is last[0] for value in [*args, *kwargs.values()])
            and isinstance(output, Tensor)
        ):
            graph.norms.append((name, output))

    handles = []
    for name, module in model.named_modules():
        if id(module) in names:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(leave, name)))
        elif isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            for child_name, child in module.named_children():
                if id(child) not in names:
                    hook = partial(listed, name, f"{name}.{child_name}")
                    handles.append(child.register_forward_hook(hook, with_kwargs=True))
        if "norm" in type(module).__name__.lower():
            handles.append(module.register_forward_hook(partial(norm, name), with_kwargs=True))
    try:
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        with torch.enable_grad():
            graph.output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    # Only norms of the last block's output count; a norm met earlier took that of an earlier block.
    final = [y for _, y in graph.norms if last and graph.dependence(y, last[0]) is not None]
    graph.norms = [(name, y) for name, y in graph.norms if any(y is f for f in final)]
    return graph


def _replaced(output: Any, old: Tensor, new: Tensor) -> Any:
    if output is old:
        return new
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return tuple(new if value is old else value for value in output)
    if isinstance(output, list):
        return [new if value is old else value for value in output]
    if isinstance(output, dict):
        for name, value in list(output.items()):
            if value is old:
                output[name] = new
        return output
    raise Unsuitable(f"a block gives a {type(output).__name__}")
