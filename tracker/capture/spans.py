"""Blocks that are spans of the forward pass, from one boundary to the next (`boundaries`), as replayable calls.

A span's function is found by running the whole forward again on the recorded arguments. At the start boundary the tensor
found there is exchanged for the new state: by identity, in the arguments of every later PyTorch function, so that a
residual that is kept in a local variable is exchanged too, and no memory is written to. At the end boundary the pass
stops. Cost of a linearisation: one forward pass up to the end, of which derivatives keep the span alone. All weights of
the model are lent at once. That the start is the whole state is proved (`wholeness`).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tracker.blocks.boundaries import Boundary, Span
from tracker.capture.copies import copy_nested
from tracker.capture.outputs import hidden_state
from tracker.capture.recording import BlockCall
from tracker.capture.replica import Replica
from tracker.errors import UsageError

Visit = Callable[
    [Tensor], Tensor | None
]  # takes the tensor found at a boundary; what it returns takes that one's place

NOT_SLICEABLE = "a span between two boundaries is no module that would run on single rows"


@dataclass
class SpanCall(BlockCall):
    """One span at work in the recorded pass. `block` is the whole model, `arguments` are those of its forward."""

    span: Span = field(kw_only=True)

    def __call__(self, x: Tensor, arguments: Mapping[str, Any] | None = None, second: Tensor | None = None) -> Tensor:
        """Run the model up to the end of the span, final norm included where it is folded in, on a state (B, n, d)."""
        assert not arguments and second is None  # of rows, which a span is not divided into; of states in two tensors
        start, end = self.span
        out = run(self.replica, self.arguments, {start: put(x, self.batch_first), end: stop})
        out = out if self.final_norm is None else self.final_norm(out)
        return out if self.batch_first else out.transpose(0, 1)


def put(state: Tensor, batch_first: bool) -> Visit:
    """Put a state (B, n, d) in the place of the tensor found: a copy, as what comes after may work in place."""
    state = state if batch_first else state.transpose(0, 1)
    return lambda found: state.clone(memory_format=torch.contiguous_format)


def stop(state: Tensor) -> None:
    """End the pass with the tensor found."""
    raise _Reached(state)


class _Reached(BaseException):  # no Exception, which a model's code may catch
    def __init__(self, state: Tensor) -> None:
        self.state = state


def run(replica: Replica, arguments: BoundArguments, visits: Mapping[Boundary, Visit]) -> Any:
    """Run a replica that has its weights on copies of the arguments; returns its output, or the tensor at which a visit
    stopped it.

    Raises:
        UsageError: if no tensor is found at a boundary.
    """
    own = copy_nested(
        dict(arguments.arguments), lambda value: value.clone() if isinstance(value, Tensor) else value, {}
    )
    bound = BoundArguments(arguments.signature, OrderedDict(own))
    exchange = _Exchange()
    with replica.guard(), replica.fresh_weights(replica.module), ExitStack() as stack:
        for boundary, visit in visits.items():
            module = replica.module.get_submodule(boundary.module)
            if boundary.side == "input":
                hook = partial(exchange.enter, boundary, visit)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            else:
                stack.callback(module.register_forward_hook(partial(exchange.leave, boundary, visit)).remove)
        stack.enter_context(exchange)
        try:
            return replica.module(*bound.args, **bound.kwargs)
        except _Reached as reached:
            return reached.state


class _Exchange(TorchFunctionMode):
    """Puts other tensors in the place of those found at boundaries, wherever these are used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanged: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by identity; both are kept alive, so that ids stay theirs

    def now(self, value: Any) -> Any:
        """What stands in the place of a tensor."""
        while isinstance(value, Tensor) and id(value) in self.exchanged:
            value = self.exchanged[id(value)][1]
        return value

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if self.exchanged:
            arguments, keywords = tree_map(self.now, (tuple(arguments), keywords))
        return function(*arguments, **keywords)

    def enter(self, boundary: Boundary, visit: Visit, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        """Of a module that is given the tensor."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.meet(boundary, visit, tensors[0] if tensors else None)
        return tuple(map(self.now, args)), {name: self.now(value) for name, value in kwargs.items()}

    def leave(self, boundary: Boundary, visit: Visit, module: nn.Module, args: tuple, output: Any) -> Any:
        """Of a module that returns it."""
        self.meet(boundary, visit, hidden_state(output))
        return type(output)(map(self.now, output)) if type(output) in (tuple, list) else self.now(output)

    def meet(self, boundary: Boundary, visit: Visit, found: Any) -> None:
        """Hand it to the visit."""
        if not isinstance(found, Tensor):
            raise UsageError(
                f"the {boundary} is {'no tensor' if found is None else type(found).__name__}; a boundary is where a hidden "
                "state is given or returned"
            )
        found = self.now(found)
        new = visit(found)
        if new is not None:
            self.exchanged[id(found)] = found, new
