"""The tokens of each sample that are measured.

The tokens that end a text ([SEP] of BERT) stand for no word, but in a text encoder they are what a tokenizer puts last. So in a
model whose tokens attend to later ones, the last token of a sample is the last one that is not a separator, class or end token.
Causal models predict from their last token, whatever it is, and keep it.
"""

from collections.abc import Sequence

import torch

from tracker.common.errors import UsageError
from tracker.model.inputs import Batch
from tracker.model.recording import BlockCall, Recording

# Attribute `tokens` of results in which special tokens at the end are left out
LAST_WORD = "last non-special"


def chosen_positions(
    tokens: str | tuple[int, ...],
    recording: Recording,
    batch: Batch,
    valid: Sequence[list[int]],
) -> tuple[list[list[int]], str]:
    """Return the positions to measure in each sample, and the convention in words: the attribute `tokens`.

    Args:
        valid: the positions of each sample that are not padding.
    """
    if tokens == "last" and (words := _without_special_ends(recording.calls[0], batch, valid)):
        return [at[-1:] for at in words], LAST_WORD
    stated = tokens if isinstance(tokens, str) else ", ".join(map(str, tokens))
    class_token = recording.calls[0].replica.description.class_token
    return [
        positions(tokens, at, class_token) for at in valid
    ], "last" if stated == "-1" else stated


def _without_special_ends(
    call: BlockCall, batch: Batch, valid: Sequence[list[int]]
) -> list[list[int]] | None:
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
    shortened = [
        (b, len(inner))
        for b, (inner, at) in enumerate(zip(words, valid, strict=True))
        if len(inner) < len(at)
    ]
    if not shortened:
        return None
    # One sample tells of the block.
    b, count = shortened[0]
    return words if _attends_to_later(call, b, valid[b][:count], valid[b][count]) else None


def _attends_to_later(call: BlockCall, b: int, before: list[int], later: int) -> bool:
    """Whether a block's outputs at the positions before `later` in sample b depend on its input there."""
    replica = call.replica
    call = call.on_device()
    noisy = call.x.clone()
    # Another state of the same size, which no norm maps to the same values
    noisy[b, later] = -noisy[b, later].roll(1)
    with replica.materialize(call.block), replica.materialize(call.final_norm):
        plain, changed = (call(x)[b, before] for x in (call.x, noisy))
    return not torch.equal(plain, changed)


def positions(tokens: str | Sequence[int], valid: list[int], class_token: int | None) -> list[int]:
    """Return the positions of one sample that `tokens` selects.

    Args:
        tokens: "last", "cls", "all", or indices into the valid positions, as `values.TOKENS` converts them.
        valid: the positions that are not padding.
        class_token: the class token's index, which "cls" needs.

    Raises:
        UsageError: for an index out of range.
    """
    n = len(valid)
    if tokens == "last":
        return valid[-1:]
    if tokens == "all":
        return valid
    if isinstance(tokens, str):
        assert class_token is not None  # `prepare` requires it
        if not -n <= class_token < n:
            raise UsageError(
                f"class_token={class_token}, but the shortest sample has {n} tokens; give its index: "
                "blocks=find_blocks(model, class_token=...)"
            )
        return [valid[class_token]]
    outside = [t for t in tokens if not -n <= t < n]
    if outside:
        raise UsageError(
            f"token indices {outside} are out of range: the shortest sample has {n} tokens, 0 to {n - 1}"
        )
    return [valid[t] for t in tokens]
