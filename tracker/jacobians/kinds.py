"""Kinds of blocks: blocks of one kind run the same code, and differ in their weights and numbers alone.

What is checked of a block's code holds for its kind. Two blocks of a kind are checked in full at each measurement: the first,
and one that is drawn anew, as a gate that is zero in the first would hide what the others do.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from tracker.model.guard import is_data

# What every module has, such as its hooks; of hooks the code decides
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Values that decide which way the code takes. Floating numbers scale, as weights do.
PLAIN = (bool, str, type(None), type, Enum, torch.dtype, torch.device)
FEWEST = 3  # blocks of which it is seen that a number counts them


def kinds_of(blocks: Sequence[nn.Module]) -> list[Hashable]:
    """Return the kind of each block: its modules' classes, shapes and plain attributes, without numbers that count the blocks."""
    numbers = [_integers(block) for block in blocks]
    known: dict[int, Hashable] = {}  # blocks share a configuration
    codes = [_code(block, known) for block in blocks]
    sizes = Counter(codes)
    # A number that differs in all blocks of one code says which block it is, as `layer_idx` does.
    values: dict[Hashable, list[int]] = {}
    for code, of_block in zip(codes, numbers, strict=True):
        for name, value in of_block.items():
            values.setdefault((code, name), []).append(value)

    def decides(code: Hashable, name: Hashable) -> bool:
        found = values[code, name]
        return sizes[code] < FEWEST or len(set(found)) < len(found)

    return [
        (code, tuple((name, value) for name, value in of_block.items() if decides(code, name)))
        for code, of_block in zip(codes, numbers, strict=True)
    ]


def _integers(block: nn.Module) -> dict[Hashable, int]:
    """Return the whole numbers that the modules of a block have as attributes, by module and name."""
    return {
        (path, name): value
        for path, part in block.named_modules()
        for name, value in vars(part).items()
        if type(value) is int
    }


def _code(block: nn.Module, known: dict[int, Hashable]) -> Hashable:
    return tuple((path, *_code_of_module(part, known)) for path, part in block.named_modules())


def _code_of_module(module: nn.Module, known: dict[int, Hashable]) -> tuple[Hashable, ...]:
    own = vars(module)
    tensors = [*own["_parameters"].items(), *own["_buffers"].items()]
    shapes = tuple((name, t.shape, t.dtype) for name, t in tensors if t is not None)
    attributes = tuple(
        (name, code_of_value(value, known))
        for name, value in own.items()
        if name not in INTERNAL and type(value) is not int
    )
    hooks = tuple(tuple(map(code_of_value, own[name].values())) for name in HOOKS)
    return type(module), shapes, attributes, hooks


def code_of_value(value: Any, known: dict[int, Hashable] | None = None) -> Hashable:
    """Return what of an attribute decides which code runs.

    Args:
        known: by id, what objects met so far gave; an object that contains itself gives None there.
    """
    if isinstance(value, (*PLAIN, int)):
        return value
    if isinstance(value, float):
        return float, value == 0  # code may leave out what it would multiply by zero
    if isinstance(value, partial):
        return partial, code_of_value(value.func, known)
    entries: Iterable[Any] = ()
    if isinstance(value, (tuple, list, set, frozenset)):
        entries = value
    elif isinstance(value, dict):
        entries = value.items()
    elif is_data(value):  # a configuration
        entries = vars(value).items()
    else:
        function = getattr(value, "__func__", value)  # of a bound method
        return getattr(function, "__code__", type(value))
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = None
        codes = [code_of_value(entry, known) for entry in entries]
        unordered = isinstance(value, (set, frozenset))
        known[id(value)] = type(value), frozenset(codes) if unordered else tuple(codes)
    return known[id(value)]
