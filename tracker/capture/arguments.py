"""The arguments of a block's call, by name."""

import inspect
from collections.abc import Mapping, Sequence
from inspect import BoundArguments, Parameter, Signature
from typing import Any

from torch import nn


def bind_arguments(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Name the arguments of a call of `block`, the hidden state first.

    A wrapper's forward(*args, **kwargs) names none: there, those given by name keep it and the others are numbered.

    >>> bind_arguments(nn.Linear(1, 1), ["x"], {}).arguments
    {'input': 'x'}
    """
    signature = inspect.signature(block.forward)
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        numbered = [Parameter(f"argument_{i}", Parameter.POSITIONAL_ONLY) for i in range(len(args))]
        signature = Signature([*numbered, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs)])
    return signature.bind(*args, **kwargs)
