"""Copy nested containers and plain data objects; a caller's function handles every other value.

A forward pass may append to a list, fill a dictionary or write into a cache object that it was given or that a module
holds. A replica gets copies of these, so that its writes do not reach the caller and no replay sees what a later call
wrote.
"""

from collections import deque
from collections.abc import Callable
from copy import copy
from enum import Enum
from random import Random
from typing import Any

from torch import Tensor

SCALARS = (str, bytes, bool, int, float, complex, type(None))


def copy_nested(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Copy `value` if it is a container or a plain data object, recursively; replace every other value v by leaf(v).

    Args:
        value: any value; numbers and text are returned as they are.
        leaf: function of a value that is neither a container nor plain data.
        memo: copies made so far, by the original's `id`, so that a value in two places stays one value. The originals must
            live as long as the memo.
    """
    if isinstance(value, SCALARS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        entries = [copy_nested(entry, leaf, memo) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, (dict, list, deque)):
        new = memo[id(value)] = copy(value)
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            new[key] = copy_nested(value[key], leaf, memo)
        return new
    if isinstance(value, set):
        return memo.setdefault(id(value), copy(value))
    if is_data(value):
        new = memo[id(value)] = copy(value)
        for name, entry in vars(value).items():
            new.__dict__[name] = copy_nested(entry, leaf, memo)
        return new
    return memo.setdefault(id(value), leaf(value))


def clone_if_tensor(value: Any) -> Any:
    """Clone a tensor, return any other value as it is: a `leaf` for `copy_nested`."""
    return value.clone() if isinstance(value, Tensor) else value


def contains_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container or plain data object that holds one."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(contains_tensors, value.values()))
    if isinstance(value, (list, tuple, deque)):
        return any(map(contains_tensors, value))
    return is_data(value) and any(map(contains_tensors, vars(value).values()))


def is_data(value: Any, depth: int = 3) -> bool:
    """Whether an object is plain data: it has only numbers, text, tensors, types, and containers or objects of these.

    Caches and configurations are plain data; modules, trainers, functions and open files are not.
    """
    if (
        depth == 0
        or not hasattr(value, "__dict__")
        or isinstance(value, (Tensor, Enum, Random, type))
        or callable(value)
    ):
        return False
    return all(_is_data_entry(entry, depth) for entry in vars(value).values())


def _is_data_entry(value: Any, depth: int) -> bool:
    if isinstance(value, (*SCALARS, Tensor, Enum, type)) or type(value).__module__ == "torch":  # dtypes, devices, sizes
        return True
    if isinstance(value, dict):
        return all(_is_data_entry(entry, depth) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_data_entry(entry, depth) for entry in value)
    return is_data(value, depth - 1)
