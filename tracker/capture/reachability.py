"""Check by forward passes what `find_blocks` assumed: that the blocks, and the class token, reach the model's output.

Two passes that differ in the last block's output alone, with noise added at the class token's position or at all positions,
must give different model outputs. Two passes that differ in the class token's parameter alone must differ in the first
block's input at the class token's position and nowhere else. Cost: two or three forward passes of one sample once per
measurement, and two up to the first block; none if nothing was assumed (`Blocks.assumed`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tracker.blocks.find import Blocks
from tracker.blocks.proposals import BlocksNotFound
from tracker.blocks.towers import class_token_parameter, find_runs, proposals, related
from tracker.capture.arguments import bind_arguments
from tracker.capture.inputs import Batch
from tracker.capture.noise import noise_like
from tracker.capture.outputs import hidden_state, with_hidden_state
from tracker.capture.replicas.replica import Replica, StopForward
from tracker.errors import UsageError

ForwardArguments = tuple[Sequence[Any], Mapping[str, Any]]

REMEDY = "Choose the tokens to measure: tokens='last', 'all', or positions such as [0, 1]"


def check_reachability(
    found: Blocks,
    new_replica: Callable[[], Replica],
    batch: Batch,
    class_token_by_default: bool,
) -> None:
    """Check the assumptions on the first sample. Call inside `preserve_global_state`, after the inputs were recorded.

    Args:
        found: the blocks and what was assumed about them.
        new_replica: makes the replica for one pass: what a pass writes must not reach another one.
        batch: the inputs.
        class_token_by_default: whether the class token is measured because the model has one, not because the caller chose it.

    Raises:
        UsageError: if the output does not depend on the last block, or not on the class token in it.
    """
    first = batch.of_first_sample()
    inputs = (first.arguments, first.keywords)
    token = found.class_token if class_token_by_default and "class token" in found.assumed else None
    if token is not None:
        _check_class_token_position(found, new_replica, inputs, token)
    elif "blocks" not in found.assumed:
        return
    replica = new_replica()
    plain = _run(replica, inputs)
    if token is not None:  # an assumed token never counts from the end
        noisy = _run(new_replica(), inputs, noise_at=slice(token, token + 1))
        if _differ(_predictions(plain), _predictions(noisy)):
            return
    if not _differ(_floating(plain), _floating(_run(new_replica(), inputs, noise_at=slice(None)))):
        others = [run for run in find_runs(replica.module) if not related(run, found.names)]
        raise BlocksNotFound(
            f"nothing that {type(replica.module).__name__} returns depends on its last block, {found.names[-1]} "
            f"({found.found_by}): name blocks that reach its output.",
            proposals(replica.module, others),
        )
    if token is not None:
        raise UsageError(
            f"{type(replica.module).__name__} has a class token, but its output does not depend on it (position {token} "
            f"after {found.names[-1]}). {REMEDY}"
        )


def reads_first_position_alone(new_replica: Callable[[], Replica], batch: Batch) -> bool:
    """Whether the outputs with one vector per sample (a pooler's, or logits of classes) depend on position 0 alone.

    It is then the class token, whatever reads it. Blocks between boundaries are not examined. Cost: up to three forward passes.
    """
    replica, first = new_replica(), batch.of_first_sample()
    if replica.description.spans:
        return False
    inputs = (first.arguments, first.keywords)
    plain, at_first, elsewhere = (
        [value for value in _floating(_run(one, inputs, noise_at=at)) if value.dim() == 2]
        for one, at in ((replica, None), (new_replica(), slice(0, 1)), (new_replica(), slice(1, None)))
    )
    return bool(plain) and _differ(plain, at_first) and not _differ(plain, elsewhere)


def _check_class_token_position(
    found: Blocks, new_replica: Callable[[], Replica], inputs: ForwardArguments, token: int
) -> None:
    model = new_replica().module
    parameter = class_token_parameter(model, found.names, find_runs(model))
    if parameter is None:
        return
    before, after = (
        _run(new_replica(), inputs, noisy_parameter=name, until_first_block=True) for name in (None, parameter)
    )
    changed = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
    if changed != [token]:
        where = "at no position" if not changed else f"at position {', '.join(map(str, changed))}"
        raise UsageError(
            f"the class token {parameter} enters the first block {where}, not at {token} alone. {REMEDY}"
            + (f"; or blocks=find_blocks(model, class_token={changed[0]})" if len(changed) == 1 else "")
        )


def _run(
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


def _floating(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _predictions(output: Any) -> list[Tensor]:
    """Return the logits; without logits, the outputs with one vector per sample; without those, all floating outputs."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(logits, Tensor):
        return [logits]
    values = _floating(output)
    return [value for value in values if value.dim() == 2] or values


def _differ(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether any pair of tensors differs; True if there is nothing to compare."""
    pairs = zip(before, after, strict=False)
    return not before or len(before) != len(after) or any(not torch.equal(a, b) for a, b in pairs)
