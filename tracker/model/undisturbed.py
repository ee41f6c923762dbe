"""Run the caller's own model, not its replica, and leave it as it was.

A forward pass may write to weights and buffers, replace attributes, append to lists and draw from generators that its modules
hold. In the context of `undisturbed` it does so to copies: the modules hold their weights and buffers as tensors over the same
memory, which operations leave as it is (`guard`), and copies of their containers, data objects, tensors and generators, also of
those that their functions and hooks hold (`functions`). On exit each module has the attributes that it had, the same objects.
Training flags are set on the modules, because `eval()` may do more (LoRA merges weights in it). Weights need no gradient inside.
Hooks that are registered inside end with the context.

The process's own state is that of `preserve_global_state`, in which this is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tracker.model.functions import FUNCTIONS, can_change, reachable, rebuild
from tracker.model.guard import SharedTensors, WriteGuard, copy_nested
from tracker.model.random_numbers import Generator, Generators, copy_generator


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[Generators]:
    """Let a model run in eval mode without a lasting effect on it. Call inside `preserve_global_state`.

    Args:
        model: whose weights are plain tensors.
        device: where it runs.

    Yields:
        The generators that it may draw from, to be seeded before each pass.
    """
    copies = _Copies(Generators(device), SharedTensors())
    before = [(part, dict(part.__dict__)) for part in model.modules()]
    copies.shared.begin_call()
    try:
        for part, attributes in before:
            part.__dict__.update(
                {name: copies.attribute(name, value) for name, value in attributes.items()}
            )
            part.__dict__["training"] = False
        with WriteGuard(copies.shared):
            yield copies.generators
    finally:
        copies.shared.undo_writes()
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)


WEIGHTS = ("_parameters", "_buffers")
# Of weights, modules and hooks
TABLES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}


class _Copies:
    """Copies of what modules hold, and of what these copies hold; modules are themselves.

    An object, as functions that call each other would be a reference cycle, which keeps the weights.
    """

    def __init__(self, generators: Generators, shared: SharedTensors) -> None:
        self.generators, self.shared = generators, shared
        self.memo: dict[int, Any] = {}  # by id of the original

    def attribute(self, name: str, value: Any) -> Any:
        """Return the copy of a module's attribute; of a table of weights, one whose tensors are over the same memory."""
        if name not in TABLES:
            return self.copy(value)
        changed = value.copy()
        copy = self._share if name in WEIGHTS else self.copy
        changed.update((key, copy(entry)) for key, entry in value.items())
        return changed

    def copy(self, value: Any) -> Any:
        """Return a copy of a container or data object, and of what it holds."""
        return copy_nested(value, self._copy_leaf, self.memo)

    def _copy_leaf(self, value: Any) -> Any:
        if isinstance(value, Generator):
            self.generators.held.append(copy_generator(value))
            return self.generators.held[-1]
        if isinstance(value, FUNCTIONS) and any(map(can_change, reachable(value))):
            return rebuild(value, self.copy, self.memo)
        return value.clone() if isinstance(value, Tensor) else value

    def _share(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and id(tensor) not in self.memo:
            self.memo[id(tensor)] = self.shared.share(tensor)
        return self.memo.get(id(tensor), tensor)
