"""Run the caller's own model, not its replica, and leave it as it was.

A forward pass may write to weights and buffers, replace attributes, append to lists and draw from generators that its modules
hold. In the context of `undisturbed` it does so to copies: the modules hold what the modules of a replica would hold, made by the
same copier (`replica.ModuleCopier`), except that the modules are the caller's own. Weights and buffers are tensors over the same
memory, which operations leave as it is (`guard`). On exit each module has the attributes that it had, the same objects.
Training flags are set on the modules, because `eval()` may do more (LoRA merges weights in it). Weights need no gradient inside.
Hooks that are registered inside end with the context.

The process's own state is that of `preserve_global_state`, in which this is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tracker.model.guard import SharedTensors, WriteGuard
from tracker.model.random_numbers import Generators
from tracker.model.replica import ModuleCopier


@contextmanager
def undisturbed(model: nn.Module, generators: Generators) -> Iterator[None]:
    """Let a model run in eval mode without a lasting effect on it. Call inside `preserve_global_state`.

    Args:
        model: whose weights are plain tensors.
        generators: those that it may draw from, to which the copies of those that it holds are added.
    """
    copier = _InPlace(model, SharedTensors(), generators)
    before = [(part, dict(part.__dict__)) for part in model.modules()]
    copier.shared.begin_call()
    try:
        for part, attributes in before:
            part.__dict__.update(copier.copy_nested(attributes), training=False)
        with WriteGuard(copier.shared):
            yield
    finally:
        copier.shared.undo_writes()
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)


class _InPlace(ModuleCopier):
    """Copy what modules hold; modules are themselves."""

    def copy(self, module: nn.Module) -> nn.Module:
        """Return the module itself."""
        return module
