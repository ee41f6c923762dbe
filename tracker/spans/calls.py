"""Blocks that are spans of the forward pass, from one boundary to the next (`tracker.model.boundaries`), as replayable calls.

A span's function is the whole forward pass, run again on the recorded arguments. At the start boundary the tensor found
there is replaced by the new state: by identity, in the arguments of every later PyTorch function, so that a residual kept in
a local variable is replaced too, and no memory is written to. At the end boundary the pass stops. That the tensor at the
start is the whole state is checked (`checks`).

Cost of a linearisation: one forward pass up to the end boundary; derivatives pass through the span alone. All weights of
the model are loaded at once.

`InputDependents` follows the values of a forward pass that depend on its inputs, up to a boundary.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tracker.common.errors import UsageError
from tracker.model.boundaries import Boundary, Span
from tracker.model.guard import clone_if_tensor, copy_nested
from tracker.model.hidden_state import hidden_state, tensors_in
from tracker.model.recording import BlockCall
from tracker.model.replica import Replica, StopForward

# Takes the tensor at a boundary; returns its replacement, or None
BoundaryHook = Callable[[Tensor], Tensor | None]

NOT_SLICEABLE = "a span between two boundaries is no module that would run on single rows"


@dataclass
class SpanCall(BlockCall):
    """One span in the recorded pass. `block` is the whole model, `arguments` are those of its forward."""

    span: Span = field(kw_only=True)
    seed: int = field(kw_only=True)  # of the random numbers that the forward pass may draw

    def __call__(self, x: Tensor, arguments: Mapping[str, Any] | None = None) -> Tensor:
        """Run the model up to the end of the span, and the final norm if it is folded in, on a state (B, n, d)."""
        assert not arguments  # spans are not sliced into rows
        start, end = self.span
        hooks = {start: replace_with(self.replica.oriented(x)), end: stop_at}
        out = run(self.replica, self.arguments, self.seed, hooks)
        out = out if self.final_norm is None else self.final_norm(out)
        return self.replica.oriented(out)


def replace_with(state: Tensor) -> BoundaryHook:
    """Return a hook that replaces the tensor by a copy of `state`: later code may work in place."""
    return lambda found: state.clone(memory_format=torch.contiguous_format)


def hold(value: Tensor) -> BoundaryHook:
    """Return a hook that replaces the tensor by a copy of a recorded value, as it was found there."""
    return lambda found: value.to(found.device, copy=True)


def stop_at(state: Tensor) -> None:
    """End the pass with the tensor at a boundary: a `BoundaryHook`."""
    raise StopForward(state)


def run(
    replica: Replica, arguments: BoundArguments, seed: int, hooks: Mapping[Boundary, BoundaryHook]
) -> Any:
    """Run a replica that holds its weights on copies of the arguments, with a seed and with hooks at boundaries.

    Returns:
        The model's output, or the tensor at which `stop_at` ended the pass.

    Raises:
        UsageError: if a boundary has no tensor.
    """
    copies = copy_nested(dict(arguments.arguments), clone_if_tensor, {})
    bound = BoundArguments(arguments.signature, OrderedDict(copies))
    with replica.fresh_weights(replica.module), at_boundaries(replica.module.get_submodule, hooks):
        return replica.run(bound.args, bound.kwargs, seed)


@contextmanager
def at_boundaries(
    module: Callable[[str], nn.Module], hooks: Mapping[Boundary, BoundaryHook]
) -> Iterator[None]:
    """Call hooks at boundaries of a forward pass in this context, and use what they return in the place of what was there.

    Args:
        module: returns the module of a name.
        hooks: of each boundary.
    """
    replacement = _TensorReplacement()
    with ExitStack() as stack:
        for boundary, hook in hooks.items():
            at = module(boundary.module)
            if boundary.side == "input":
                enter = partial(replacement.enter, boundary, hook)
                stack.callback(
                    at.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove
                )
            else:
                stack.callback(
                    at.register_forward_hook(partial(replacement.leave, boundary, hook)).remove
                )
        stack.enter_context(replacement)
        yield


class _TensorReplacement(TorchFunctionMode):
    """Call the hooks of boundaries, and use the tensors they return wherever the ones found there are used later."""

    def __init__(self) -> None:
        super().__init__()
        # By id; both are kept alive, so that ids are not reused
        self.replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def current(self, value: Any) -> Any:
        """Return a tensor's replacement, any other value as it is."""
        # A replacement may be found at another boundary, and be replaced there.
        while isinstance(value, Tensor) and id(value) in self.replaced:
            value = self.replaced[id(value)][1]
        return value

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.replaced:
            arguments, keywords = tree_map(self.current, (tuple(arguments), keywords))
        return function(*arguments, **keywords)

    def enter(
        self, boundary: Boundary, hook: BoundaryHook, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple:
        """Handle the input of a module: a forward pre-hook."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.call_hook(boundary, hook, tensors[0] if tensors else None)
        return tuple(map(self.current, args)), {
            name: self.current(value) for name, value in kwargs.items()
        }

    def leave(
        self, boundary: Boundary, hook: BoundaryHook, module: nn.Module, args: tuple, output: Any
    ) -> Any:
        """Handle the output of a module: a forward hook."""
        self.call_hook(boundary, hook, hidden_state(output))
        return (
            type(output)(map(self.current, output))
            if type(output) in (tuple, list)
            else self.current(output)
        )

    def call_hook(self, boundary: Boundary, hook: BoundaryHook, state: Any) -> None:
        """Call a boundary's hook on the tensor found there, and record the replacement."""
        if not isinstance(state, Tensor):
            raise UsageError(
                f"the {boundary} is {'no tensor' if state is None else type(state).__name__}; a boundary is where a hidden "
                "state is given or returned"
            )
        state = self.current(state)
        new = hook(state)
        if new is not None:
            self.replaced[id(state)] = state, new


class InputDependents(TorchFunctionMode):
    """Let `change(value)` change each floating value that depends on the forward's inputs, up to a boundary: floating inputs, and
    results of operations on inputs or on such results.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.done = False
        self.followed: dict[int, Tensor] = {}  # by identity

    def follow_inputs(self, arguments: BoundArguments) -> BoundArguments:
        """Return the inputs, changed."""
        return BoundArguments(
            arguments.signature, OrderedDict(tree_map(self.follow, dict(arguments.arguments)))
        )

    def ending_with(self, hook: BoundaryHook) -> BoundaryHook:
        """Return a hook that ends the following of values and then does what `hook` does."""

        def last(state: Tensor) -> Tensor | None:
            self.done = True
            return hook(state)

        return last

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        output = function(*arguments, **(keywords or {}))
        tensors = tensors_in((arguments, keywords))
        if self.done or not any(id(value) in self.followed for value in tensors):
            return output
        # In place: the model holds this tensor under other names, which a changed copy would not replace.
        if any(value is output for value in tensors):
            self.followed[id(output)] = output
            return output
        return (
            tree_map(self.follow, output) if isinstance(output, (Tensor, tuple, list)) else output
        )

    def follow(self, value: Any) -> Any:
        """Return a value that depends on the inputs changed."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                value = self.change(value)
            self.followed[id(value)] = value
        return value
