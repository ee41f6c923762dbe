"""Notice what forward passes write to where a measurement has no copy, and tell the caller.

A measurement runs on copies of what modules hold (`guard`, `replica`). A forward pass may also write to attributes of classes,
to default values, globals and variables of the functions around its code, and to objects that can't be copied. What the code of
modules, and of functions that it calls, names is compared before and after a measurement; of objects that can't be copied, the
attributes. What changed is named in a warning, once. It is not put back: another thread may have written to it meanwhile. What
was None was made at its first use, and is not named. Not noticed: what is written to files, to loggers, and by the code of
installed libraries.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getclosurevars
from itertools import count
from types import FunctionType, GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tracker.common.errors import warn_caller
from tracker.common.text import join_names
from tracker.model import guard
from tracker.model.functions import reachable
from tracker.model.random_numbers import Generator

WARNED: Any = WeakKeyDictionary()
PLAIN = (*guard.SCALARS, *guard.LEAVES, *guard.CONTAINERS)


@contextmanager
def noticing_writes(model: nn.Module) -> Iterator[None]:
    """Compare what the code of a model reaches before and after its forward passes run on copies."""
    before = {place: _contents(value) for place, value in _reached(model)}
    try:
        yield
    finally:
        warned, written = WARNED.setdefault(model, set()), []
        for place, value in _reached(model):
            old = before.get(place, ...)
            same = old is None or guard.equal_nested(_contents(value), old)
            if not same and place not in warned:
                written.append(f"{place} ({type(value).__name__})")
                warned.add(place)
        if written:
            warn_caller(
                f"the model's forward pass writes to {join_names(written)}. A measurement has no copy of this, so each of its "
                "calls of the model and of its blocks, some ten or more, writes there, too, and a training that is measured may "
                "differ from one that is not. Keep it in a buffer or an attribute of the module"
            )


def _reached(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the code of a model's modules reaches besides what the modules hold, by name, and what they hold uncopied."""
    waiting: list[tuple[str, Any]] = []  # what modules hold, and their classes, by the first path
    for path, part in model.named_modules(prefix="model"):
        waiting += ((path, cls) for cls in type(part).__mro__)
        for name, value in vars(part).items():
            for i, held in enumerate(reachable(value)):
                waiting.append((f"{path}.{name}{[i] if i else ''}", held))
    followed: set[Any] = set()
    for path, held in waiting:  # which grows
        if not isinstance(held, (FunctionType, type)):
            if not isinstance(held, PLAIN) and guard.copy_nested(held, id, {}) is held:
                yield path, held
            continue
        if held in followed or _is_of_library(held.__module__):
            continue
        followed.add(held)
        named = vars(held)
        if isinstance(held, FunctionType):
            variables, of_module, *_ = getclosurevars(held)
            named = {**variables, **of_module, "default values": held.__defaults__}
        for name, value in named.items():
            if isinstance(value, (FunctionType, type)):
                waiting.append((path, value))
            elif not hasattr(type(value), "__get__"):
                yield f"{path}: {name} of {held.__qualname__}", value


def _contents(value: Any) -> Any:
    """Copy what can be compared of a value: tensors by their versions; of an object that can't be copied the attributes."""

    def leaf(entry: Any) -> Any:
        if isinstance(entry, Generator):
            return pickle.dumps(entry)
        return id(entry), isinstance(entry, Tensor) and (entry.is_inference() or entry._version)

    if isinstance(value, count):
        return repr(value)  # from Python 3.14 on it can't be copied
    if isinstance(value, GeneratorType):
        return value.gi_frame and {**value.gi_frame.f_locals}
    copied = guard.copy_nested(value, leaf, {})
    return guard.attributes(value) if copied is value and not isinstance(value, PLAIN) else copied


def _is_of_library(module: Any) -> bool:
    """Whether a module, by its name, is one of Python or is installed (in site-packages or dist-packages)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{module}".partition(".")[0] in guard.KNOWN or "-packages" in f"{file}"
