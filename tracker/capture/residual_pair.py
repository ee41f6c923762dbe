"""Blocks that pass their state on as two tensors: block(hidden, residual) -> (hidden, residual).

Blocks with a fused add and norm (mamba-ssm, flash-attn, vLLM) leave the addition to the next block: the hidden state is
x^l = hidden + residual. If a block depends on the sum alone, it is measured with x^l in the first tensor and zero in the
second; any other block is refused.

Blocks with two streams (Flux, SD3: image and text tokens) pass on two states of any shapes, each of which changes in every
block. No single state is the whole one, and they are refused.
"""

from collections.abc import Mapping
from inspect import BoundArguments, Parameter
from typing import Any

import torch
from torch import Tensor

from tracker.blocks.towers import HOW_TO_NAME
from tracker.common.errors import UsageError
from tracker.linalg.transfer import standard_normal


def outputs_like(hidden: Any, output: Any) -> dict[int, Tensor]:
    """Copy the block's outputs that have the hidden state's shape, by index; empty if the hidden state is the only one."""
    if not isinstance(output, (tuple, list)) or not isinstance(hidden, Tensor):
        return {}
    alike = {
        place: value.clone()
        for place, value in enumerate(output)
        if isinstance(value, Tensor) and value.shape == hidden.shape and value.is_floating_point()
    }
    return alike if len(alike) > 1 else {}


def find_pair(
    arguments: BoundArguments, state: str, outputs: Mapping[int, Tensor]
) -> tuple[int, str | None] | tuple[None, None]:
    """Find the second tensor of the state: its index in the previous block's output, and the argument that carries it.

    Args:
        arguments: of this block.
        state: the argument that carries the hidden state.
        outputs: of the previous block, from `outputs_like`.

    Returns:
        (None, None) if the hidden state alone was passed on. The argument is None if the model added both tensors between
        the blocks.
    """
    x, first = arguments.arguments[state], outputs[0]
    for place, other in outputs.items():
        if place == 0 or x.shape != first.shape:
            continue
        if torch.equal(x, first):
            for name, value in _flat(arguments).items():
                if name != state and isinstance(value, Tensor) and value.shape == x.shape and torch.equal(value, other):
                    return place, name
        elif torch.equal(x, first + other):
            return place, None
    return None, None


def check_sum(call: Any) -> None:
    """Check that a recorded block depends on the sum of its two tensors alone.

    Raises:
        UsageError: if another split of the same sum gives another output.
    """
    call = call.to(call.replica.dtype, call.replica.device)  # from a file
    part = standard_normal(call.x.shape, call.x) * call.x.square().mean().sqrt()
    with call.replica.materialize(call.block):
        split, whole = call(call.x - part, second=part), call(call.x)
    tolerance = 1e-9 if call.x.dtype == torch.float64 else 1e-4
    scale = tolerance * float((call.y - call.x).abs().max())
    if not (torch.allclose(split, whole, rtol=0, atol=scale) and torch.allclose(whole, call.y, rtol=0, atol=scale)):
        raise UsageError(
            f"block {call.name} takes and returns two tensors of the hidden state's shape (the second as "
            f"{call.second_argument!r}), but it is no function of their sum alone: they are two streams, with no single hidden "
            f"state to measure. {HOW_TO_NAME}"
        )


def states_in(values: Mapping[Any, Any]) -> dict[Any, Tensor]:
    """Return the entries that may be hidden states: floating tensors of three dimensions."""
    return {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() == 3 and v.is_floating_point()}


def passed_on(arguments: BoundArguments, states: Mapping[int, Tensor]) -> list[int]:
    """Return the indices of the previous block's `states_in` that are among these arguments."""
    inputs = states_in(_flat(arguments)).values()
    return [i for i, y in states.items() if any(v is y or (v.shape == y.shape and torch.equal(v, y)) for v in inputs)]


def two_streams(name: str, *states: Tensor) -> UsageError:
    """Return the error for a block that changes two states."""
    a, b = (tuple(state.shape) for state in states)
    return UsageError(
        f"block {name} takes and returns two hidden states, {a} and {b}, and changes both: the blocks carry two streams, and "
        f"the Jacobian of one leaves out what passes through the other, so there is no single hidden state to measure. "
        f"{HOW_TO_NAME}"
    )


def set_argument(arguments: BoundArguments, name: str, value: Any) -> None:
    """Set an argument, which may be one that the signature collects in **kwargs."""
    if name in arguments.signature.parameters:
        arguments.arguments[name] = value
        return
    collected = next(p.name for p in arguments.signature.parameters.values() if p.kind is Parameter.VAR_KEYWORD)
    arguments.arguments[collected] = {**arguments.arguments.get(collected, {}), name: value}


def get_argument(arguments: BoundArguments, name: str) -> Any:
    """Return an argument's value, or None if it was not given."""
    return _flat(arguments).get(name)


def _flat(arguments: BoundArguments) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in arguments.arguments.items():
        collects = arguments.signature.parameters[name].kind is Parameter.VAR_KEYWORD
        flat |= value if collects else {name: value}
    return flat
