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
    generators, shared = Generators(device), SharedTensors()
    memo: dict[int, Any] = {}

    def own(value: Any) -> Any:
        if isinstance(value, Generator):
            generators.held.append(copy_generator(value))
            return generators.held[-1]
        if isinstance(value, FUNCTIONS) and any(map(can_change, reachable(value))):
            return rebuild(value, copied, memo)
        return value.clone() if isinstance(value, Tensor) else value

    def copied(value: Any) -> Any:
        return copy_nested(value, own, memo)

    def weight(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            memo[id(tensor)] = shared.share(tensor)
        return memo.get(id(tensor), tensor)

    def table(name: str, entries: Any) -> Any:
        changed = entries.copy()
        changed.update((key, (weight if name in WEIGHTS else copied)(entry)) for key, entry in entries.items())
        return changed

    before = [(part, dict(part.__dict__)) for part in model.modules()]
    shared.begin_call()
    try:
        for part, attributes in before:
            copies = {
                name: table(name, value) if name in TABLES else copied(value) for name, value in attributes.items()
            }
            part.__dict__.update(copies, training=False)
        with WriteGuard(shared):
            yield generators
    finally:
        shared.undo_writes()
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)


WEIGHTS = ("_parameters", "_buffers")
TABLES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}  # of weights, modules and hooks
