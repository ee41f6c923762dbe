"""Rebuild the functions that modules keep, so that they run copies of the modules they hold.

A lambda or nested function holds modules in its closure, its default values or its globals, `functools.partial` in its arguments,
a bound method in what it is bound to. Rebuilt, it has the same code and holds the copies. A function that holds another one, or
itself, is followed. What can't be rebuilt stays the same object: C functions, and objects with a `__call__` of their own.
"""

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from tracker.model.guard import SCALARS, entries


def reachable(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds as a container or a function, each once."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            waiting.extend(_held(value))


def holds_objects(function: Any, memo: dict[int, Any]) -> bool:
    """Whether a function holds anything but numbers and text, or has a variable in common with others, or what was copied."""
    if isinstance(function, FunctionType) and (function.__closure__ or _copied(function, memo)):
        return True
    return not all(isinstance(held, SCALARS) for held in _held(function))


def _copied(function: FunctionType, memo: dict[int, Any]) -> dict[str, Any]:
    """Return the globals of a function of which there are copies, as modules hold them, too."""
    found = variables(function).items()
    return {name: value for name, value in found if memo.get(id(value), value) is not value}


def rebuild(function: Any, copy: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return a function of the same code over copies of what it holds.

    Args:
        function: of one of `FUNCTIONS`.
        copy: of any value that it holds.
        memo: the copies made so far, by id of the original: a function may hold itself, and two may share a variable.
    """
    if isinstance(function, MethodType):
        return _bind(function, copy)
    if isinstance(function, partial):
        return type(function)(copy(function.func), *copy(function.args), **copy(function.keywords))
    cells = function.__closure__ or ()
    new_cells = tuple(memo.setdefault(id(cell), CellType()) for cell in cells)
    names = _globals(function) | _copied(function, memo)
    scope = dict(function.__globals__) if names else function.__globals__
    new = memo[id(function)] = FunctionType(
        function.__code__, scope, function.__name__, None, new_cells
    )
    functools.update_wrapper(new, function, updated=())
    new.__dict__ = copy(vars(function))
    new.__defaults__ = copy(function.__defaults__)
    new.__kwdefaults__ = copy(function.__kwdefaults__)
    scope.update((name, copy(value)) for name, value in names.items())
    for cell, new_cell in zip(cells, new_cells, strict=True):
        if is_empty(new_cell) and not is_empty(cell):
            new_cell.cell_contents = copy(cell.cell_contents)
    return new


def _held(value: Any) -> Iterable[Any]:
    """Return what a container or a function holds."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, ref):
        return (value(),)
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return *around(value).values(), *defaults, *_globals(value).values(), *vars(value).values()
    return entries(value)


def variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of the functions around a function, and the globals that its code reads or sets, by name."""
    scope = function.__globals__
    names = _global_names(function.__code__, ("LOAD_GLOBAL", "STORE_GLOBAL"))
    return {name: scope[name] for name in names if name in scope} | around(function)


def around(function: FunctionType) -> dict[str, Any]:
    """Return the variables of the functions around a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if not is_empty(cell)}


def _globals(function: FunctionType) -> dict[str, Any]:
    """Return the modules and tensors that a function's code finds as globals: those of a script or a notebook."""
    scope = function.__globals__
    names = _global_names(function.__code__, ("LOAD_GLOBAL",))
    return {name: scope[name] for name in names if isinstance(scope.get(name), (nn.Module, Tensor))}


@functools.cache
def _global_names(code: CodeType, operations: tuple[str, ...]) -> list[str]:
    """Return the names of the globals that operations of code are of, with those of the functions that it defines."""
    names = [now.argval for now in dis.get_instructions(code) if now.opname in operations]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _global_names(inner, operations)
    return names


def is_empty(cell: CellType) -> bool:
    """Whether a variable of a closure has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _bind(method: MethodType, copy: Callable[[Any], Any]) -> Any:
    """Bind a method to the copy of its object, whose class may be another: that of the module inside a wrapper, for example."""
    owner, function = method.__self__, method.__func__
    new, name = copy(owner), getattr(function, "__name__", "")
    if getattr(type(owner), name, None) is function:
        return MethodType(getattr(type(new), name, function), new)
    return MethodType(copy(function), new)
