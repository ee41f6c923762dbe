"""Copy-on-write for tensors that share the caller's memory.

A replica shares the memory of the caller's weights (`replica`). Some forward passes write to their weights: RWKV rescales
them in place, normalisations update statistics. While `WriteGuard` is active, every ATen operation that would write to
shared memory first replaces the replica's tensors by copies; the operation then changes the copies, and the caller's
memory and version counters stay as they were. Cost: some microseconds for each operation; no copy where nothing is written.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SharedTensors:
    """Tensors that share the caller's memory, by storage; and tensors that a forward pass uses and should not write to."""

    def __init__(self) -> None:
        self._originals: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by storage: each alias and the caller's tensor
        self._copied: list[tuple[Tensor, Tensor]] = []  # aliases that the current call moved to a copy
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
        storages = {_storage(tensor) for tensor in tensors} - self._watched
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
        if written.layout != torch.strided or written.device.type == "meta":
            return
        storage = _storage(written)
        shared = self._originals.pop(storage, [])
        self._written |= bool(shared) or storage in self._watched
        if not shared:
            return
        self._copied += shared
        copy = written.untyped_storage().clone()
        with torch.no_grad():
            for tensor in (*(alias for alias, _ in shared), written):
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
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

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Protect the tensors that the operation writes to, then run it."""
        kwargs = kwargs or {}
        for position, name in _written(func):
            given = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(given):
                self.shared.before_write(tensor)
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operation writes to, by position and name."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: the operations inside it are dispatched separately
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
