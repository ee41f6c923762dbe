"""Tell the hooks that compute part of a model's function from those that record. Their code is read; they are not run.

A hook computes if it

- returns anything but None or an argument as it was given; a call that it returns is read, too;
- works in place on an argument: x.add_(y), F.relu_(x), out=x, output[0][:, 0] = 0, output += 1;
- leaves what the forward passes of modules read: in an attribute of a module, in a variable, or in an object that modules hold.

Functions that it calls are read, too, unless a library has them. What can't be read, such as a function in C, computes. Hooks of
torch.distributed, which place weights and states on several ranks, do not: a copy of a model has whole weights.

Both copies of a model, replica and twin, have the hooks that compute, over copies of what they hold (`replica`). What such a hook
does to an object that can't be copied, such as a logger or a file, is done. Other hooks are left out.
"""

import builtins
import dis
import inspect
from collections import ChainMap
from collections.abc import Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from tracker.model.functions import around, reachable, variables
from tracker.model.guard import SCALARS
from tracker.model.outside import is_of_library

ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
WRITES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE")
ADDING = ("append", "appendleft", "extend", "insert", "update", "__setitem__")  # they return None
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
BESIDE = (*CALLS, "PRECALL", "PUSH_NULL", "KW_NAMES")
RETURNS, ARGUMENT, OTHER = object(), object(), object()
ADDS = object()  # a call of one of ADDING
DEPTH = 4  # of calls in calls that are read


class Hooks:
    """The hooks of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def compute(self, module: nn.Module, hook: Any) -> bool:
        """Whether a module's hook computes part of the model's function."""
        homes = (str(getattr(held, "__module__", "")) for held in reachable(hook))
        if any(home.startswith("torch.distributed") for home in homes):
            return False
        effects = {*_effects(hook, module)}
        return not effects.isdisjoint({RETURNS, ARGUMENT}) or not effects.isdisjoint(self._read)

    @cached_property
    def _read(self) -> set[Any]:
        """The names in the code of forward passes, and the ids of what modules hold under them."""
        read = set[Any]()
        for part in self.model.modules():
            names = ["forward"]
            for name in names:  # which grows
                method = inspect.getattr_static(type(part), name, None)
                for value in (method, *reachable(vars(part).get(name))):
                    if isinstance(value, FunctionType):
                        code = value.__code__
                        names += {*code.co_names, *code.co_freevars}.difference(names)
                        read.update(map(id, variables(value).values()))
                    if not isinstance(value, SCALARS):
                        read.add(id(value))
            read.update(names)
        return read


def _effects(called: Any, *given: Any, depth: int = DEPTH) -> Iterator[Any]:
    """Yield, of a call, by its code: `RETURNS` if it may return a value of its own; and what it writes to.

    This is `ARGUMENT`, the name of an attribute of a module or of a variable, or the id of another value.

    Args:
        called: a function, a method, a module, or another object that is called.
        given: the first arguments, as far as they are known.
        depth: of calls in it that are read.
    """
    while not isinstance(called, FunctionType):
        if isinstance(called, MethodType):
            called, given = called.__func__, (called.__self__, *given)
        elif isinstance(called, partial):
            called, given = called.func, (*called.args, *given)
        else:
            name = "forward" if isinstance(called, nn.Module) else "__call__"
            method = inspect.getattr_static(type(called), name, None)
            if not isinstance(method, FunctionType):
                # The name, because Ray puts a function of its own in the place of print.
                is_print = getattr(called, "__name__", None) == "print"
                returns_none = called is ADDS or is_print
                yield OTHER if returns_none else ARGUMENT if called is setattr else RETURNS
                return
            called, given = method, (called, *given)
    function = inspect.unwrap(called)
    code, steps = function.__code__, [*dis.get_instructions(function)]
    names, varargs, varkw = inspect.getargs(code)
    arguments = dict.fromkeys((*names, varargs or "", varkw or ""), ARGUMENT)
    arguments.update(zip(names, given, strict=False))
    scope = ChainMap(arguments, around(function), function.__globals__, {**vars(builtins)})
    numbered = reversed([*enumerate(steps)])  # of several assignments, the first
    stored = {step.argval: i for i, step in numbered if step.opname == "STORE_FAST"}

    def expression(end: int) -> list[dis.Instruction]:
        """Return the steps that begin, in the source, where the one at `end` does: the first loads a variable."""
        begins = [step.positions and step.positions[::2] for step in steps[: end + 1]]
        return [steps[i] for i, at in enumerate(begins) if at == begins[-1]]

    def loaded(first: dis.Instruction) -> Any:
        name = first.argval
        # Two variables are loaded in one step from Python 3.13 on.
        if first.opname in ATTRIBUTES or isinstance(name, tuple):
            return ARGUMENT
        if name in stored and name not in arguments:
            return loaded(expression(stored[name] - 1)[0])
        if first.opname == "LOAD_CONST":
            return name
        return scope.get(name, OTHER) if first.opname.startswith("LOAD") else ARGUMENT

    def called_at(end: int) -> Any:
        first, *more = (step for step in expression(end) if step.opname not in BESIDE)
        value = loaded(first)
        for step in more:
            value = _attribute(value, step.argval) if step.opname in ATTRIBUTES else OTHER
        return ADDS if more and more[-1].argval in ADDING else value

    for end, step in enumerate(steps):
        op, name, before = step.opname, step.argval, steps[end - 1]
        if op in ("STORE_GLOBAL", "STORE_DEREF"):
            yield name
        elif op == "RETURN_CONST" and name is not None:
            yield RETURNS
        elif op == "RETURN_VALUE":
            as_given = before.argval in arguments and before.argval not in stored
            of_none = before.opname == "LOAD_CONST" and before.argval is None
            if before.opname in CALLS:
                of_none = not depth or RETURNS not in _effects(called_at(end - 1), depth=depth - 1)
            if not as_given and not of_none:
                yield RETURNS
        elif op in CALLS and depth:
            function = called_at(end)
            if not is_of_library(getattr(function, "__module__", None)) or function is setattr:
                yield from {*_effects(function, depth=depth - 1)} - {RETURNS}
        elif (
            op in WRITES
            or (op == "BINARY_OP" and step.argrepr.endswith("="))
            or (op in ATTRIBUTES and (name in ADDING or _works_in_place(str(name))))
        ):
            first, *more = expression(end)
            value = loaded(first)
            if isinstance(value, nn.Module):
                yield from {s.argval for s in more if s.opname in ATTRIBUTES} - {*ADDING}
            else:
                yield ARGUMENT if isinstance(value, ModuleType) or value is ARGUMENT else id(value)
    for value in code.co_consts:
        names = value.co_names if isinstance(value, CodeType) else value
        if isinstance(names, tuple) and any(
            name in ("out", "inplace") or _works_in_place(str(name)) for name in names
        ):
            yield ARGUMENT


def _works_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith(("__", "requires_grad_"))


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the value's class."""
    found = inspect.getattr_static(value, name, OTHER)
    of_class = isinstance(found, FunctionType) and not isinstance(value, (ModuleType, type))
    return MethodType(found, value) if of_class else found
