"""Blocks of one kind: what their code depends on, besides their weights and their place, is equal.

A check of code that one block passes holds for the others of its kind. It is made in the first of them, and in another one that
is drawn. At later steps of a training it is made in one that is drawn, so that in time all are checked.

Two blocks are of one kind if their modules have the same classes, hooks, shapes of weights, and the same attributes but for their
place in the chain (`layer_idx`) and rates of dropout. An object that two blocks do not share makes them two kinds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, str, type(None), type, torch.dtype, torch.device, torch.Size)
TABLES = vars(nn.Module()).keys()
WEIGHTS = ("_parameters", "_buffers")


class Kinds:
    """The kinds of the blocks of a model.

    Args:
        blocks: in order of depth.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        places = _places(blocks)
        kinds = [_kind(block, places) for block in blocks]
        self.of_block = {id(block): kinds.index(kind) for block, kind in zip(blocks, kinds, strict=True)}

    def of(self, block: nn.Module) -> int | None:
        """Return the number of a block's kind; None for what is no block, such as the model that a span runs."""
        return self.of_block.get(id(block))

    def drawn(self, kind: int, seed: int, without: nn.Module | None = None) -> int:
        """Return the id of a block of a kind, another one than `without` if there is one."""
        blocks = [block for block, of_block in self.of_block.items() if of_block == kind]
        others = [block for block in blocks if block != id(without)]
        return others[seed % len(others)] if others else blocks[0]


Name = tuple[str, str]  # of an attribute: its module within the block, and its own


def _places(blocks: Sequence[nn.Module]) -> set[Name]:
    """Return the attributes that number the blocks: integers, each one more than that of the block before."""
    numbers = [
        {(name, key): n for name, part in block.named_modules() for key, n in vars(part).items() if type(n) is int}
        for block in blocks
    ]
    if len(blocks) < 2:
        return set()
    return {key for key, first in numbers[0].items() if all(of.get(key) == first + i for i, of in enumerate(numbers))}


def _kind(block: nn.Module, places: set[Name]) -> tuple[Any, ...]:
    return tuple(
        (name, type(part), *_weights(part), *_hooks(part), *_attributes(name, part, places))
        for name, part in block.named_modules()
    )


def _weights(part: nn.Module) -> list[tuple[Any, ...]]:
    tables = (part.__dict__[table] for table in WEIGHTS)
    return [(name, t.shape, t.dtype) for table in tables for name, t in table.items() if t is not None]


def _hooks(part: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(hook)) for name in TABLES if name.endswith("_hooks") for hook in part.__dict__[name].values()]


def _attributes(module: str, part: nn.Module, places: set[Name]) -> list[tuple[str, Any]]:
    own = sorted(
        (name, value) for name, value in part.__dict__.items() if name not in TABLES and (module, name) not in places
    )
    # Inactive in eval mode, in which blocks are measured; stochastic depth has another rate in each block.
    drops = "drop" in type(part).__name__.lower()
    return [(name, _value(value)) for name, value in own if not (drops and isinstance(value, float))]


def _value(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    return tuple(map(_value, value)) if isinstance(value, (tuple, list)) else id(value)
