"""Check that the blocks and the class token that were assumed reach the model's output.

Two passes that differ in the last block's output alone, with noise added at the class token's position or at all positions, must
give different model outputs. Two passes that differ in the class token's parameter alone must differ in the first block's input
at the class token's position and nowhere else. Cost: two or three forward passes of one sample once per measurement, and two up
to the first block for a class token; none if nothing was assumed (`Blocks.assumed`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.candidates import proposals, related, runs_with_attention
from tracker.common.errors import UsageError
from tracker.model.hidden_state import (
    bind_arguments,
    floating_tensors,
    hidden_state,
    named_values,
    with_hidden_state,
)
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound
from tracker.model.random_numbers import noise_like
from tracker.model.replica import Replica, StopForward

REMEDY = "Choose the tokens to measure: tokens='last', 'all', or positions such as [0, 1]"


def check_reachability(replica: Replica, batch: Batch, class_token_by_default: bool) -> None:
    """Check the assumptions on the first sample. Call inside `preserve_global_state`, after the inputs were recorded.

    Args:
        replica: of the model, with its blocks and what was assumed of them.
        batch: the inputs.
        class_token_by_default: whether the class token is measured because the model has one, not because the caller chose it.

    Raises:
        UsageError: if the output does not depend on the last block, or not on the class token in it, or has no floating tensor.
    """
    blocks, first = replica.description, batch.of_first_sample()
    token = blocks.class_token if class_token_by_default and blocks.class_token_parameter else None
    if token is not None:
        _check_class_token_position(replica, first, token)
    elif "blocks" not in blocks.assumed:
        return
    plain = run_with_noise(replica, first)
    if not floating_tensors(plain):
        stated = [f"blocks={list(blocks.names)}"] if "blocks" in blocks.assumed else []
        stated += ["tokens='cls'"] if token is not None else []
        raise UsageError(
            f"{type(replica.module).__name__} returns a {type(plain).__name__} without a floating tensor, so that nothing shows "
            f"whether its last block, {blocks.names[-1]}, reaches its output; measure a model, or a part of it, that returns "
            f"what it computes, or say what to measure: {', '.join(stated)}"
        )
    # The token alone first: where it reaches the output, so do the blocks.
    if token is not None:  # an assumed token never counts from the end
        noisy = run_with_noise(replica, first, noise_at=slice(token, token + 1))
        if differ(_predictions(plain), _predictions(noisy)):
            return
    noisy = run_with_noise(replica, first, noise_at=slice(None))
    if not differ(floating_tensors(plain), floating_tensors(noisy)):
        runs = runs_with_attention(replica.module)
        others = [run for run in runs if not related(run, blocks.names)]
        raise BlocksNotFound(
            f"nothing that {type(replica.module).__name__} returns depends on its last block, {blocks.names[-1]} "
            f"({blocks.found_by}): name blocks that reach its output.",
            proposals(replica.module, others),
        )
    if token is not None:
        raise UsageError(
            f"{type(replica.module).__name__} has a class token, but its output does not depend on it (position {token} "
            f"after {blocks.names[-1]}). {REMEDY}"
        )


def _check_class_token_position(replica: Replica, batch: Batch, token: int) -> None:
    """Raise UsageError if the class token's parameter does not enter the first block at this position, and there alone."""
    parameter = replica.description.class_token_parameter
    before, after = (
        run_with_noise(replica, batch, noisy_parameter=name, until_first_block=True)
        for name in (None, parameter)
    )
    changed = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
    if changed != [token]:
        where = "at no position" if not changed else f"at position {', '.join(map(str, changed))}"
        alone = len(changed) == 1
        other = f"; or blocks=find_blocks(model, class_token={changed[0]})" if alone else ""
        raise UsageError(
            f"the class token {parameter} enters the first block {where}, not at {token} alone. {REMEDY}{other}"
        )


def run_with_noise(
    replica: Replica,
    batch: Batch,
    noise_at: slice | None = None,
    noisy_parameter: str | None = None,
    until_first_block: bool = False,
) -> Any:
    """Run a fresh replica with noise of the size of the values added to the last block's output or to a parameter.

    Parameters outside the blocks that are all zero get other values, the same in every pass: an untrained head of zeros
    (torchvision's) would hide what the blocks return.

    Args:
        replica: of the model; what the pass writes does not reach it.
        batch: the forward call.
        noise_at: positions of the last block's output.
        noisy_parameter: the parameter's name.
        until_first_block: whether to return the first block's input (B, n, d) instead of the model's output.
    """
    replica = replica.fresh()

    def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
        if until_first_block:
            state = next(iter(bind_arguments(block, args, kwargs).arguments.values()))
            raise StopForward(replica.oriented(state))

    def leave(block: nn.Module, args: tuple, output: Any) -> Any:
        if block is not replica.blocks[-1] or noise_at is None:
            return None
        y = hidden_state(output)
        noise = torch.zeros_like(y)
        replica.oriented(noise)[:, noise_at] = replica.oriented(noise_like(y))[:, noise_at]
        return with_hidden_state(output, y + noise)

    with replica.stream_blocks(enter, leave):
        inside = {id(part) for block in replica.blocks for part in block.modules()}
        replica.fill_zeros(part for part in replica.module.modules() if id(part) not in inside)
        if noisy_parameter is not None:
            path, _, name = noisy_parameter.rpartition(".")
            parameters = replica.module.get_submodule(path).__dict__["_parameters"]
            parameters[name] = parameters[name] + noise_like(parameters[name])
        return replica.forward(batch.arguments, batch.keywords)


def _predictions(output: Any) -> list[Tensor]:
    """Return the logits; without logits, the outputs with one vector per sample; without those, all floating outputs."""
    named = named_values(output)
    logits = named.get("logits") if isinstance(named, Mapping) else None
    if isinstance(logits, Tensor):
        return [logits]
    values = floating_tensors(output)
    return [value for value in values if value.dim() == 2] or values


def differ(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether any pair of tensors differs, or their number."""
    return len(before) != len(after) or not all(map(torch.equal, before, after))
