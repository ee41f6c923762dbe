"""Run the caller's own model in its twin: modules of the same classes over the same memory. Its own modules are never touched.

A twin is made as the modules of a replica are (`replica.ModuleCopier`): own attributes, no wrappers, eval mode, the hooks that
compute. But it has the weights as they are, in their dtypes, and the model's configs, so that it computes as the model does.
Other threads may run or train the model meanwhile, and a pass may be interrupted anywhere. What a pass writes, to weights or
elsewhere, ends with the twin, so each pass has its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tracker.model.guard import SharedTensors, WriteGuard
from tracker.model.random_numbers import Generators
from tracker.model.replica import ModuleCopier


@contextmanager
def twin_of(model: nn.Module, generators: Generators) -> Iterator[nn.Module]:
    """Yield a twin of a model, for one pass. Call inside `preserve_global_state`.

    Args:
        model: whose weights are plain tensors.
        generators: those that it may draw from, to which the copies of those that it holds are added.
    """
    copier = ModuleCopier(model, SharedTensors(), generators)
    twin = copier.copy_model()
    with WriteGuard(copier.shared), copier.refusing_originals():
        yield twin
