"""Check that the blocks and the class token that were assumed reach the model's output.

Two passes that differ in the last block's output alone, with noise added at the class token's position or at all positions, must
give different model outputs. Cost: two or three forward passes of one sample once per measurement, and two up to the first block
for a class token; none if nothing was assumed (`Blocks.assumed`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tracker.blocks.class_token import REMEDY, check_class_token_position
from tracker.blocks.noise import differ, run_with_noise
from tracker.blocks.towers import find_runs, proposals, related
from tracker.common.errors import UsageError
from tracker.model.description import Blocks
from tracker.model.hidden_state import floating_tensors, named_values
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound
from tracker.model.replica import Replica


def check_reachability(
    blocks: Blocks,
    new_replica: Callable[[], Replica],
    batch: Batch,
    class_token_by_default: bool,
) -> None:
    """Check the assumptions on the first sample. Call inside `preserve_global_state`, after the inputs were recorded.

    Args:
        blocks: the blocks and what was assumed about them.
        new_replica: makes the replica for one pass: what a pass writes must not reach another one.
        batch: the inputs.
        class_token_by_default: whether the class token is measured because the model has one, not because the caller chose it.

    Raises:
        UsageError: if the output does not depend on the last block, or not on the class token in it, or has no floating tensor.
    """
    first = batch.of_first_sample()
    inputs = (first.arguments, first.keywords)
    token = blocks.class_token if class_token_by_default and "class token" in blocks.assumed else None
    if token is not None:
        check_class_token_position(blocks, new_replica, inputs, token)
    elif "blocks" not in blocks.assumed:
        return
    replica = new_replica()
    plain = run_with_noise(replica, inputs)
    if not floating_tensors(plain):
        stated = [f"blocks={list(blocks.names)}"] if "blocks" in blocks.assumed else []
        stated += ["tokens='cls'"] if token is not None else []
        raise UsageError(
            f"{type(replica.module).__name__} returns a {type(plain).__name__} without a floating tensor, so that nothing shows "
            f"whether its last block, {blocks.names[-1]}, reaches its output; measure a model, or a part of it, that returns "
            f"what it computes, or say what to measure: {', '.join(stated)}"
        )
    if token is not None:  # an assumed token never counts from the end
        noisy = run_with_noise(new_replica(), inputs, noise_at=slice(token, token + 1))
        if differ(_predictions(plain), _predictions(noisy)):
            return
    if not differ(
        floating_tensors(plain), floating_tensors(run_with_noise(new_replica(), inputs, noise_at=slice(None)))
    ):
        others = [run for run in find_runs(replica.module) if not related(run, blocks.names)]
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


def _predictions(output: Any) -> list[Tensor]:
    """Return the logits; without logits, the outputs with one vector per sample; without those, all floating outputs."""
    named = named_values(output)
    logits = named.get("logits") if isinstance(named, Mapping) else None
    if isinstance(logits, Tensor):
        return [logits]
    values = floating_tensors(output)
    return [value for value in values if value.dim() == 2] or values
