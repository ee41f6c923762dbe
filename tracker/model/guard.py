"""Keep what a forward pass writes from the caller: copies of objects, and copy-on-write of tensors that share memory.

A forward pass may append to a list, count in an array or write into a cache object that it was given or that a module
holds. A replica gets copies of these, so that its writes do not reach the caller and no replay sees what a later call
wrote. A caller's function handles tensors, modules, functions and generators. What can't be copied stays the caller's
(`outside` notices what is written to it).

A replica shares the memory of the caller's weights (`replica`). Some forward passes write to their weights: RWKV rescales
them in place, normalisations update statistics. While `WriteGuard` is active, every ATen operation that would write to
shared memory first replaces the replica's tensors by copies; the operation then changes the copies, and the caller's
memory and version counters stay as they were. Cost: some microseconds for each operation; no copy where nothing is written.
"""

import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from enum import Enum
from functools import cache, partial
from logging import Logger
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tracker.model.hidden_state import tensors_in
from tracker.model.random_numbers import Generator

SCALARS = (str, bytes, bool, int, float, complex, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
MODULES = (nn.Module, ref)  # or references to them, as keys
FUNCTIONS = (FunctionType, MethodType, partial)
LEAVES = (Tensor, nn.Module, *FUNCTIONS, Generator, type, Enum, ModuleType, Logger, ref)
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operations
# Whose classes in C are known: iterators, text streams, arrays; also locks and files, which can't be copied, but shared.
KNOWN = {*sys.stdlib_module_names, "numpy"}


def copy_nested(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Copy `value` if that is possible, recursively; replace every value v of `LEAVES` by leaf(v).

    Args:
        value: any value; numbers and text are returned as they are.
        leaf: function of a tensor, module, function or generator.
        memo: copies made so far, by the original's `id`, so that a value in two places stays one value. The originals must
            live as long as the memo.
    """
    if isinstance(value, SCALARS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, LEAVES):
        return memo.setdefault(id(value), leaf(value))
    if isinstance(value, tuple):
        entries = [copy_nested(entry, leaf, memo) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, (set, frozenset)):
        # Tensors in a set are found by identity, so they are not copied.
        entries = [leaf(entry) if isinstance(entry, MODULES) else entry for entry in value]
        return memo.setdefault(id(value), type(value)(entries))
    if isinstance(value, (dict, list, deque)):
        new: Any = memo.setdefault(id(value), copy(value))
        # Into the memo before its entries: a container may contain itself.
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            entry = copy_nested(value[key], leaf, memo)
            if isinstance(key, MODULES):
                del new[key]
                key = leaf(key)
            new[key] = entry
    elif is_data(value):
        new = memo[id(value)] = _blank(value)
    else:
        return memo.setdefault(id(value), copy_opaque(value))
    for name, entry in attributes(value).items():
        copied = copy_nested(entry, leaf, memo)
        if name in getattr(value, "__dict__", ()):
            new.__dict__[name] = copied
        else:  # in a slot, past what the class does when an attribute is set
            object.__setattr__(new, name, copied)
    return new


def copy_opaque(value: Any) -> Any:
    """Copy an array, an iterator, a table; return what can't be copied as it is."""
    try:
        return deepcopy(value) if is_opaque(value) else value
    except Exception:  # of any type: code of the object's class runs
        return value


def equal_nested(now: Any, saved: Any) -> bool:
    """Whether a value is as its copy; an array or an iterator that can't be pickled counts as changed."""
    if now is saved:
        return True
    if type(now) is not type(saved):
        return False
    if isinstance(now, Tensor):
        return now.shape == saved.shape and now.dtype == saved.dtype and torch.equal(now, saved)
    if is_data(now):
        now, saved = attributes(now), attributes(saved)
    if isinstance(now, dict):
        return now.keys() == saved.keys() and all(equal_nested(now[key], saved[key]) for key in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(saved) and all(map(equal_nested, now, saved))
    if isinstance(now, (*SCALARS, set)):
        return now == saved or now != now  # NaN
    return is_opaque(now) and pickled(now) == pickled(saved) != b""


def pickled(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    """Return bytes that differ if what is in a value has changed; none if it can't be pickled."""
    written = io.BytesIO()
    try:
        pickler(written).dump(value)
    except Exception:  # of any type: code of the object's class runs
        return b""
    return written.getvalue()


def clone_if_tensor(value: Any) -> Any:
    """Clone a tensor, return any other value as it is: a `leaf` for `copy_nested`."""
    return value.clone() if isinstance(value, Tensor) else value


def contains_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container or plain data object that holds one."""
    held = attributes(value).values() if is_data(value) else entries(value)
    return isinstance(value, Tensor) or any(map(contains_tensors, held))


def entries(container: Any) -> Collection[Any]:
    """Return what a container holds; nothing of another value."""
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, CONTAINERS) else ()


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in slots."""
    # A dictionary, None, or a pair of these if the class has slots
    state: Any = object.__getstate__(value)
    own, slots = state if isinstance(state, tuple) else (state, None)
    return (own or {}) | (slots or {})


def is_data(value: Any, depth: int = 3) -> bool:
    """Whether an object is plain data: of a class in Python, and with attributes that can be copied or shared.

    Caches, configurations, counters and meters are plain data, also if they refer to modules or functions. Trainers are not:
    they hold objects that hold others in many levels.
    """
    if (
        depth == 0
        or isinstance(value, LEAVES)
        or is_opaque(value)
        # Files, connections: a copy would close what it shares
        or hasattr(type(value), "__del__")
    ):
        return False
    # A plain object is there to be compared by identity.
    if type(value) is object or _blank(value) is None:
        return False
    return all(_is_data_entry(entry, depth) for entry in attributes(value).values())


def _is_data_entry(value: Any, depth: int) -> bool:
    if isinstance(value, CONTAINERS):
        return all(_is_data_entry(entry, depth) for entry in entries(value))
    # Of torch: dtypes, devices, sizes
    plain = isinstance(value, (*SCALARS, *LEAVES)) or type(value).__module__ == "torch"
    return plain or is_opaque(value) or is_data(value, depth - 1)


def is_opaque(value: Any) -> bool:
    """Whether how an object is copied is known to its class alone: an array, an iterator, a table."""
    cls = type(value)
    if isinstance(value, (np.memmap, *LEAVES)):
        return False
    known = any(base.__module__.partition(".")[0] in KNOWN for base in cls.__mro__[:-1])
    return hasattr(cls, "__deepcopy__") or (known and _blank(value) is None)


def _blank(value: Any) -> Any:
    """Return an object of the same class, without attributes; None for a class in C."""
    base = SimpleNamespace if isinstance(value, SimpleNamespace) else object
    try:
        return base.__new__(type(value))
    except TypeError:
        return None


class SharedTensors:
    """Tensors that share the caller's memory, by storage; and tensors that a forward pass uses and should not write to."""

    def __init__(self) -> None:
        # By storage: each alias and the caller's tensor
        self._originals: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # Aliases that the current call moved to a copy
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._watched: set[int] = set()  # storages
        self.waits = False  # whether a pass waited for other ranks (torch.distributed)
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
        self.shared.waits |= getattr(func, "namespace", "") in COLLECTIVES
        for position, name in _written(func):
            argument = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in(argument):
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
