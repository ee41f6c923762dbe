"""Follow the values of a forward pass that depend on its inputs, up to a boundary."""

from collections import OrderedDict
from collections.abc import Callable
from inspect import BoundArguments
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tracker.capture.spans.calls import BoundaryHook


class InputDependents(TorchFunctionMode):
    """Number the floating values that depend on the forward's inputs, up to a boundary, and let `change(number, value)` change
    each: floating inputs, and results of operations on inputs or on such results.
    """

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.count = 0
        self.done = False
        self.followed: dict[int, Tensor] = {}  # by identity

    def follow_inputs(self, arguments: BoundArguments) -> BoundArguments:
        """Return the inputs, changed."""
        return BoundArguments(arguments.signature, OrderedDict(tree_map(self.follow, dict(arguments.arguments))))

    def ending_with(self, hook: BoundaryHook) -> BoundaryHook:
        """Return a hook that ends the following of values and then does what `hook` does."""

        def last(found: Tensor) -> Tensor | None:
            self.done = True
            return hook(found)

        return last

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        output = function(*arguments, **(keywords or {}))
        given = [value for value in tree_leaves((arguments, keywords)) if isinstance(value, Tensor)]
        if self.done or not any(id(value) in self.followed for value in given):
            return output
        if any(value is output for value in given):  # in place
            self.followed[id(output)] = output
            return output
        return tree_map(self.follow, output) if isinstance(output, (Tensor, tuple, list)) else output

    def follow(self, value: Any) -> Any:
        """Number a value that depends on the inputs, and return it changed."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                value, self.count = self.change(self.count, value), self.count + 1
            self.followed[id(value)] = value
        return value
