"""Keep a forward pass from writing into the caller's tensors.

A replica shares the memory of the caller's weights (`replica`). Some forward passes write to them: RWKV rescales its weights in
place, normalisations update statistics. While `WriteGuard` is active, every ATen operation that writes to shared memory
first gives the replica a copy of it, as copy-on-write does; the operation then changes the copy, and the caller's memory
and version counters stay as they were. Cost: some microseconds for each operation; no copy where nothing is written.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Shared:
    """Tensors that share the caller's memory, by storage, and tensors that are lent to a forward pass."""

    def __init__(self) -> None:
        self._originals: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by storage: each alias with the caller's tensor
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._lent: set[int] = set()
        self._written = False

    def share(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory, with a version counter of its own and outside any graph."""
        alias = tensor.data
        self._originals.setdefault(_storage(alias), []).append((alias, tensor))
        return alias

    @contextmanager
    def lent(self, tensors: Collection[Tensor]) -> Iterator[None]:
        """Watch for writes to tensors that a forward pass is lent."""
        storages = {_storage(tensor) for tensor in tensors} - self._lent
        self._lent |= storages
        try:
            yield
        finally:
            self._lent -= storages

    def begin(self) -> None:
        """Begin a call whose writes are to be undone."""
        self._moved, self._written = [], False

    def undo(self) -> bool:
        """Share the caller's memory again where the call wrote; tell whether it wrote to anything lent or shared."""
        for alias, original in self._moved:
            alias.data = original.data
            self._originals.setdefault(_storage(alias), []).append((alias, original))
        self._moved = []
        return self._written

    def before_write(self, written: Tensor) -> None:
        """Move what shares this memory, and the tensor that is about to be written, to a copy of it."""
        if written.layout != torch.strided or written.device.type == "meta":
            return
        storage = _storage(written)
        shared = self._originals.pop(storage, [])
        self._written |= bool(shared) or storage in self._lent
        if not shared:
            return
        self._moved += shared
        copy = written.untyped_storage().clone()
        with torch.no_grad():
            for tensor in (*(alias for alias, _ in shared), written):
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
        if storage in self._lent:
            self._lent.add(_storage(written))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class WriteGuard(TorchDispatchMode):
    """While active, operations of this thread that would write to shared memory write to a copy."""

    supports_higher_order_operators = True

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that PyTorch would add imports the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Protect what the operation writes to, then run it."""
        kwargs = kwargs or {}
        for position, name in _written(func):
            given = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(given):
                self.shared.before_write(tensor)
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to, by position and name."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: what it runs arrives here by itself
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
