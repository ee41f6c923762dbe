"""Keep what a forward pass writes from the caller: copies of containers, and copy-on-write of tensors that share memory.

A forward pass may append to a list, fill a dictionary or write into a cache object that it was given or that a module
holds. A replica gets copies of these, so that its writes do not reach the caller and no replay sees what a later call
wrote. A caller's function handles every value that is no container or plain data object.

A replica shares the memory of the caller's weights (`replica`). Some forward passes write to their weights: RWKV rescales
them in place, normalisations update statistics. While `WriteGuard` is active, every ATen operation that would write to
shared memory first replaces the replica's tensors by copies; the operation then changes the copies, and the caller's
memory and version counters stay as they were. Cost: some microseconds for each operation; no copy where nothing is written.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from enum import Enum
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        # Into the memo before its entries: a container may contain itself.
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            new[key] = copy_nested(value[key], leaf, memo)
        return new
    if isinstance(value, set):
        # Tensors in a set are found by identity, so they are not copied.
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
        or hasattr(value, "__del__")  # files and connections: a copy would close what it shares
    ):
        return False
    return all(_is_data_entry(entry, depth) for entry in vars(value).values())


def _is_data_entry(value: Any, depth: int) -> bool:
    # Dtypes, devices, sizes
    if isinstance(value, (*SCALARS, Tensor, Enum, type)) or type(value).__module__ == "torch":
        return True
    if isinstance(value, dict):
        return all(_is_data_entry(entry, depth) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_data_entry(entry, depth) for entry in value)
    return is_data(value, depth - 1)


class SharedTensors:
    """Tensors that share the caller's memory, by storage; and tensors that a forward pass uses and should not write to."""

    def __init__(self) -> None:
        # By storage: each alias and the caller's tensor
        self._originals: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # Aliases that the current call moved to a copy
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._watched: set[int] = set()  # storages
        self._written = False

    def share(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory, with its own version counter and outside any graph."""
        alias = tensor.data
        self._originals.setdefault(_storage(alias), []).append((alias, tensor))
        return alias

    @contextmanager
    def watch(self, tensors: Collection[Tensor]) -> Iterator[None]:
        """Record whether a call writes to these tensors."""
        storages = {
            _storage(tensor) for tensor in tensors if tensor.layout == torch.strided
        } - self._watched
        self._watched |= storages
        try:
            yield
        finally:
            self._watched -= storages

    def begin_call(self) -> None:
        """Begin a call whose writes `undo_writes` is to undo."""
        self._copied, self._written = [], False

    def undo_writes(self) -> bool:
        """Share the caller's memory again where the call wrote; return whether it wrote to a shared or watched tensor."""
        for alias, original in self._copied:
            alias.data = original.data
            self._originals.setdefault(_storage(alias), []).append((alias, original))
        self._copied = []
        return self._written

    def before_write(self, written: Tensor) -> None:
        """Move all aliases of this memory, and the tensor that is about to be written, to a copy of it."""
        # Sparse tensors have no storage, and tensors on meta no values.
        if written.layout != torch.strided or written.device.type == "meta":
            return
        storage = _storage(written)
        shared = self._originals.pop(storage, [])
        self._written |= bool(shared) or storage in self._watched
        if not shared:
            return
        self._copied += shared
        # It may also be a view, or the caller's tensor itself, in a closure of its code.
        if not any(written is alias for alias, _ in shared):
            self._copied.append((written, written.data))
        copy = written.untyped_storage().clone()
        with torch.no_grad():
            for tensor in (*(alias for alias, _ in shared), written):
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                place = tensor.storage_offset(), tensor.size(), tensor.stride()
                tensor.data = empty.set_(copy, *place)  # type: ignore[call-overload]
        if storage in self._watched:
            self._watched.add(_storage(written))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class WriteGuard(TorchDispatchMode):
    """While active, this thread's operations that would write to shared memory write to a copy instead."""

    supports_higher_order_operators = True

    def __init__(self, shared: SharedTensors) -> None:
        super().__init__()
        self.shared = shared

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that PyTorch would add imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Protect the tensors that the operation writes to, then run it."""
        kwargs = kwargs or {}
        for position, name in _written(func):
            argument = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(argument):
                self.shared.before_write(tensor)
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operation writes to, by position and name."""
    schema = getattr(func, "_schema", None)
    # A higher-order operator: the operations inside it are dispatched separately
    if schema is None:
        return ()
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
