"""Forward passes with noise, whose outputs show what a model's output depends on."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tracker.model.hidden_state import bind_arguments, hidden_state, with_hidden_state
from tracker.model.random_numbers import noise_like
from tracker.model.replica import Replica, StopForward

ForwardArguments = tuple[Sequence[Any], Mapping[str, Any]]


def run_with_noise(
    replica: Replica,
    inputs: ForwardArguments,
    noise_at: slice | None = None,
    noisy_parameter: str | None = None,
    until_first_block: bool = False,
) -> Any:
    """Run the model with noise of the size of the values added to the last block's output or to a parameter.

    Parameters outside the blocks that are all zero get other values, the same in every pass: an untrained head of zeros
    (torchvision's) would hide what the blocks return.

    Args:
        replica: a replica made for this pass.
        inputs: arguments of the model's forward.
        noise_at: positions of the last block's output.
        noisy_parameter: the parameter's name.
        until_first_block: whether to return the first block's input (B, n, d) instead of the model's output.
    """
    last, batch_first = replica.blocks[-1], replica.description.batch_first

    def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
        if until_first_block:
            state = next(iter(bind_arguments(block, args, kwargs).arguments.values()))
            raise StopForward(state if batch_first else state.transpose(0, 1))

    def leave(block: nn.Module, args: tuple, output: Any) -> Any:
        if block is not last or noise_at is None:
            return None
        y = hidden_state(output)
        noise = torch.zeros_like(y)
        at = (slice(None), noise_at) if batch_first else (noise_at,)
        noise[at] = noise_like(y)[at]
        return with_hidden_state(output, y + noise)

    with ExitStack() as stack:
        stack.enter_context(replica.stream_blocks(enter, leave))
        inside = {id(part) for block in replica.blocks for part in block.modules()}
        for path, part in replica.module.named_modules():
            parameters = part.__dict__["_parameters"]  # the replica's own, released after this pass
            for name, value in parameters.items() if id(part) not in inside else ():
                if value is None or not value.is_floating_point():
                    continue
                if not value.any():
                    parameters[name] = value + noise_like(value)
                if noisy_parameter == (f"{path}.{name}" if path else name):
                    parameters[name] = parameters[name] + noise_like(value)
        return replica.forward(*inputs)


def differ(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether any pair of tensors differs, or their number."""
    pairs = zip(before, after, strict=False)
    return len(before) != len(after) or any(not torch.equal(a, b) for a, b in pairs)
