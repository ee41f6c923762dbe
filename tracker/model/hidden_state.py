"""The arguments of a block's call, by name; the hidden state in what a block returns, and the tensors in what a model returns."""

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import BoundArguments, Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def bind_arguments(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BoundArguments:
    """Name the arguments of a call of `block`, the hidden state first.

    A wrapper's forward(*args, **kwargs) names none: there, those given by name keep it and the others are numbered.

    >>> bind_arguments(nn.Linear(1, 1), ["x"], {}).arguments
    {'input': 'x'}
    """
    signature = inspect.signature(block.forward)
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        numbered = [Parameter(f"argument_{i}", Parameter.POSITIONAL_ONLY) for i in range(len(args))]
        signature = Signature(
            [*numbered, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs)]
        )
    return signature.bind(*args, **kwargs)


def call_on(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor) -> Tensor:
    """Call a module with another hidden state in the place of its first argument."""
    bound = bind_arguments(module, args, kwargs)
    bound.arguments[next(iter(bound.arguments))] = x.clone()
    return hidden_state(module(*bound.args, **bound.kwargs))


# Names of the hidden state in mappings
STATES = ("last_hidden_state", "hidden_states", "hidden_state")
ACCEPTED_FORMS = (
    "it must return the hidden state, a tuple that begins with it, or a mapping or dataclass that holds it under one of "
    f"{', '.join(STATES)} or as its only tensor: wrap the block in a module that does"
)


def hidden_state(output: Any) -> Any:
    """Return the hidden state in a block's output: the output itself, the first entry of a tuple, or the entry of a mapping or
    dataclass that has one of the names `STATES` or is its only tensor. Return any other output as it is.
    """
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    entries = named_values(output)
    if not isinstance(entries, Mapping):
        return output
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    named = [name for name in STATES if name in tensors] or (
        list(tensors) if len(tensors) == 1 else []
    )
    return tensors[named[0]] if named else output


def states_in(values: Mapping[Any, Any]) -> dict[Any, Tensor]:
    """Return the entries that may be hidden states: floating tensors of three dimensions."""
    return {
        k: v
        for k, v in values.items()
        if isinstance(v, Tensor) and v.dim() == 3 and v.is_floating_point()
    }


def passed_on(arguments: BoundArguments, states: Mapping[int, Tensor]) -> list[int]:
    """Return the indices of the previous block's `states_in` that are among these arguments."""
    by_name: dict[str, Any] = {}
    for name, value in arguments.arguments.items():
        collects = arguments.signature.parameters[name].kind is Parameter.VAR_KEYWORD
        by_name |= value if collects else {name: value}
    inputs = states_in(by_name).values()
    return [
        i
        for i, y in states.items()
        if any(v is y or (v.shape == y.shape and torch.equal(v, y)) for v in inputs)
    ]


def same_state(a: Tensor, b: Tensor) -> bool:
    """Whether a state equals a recorded one, which may be in the host's memory."""
    return a.shape == b.shape and torch.equal(a.to(b.dtype), b.to(a.device))


def check_finite(values: Tensor, where: str) -> None:
    """Raise FloatingPointError, naming the place, if a value is not finite."""
    if not torch.isfinite(values).all():
        raise FloatingPointError(
            f"{where} gives values that are not finite (overflow or NaN in {values.dtype}); check the weights, or measure in "
            "float64"
        )


def with_hidden_state(output: Any, state: Tensor) -> Any:
    """Return the same output with another hidden state."""
    old = hidden_state(output)
    if _is_record(output):
        changed = copy(output)
        for name, value in named_values(output).items():
            if value is old:
                object.__setattr__(changed, name, state)  # a frozen dataclass as well
        return changed
    return tree_map(lambda leaf: state if leaf is old else leaf, output)


def describe_output(output: Any) -> str:
    """Describe a block's output for a message: its type, and its entries' types and shapes."""
    entries = dict(enumerate(output)) if isinstance(output, (tuple, list)) else named_values(output)
    if not isinstance(entries, Mapping):
        return type(output).__name__
    parts = (
        f"{name}: {tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__}"
        for name, v in entries.items()
    )
    return f"{type(output).__name__}({', '.join(parts)})"


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in nested sequences and mappings."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def floating_tensors(output: Any) -> list[Tensor]:
    """Return the floating tensors in what a model returns: those in nested sequences, mappings and dataclasses; if there are
    none, those in its attributes. Nothing is taken from an iterator.
    """
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    for leaf in tree_leaves(output):
        if isinstance(leaf, Mapping) or _is_record(leaf):
            found += floating_tensors(dict(named_values(leaf)))
    return found or (floating_tensors(vars(output)) if hasattr(output, "__dict__") else [])


def named_values(output: Any) -> Any:
    """Return the fields of a dataclass by name; another output as it is."""
    return (
        {entry.name: getattr(output, entry.name) for entry in fields(output)}
        if _is_record(output)
        else output
    )


def _is_record(output: Any) -> bool:
    return is_dataclass(output) and not isinstance(output, (type, Mapping))
