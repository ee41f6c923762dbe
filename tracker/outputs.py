"""What a block returns: where the hidden state stands in it."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

STATES = ("last_hidden_state", "hidden_states", "hidden_state")  # what mappings call a block's output
FORMS = (
    "it must return the hidden state, a tuple that begins with it, or a mapping or dataclass that holds it under one of "
    f"{', '.join(STATES)} or as its only tensor: wrap the block in a module that does"
)


def hidden_state(output: Any) -> Any:
    """A block's output is the hidden state, a tuple that begins with it, or a mapping or dataclass that names it or holds
    no other tensor. Any other output comes back as it is.
    """
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    entries = _entries(output)
    if not isinstance(entries, Mapping):
        return output
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    named = [name for name in STATES if name in tensors] or (list(tensors) if len(tensors) == 1 else [])
    return tensors[named[0]] if named else output


def described(output: Any) -> str:
    """The type of what a block returned, with its entries."""
    entries = dict(enumerate(output)) if isinstance(output, (tuple, list)) else _entries(output)
    if not isinstance(entries, Mapping):
        return type(output).__name__
    parts = (f"{name}: {tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for name, v in entries.items())
    return f"{type(output).__name__}({', '.join(parts)})"


def _entries(output: Any) -> Any:
    return vars(output) if is_dataclass(output) and not isinstance(output, (type, Mapping)) else output
