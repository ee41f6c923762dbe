"""Whether a model has a class token, and where.

The class token of an image model is a parameter. Two passes that differ in this parameter alone must differ in the first block's
input at the class token's position and nowhere else.

That of a text encoder is the token that its tokenizer puts at the beginning of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tracker.blocks.noise import ForwardArguments, differ, run_with_noise
from tracker.blocks.towers import class_token_parameter, find_runs
from tracker.common.errors import UsageError
from tracker.model.description import Blocks
from tracker.model.hidden_state import floating_tensors
from tracker.model.inputs import Batch
from tracker.model.replica import Replica

REMEDY = "Choose the tokens to measure: tokens='last', 'all', or positions such as [0, 1]"


def with_class_token(blocks: Blocks, calls: Sequence[Batch], new_replica: Callable[[], Replica]) -> Blocks:
    """Return the blocks with the class token's position; text encoders have it where their tokenizer puts it, at position 0.

    Without a tokenizer, and if the config states no class token either, position 0 is the class token if the model's pooler,
    or its head for classes, reads it and no other. Call inside `preserve_global_state`.

    Raises:
        UsageError: if a prompt does not begin with a class token, or nothing shows that the inputs do.
    """
    if blocks.class_token is not None:
        return blocks
    for i, batch in enumerate(calls):
        reason = _why_no_class_token(batch, i, new_replica)
        if reason:
            raise UsageError(f"tokens='cls', but {reason}; choose 'last', 'all' or indices such as [0]")
        if batch.special.first is None:
            break  # what the model reads is the same in every call
    return replace(blocks, class_token=0)


def _why_no_class_token(batch: Batch, i: int, new_replica: Callable[[], Replica]) -> str:
    """Return why position 0 is not known to be a class token; "" if it is."""
    if batch.ids is not None and batch.special.first is not None:
        valid = torch.ones_like(batch.ids) if batch.valid is None else batch.valid.to(batch.ids.device).int()
        begins = batch.ids.gather(1, valid.argmax(1, keepdim=True)).flatten().tolist()
        other = next((b for b, token in enumerate(begins) if token != batch.special.first), None)
        if other is None:
            return ""
        sample = f"prompt {i}" if batch.token_texts else f"sample {other}"
        return f"{sample} begins with token {begins[other]}, not with the class token, {batch.special.first}"
    if batch.token_texts:
        return "the tokenizer has no class token (cls_token_id)"
    if batch.valid is not None and not batch.valid[:, 0].all():
        return "a sample begins with padding, and no tokenizer or config states a class token"
    if not reads_first_position_alone(new_replica, batch):
        return "the model has no class token: no pooler or classifier reads position 0 alone, and no config states one"
    return ""


def reads_first_position_alone(new_replica: Callable[[], Replica], batch: Batch) -> bool:
    """Whether the outputs with one vector per sample (a pooler's, or logits of classes) depend on position 0 alone.

    It is then the class token, whatever reads it. Blocks between boundaries are not examined. Cost: up to three forward passes.
    """
    replica, first = new_replica(), batch.of_first_sample()
    if replica.description.spans:
        return False
    inputs = (first.arguments, first.keywords)
    plain, at_first, elsewhere = (
        [value for value in floating_tensors(run_with_noise(one, inputs, noise_at=at)) if value.dim() == 2]
        for one, at in ((replica, None), (new_replica(), slice(0, 1)), (new_replica(), slice(1, None)))
    )
    return bool(plain) and differ(plain, at_first) and not differ(plain, elsewhere)


def check_class_token_position(
    blocks: Blocks, new_replica: Callable[[], Replica], inputs: ForwardArguments, token: int
) -> None:
    """Raise UsageError if the class token's parameter does not enter the first block at this position, and there alone."""
    model = new_replica().module
    parameter = class_token_parameter(model, blocks.names, find_runs(model))
    if parameter is None:
        return
    before, after = (
        run_with_noise(new_replica(), inputs, noisy_parameter=name, until_first_block=True)
        for name in (None, parameter)
    )
    changed = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
    if changed != [token]:
        where = "at no position" if not changed else f"at position {', '.join(map(str, changed))}"
        raise UsageError(
            f"the class token {parameter} enters the first block {where}, not at {token} alone. {REMEDY}"
            + (f"; or blocks=find_blocks(model, class_token={changed[0]})" if len(changed) == 1 else "")
        )
