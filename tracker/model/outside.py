"""Notice what forward passes write to where a measurement has no copy, and tell the caller.

A measurement runs on copies of what modules hold (`guard`, `replica`). A forward pass may also write to attributes of classes,
to default values, globals and variables of the functions around its code, and to objects that can't be copied. What the code of
modules, and of functions that it calls, names is compared before and after a measurement; of objects that can't be copied, the
attributes are. What changed is named in a warning, once. It is not put back: another thread may have written to it meanwhile.
What was None was made at its first use, and is not named. Not noticed: what is written to files, to loggers, to what can't be
pickled, to large arrays, and by the code of installed libraries.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FunctionType, GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from tracker.common.errors import warn_caller
from tracker.common.text import join_names
from tracker.model import guard
from tracker.model.functions import reachable, variables
from tracker.model.random_numbers import Generator

LARGE = 1 << 24  # bytes of an array whose contents are not compared
LONG = 100_000  # entries of a container of which the number is compared
WARNED: Any = WeakKeyDictionary()
PLAIN = (*guard.SCALARS, *guard.LEAVES, *guard.CONTAINERS)


@contextmanager
def noticing_writes(model: nn.Module) -> Iterator[None]:
    """Compare what the code of a model reaches before and after its forward passes run on copies."""
    reached = [*_reached(model)]  # kept alive, so that ids are not reused
    before = {(id(owner), name): _contents(value) for owner, name, value, _ in reached}
    none = _contents(None)
    try:
        yield
    finally:
        warned, written = WARNED.setdefault(model, set()), []
        for owner, name, value, place in _reached(model):
            old = before.get((id(owner), name), none)
            if place not in warned and old not in (none, b"", now := _contents(value)) and now:
                written.append(f"{place} ({type(value).__name__})")
                warned.add(place)
        if written:
            warn_caller(
                f"the model's forward pass writes to {join_names(written)}. A measurement has no copy of this, so each of its "
                "calls of the model and of its blocks, some ten or more, writes there, too, and a training that is measured may "
                "differ from one that is not. Keep it in a buffer or an attribute of the module"
            )


def _reached(model: nn.Module) -> Iterator[tuple[Any, str, Any, str]]:
    """Yield what the code of a model's modules reaches besides what the modules hold, and what they hold uncopied.

    Each with the class or function whose attribute or variable it is, its name there, and its place as the caller knows it.
    """
    waiting: list[tuple[str, Any]] = []  # what modules hold, and their classes, by the first path
    for path, part in model.named_modules(prefix="model"):
        waiting += ((path, cls) for cls in type(part).__mro__)
        for name, value in vars(part).items():
            for i, held in enumerate(reachable(value)):
                waiting.append((f"{path}.{name}{[i] if i else ''}", held))
    followed: set[Any] = set()
    for path, held in waiting:  # which grows
        if not isinstance(held, (FunctionType, type)):
            if not _is_copied(held):
                yield held, "", held, path
            continue
        if held in followed or is_of_library(held.__module__):
            continue
        followed.add(held)
        if isinstance(held, FunctionType):
            named = variables(held) | {"default values": held.__defaults__}
        else:
            # Not what Python keeps of a class
            named = {name: value for name, value in vars(held).items() if name[:2] != "__"}
        for name, value in named.items():
            if isinstance(value, (FunctionType, type)):
                waiting.append((path, value))
            elif not hasattr(type(value), "__get__"):
                yield held, name, value, f"{path}: {name} of {held.__qualname__}"


def _is_copied(value: Any) -> bool:
    """Whether a replica's modules hold a copy of a value, or what is neither copied nor written to."""
    plain = isinstance(value, (*PLAIN, np.ndarray))
    return plain or guard.is_data(value) or guard.copy_opaque(value) is not value


class _Pickler(pickle.Pickler):
    """Pickles values to compare them: modules, functions and classes by identity, tensors also by their versions."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return id(value), value.is_inference() or value._version
        if isinstance(value, guard.CONTAINERS) and len(value) > LONG:
            return id(value), len(value)
        if isinstance(value, GeneratorType):
            return value.gi_frame and (value.gi_frame.f_lasti, {**value.gi_frame.f_locals})
        if isinstance(value, count):
            return repr(value)  # from Python 3.14 on it can't be pickled
        large = isinstance(value, np.ndarray) and value.nbytes > LARGE
        by_identity = isinstance(value, guard.LEAVES) and not isinstance(value, Generator)
        return id(value) if large or by_identity else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return NotImplemented
        if guard.is_opaque(value):
            return type(value), (), hash(guard.pickled(value))
        held = guard.attributes(value)
        if not guard.is_data(value):
            # It holds objects in many levels: what its attributes are, not what is in them
            held = {name: v if isinstance(v, (int, str)) else id(v) for name, v in held.items()}
        return type(value), (), held


_contents = partial(guard.pickled, pickler=_Pickler)


def is_of_library(module: Any) -> bool:
    """Whether a module, by its name, is one of Python or is installed (in site-packages or dist-packages)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{module}".partition(".")[0] in guard.KNOWN or "-packages" in f"{file}"
