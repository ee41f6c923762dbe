"""Special tokens of text encoders: the class token at the beginning of a text, and the tokens that end it ([SEP] of BERT).

The rule: in a model whose tokens attend to later ones, the last token of a sample is the last one that is not a separator,
class or end token. These stand for no word, but in such a model they are what a tokenizer puts last. Causal models predict
from their last token, whatever it is, and keep it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tracker.blocks.find import Blocks
from tracker.capture.inputs import Batch, positions
from tracker.capture.reachability import reads_first_position_alone
from tracker.capture.recording import BlockCall, Recording
from tracker.capture.replicas.replica import Replica
from tracker.errors import UsageError

LAST_WORD = "last non-special"  # attribute `tokens` of results in which special tokens at the end are left out


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


def chosen_positions(
    tokens: str | tuple[int, ...],
    recording: Recording,
    batch: Batch,
    valid: Sequence[list[int]],
    class_token: int | None,
) -> tuple[list[list[int]], str]:
    """Return the positions to measure in each sample, and the convention in words: the attribute `tokens`.

    Args:
        valid: the positions of each sample that are not padding.
    """
    if tokens == "last" and (words := _without_special_ends(recording.calls[0], batch, valid)):
        return [positions("last", at, None) for at in words], LAST_WORD
    stated = tokens if isinstance(tokens, str) else ", ".join(map(str, tokens))
    return [positions(tokens, at, class_token) for at in valid], "last" if stated == "-1" else stated


def _without_special_ends(call: BlockCall, batch: Batch, valid: Sequence[list[int]]) -> list[list[int]] | None:
    """Return the positions without special tokens at the end; None if there are none, or if the first block is causal.

    A sample of special tokens alone keeps them.
    """
    ids, n = batch.ids, call.x.shape[1]
    if ids is None or ids.shape[1] != n:  # the blocks may take more positions than there are ids
        return None
    words = []
    for row, at in zip(ids.tolist(), valid, strict=True):
        content = [place for place, t in enumerate(at, 1) if row[t] not in batch.special.ends]
        words.append(at[: content[-1]] if content else list(at))
    shortened = [(b, len(some)) for b, (some, at) in enumerate(zip(words, valid, strict=True)) if len(some) < len(at)]
    if not shortened:
        return None
    b, count = shortened[0]
    return words if _attends_to_later(call, b, valid[b][:count], valid[b][count]) else None


def _attends_to_later(call: BlockCall, b: int, before: list[int], later: int) -> bool:
    """Whether a block's outputs at the positions before `later` in sample b depend on its input there."""
    replica = call.replica
    call = call.to(replica.dtype, replica.device)
    noisy = call.x.clone()
    noisy[b, later] = -noisy[b, later].roll(1)
    with replica.materialize(call.block), replica.materialize(call.final_norm):
        plain, changed = (call(x)[b, before] for x in (call.x, noisy))
    return not torch.equal(plain, changed)
