"""Find the class token of a text encoder: the token that its tokenizer puts at the beginning of a text."""

from collections.abc import Sequence

import torch

from tracker.common.errors import UsageError
from tracker.model.inputs import Batch


def require_class_token(calls: Sequence[Batch]) -> None:
    """Require that every prompt begins with the class token that the tokenizer, or the config, states.

    Raises:
        UsageError: if one does not, or nothing states a class token.
    """
    for i, batch in enumerate(calls):
        if reason := _why_no_class_token(batch, i):
            raise UsageError(
                f"tokens='cls', but {reason}; choose 'last', 'all' or indices such as [0]"
            )


def _why_no_class_token(batch: Batch, i: int) -> str:
    """Return why a prompt does not begin with a class token; "" if it does."""
    if batch.ids is None:
        return "the model has no class token (a parameter such as cls_token), or does not classify from it"
    if batch.token_texts and batch.special.first is None:
        return "the tokenizer has no class token (cls_token_id)"
    if batch.special.first is None:
        return "without prompts and a tokenizer, only a config can state the class token (cls_token_id), and none does"
    valid = (
        torch.ones_like(batch.ids)
        if batch.valid is None
        else batch.valid.to(batch.ids.device).int()
    )
    # Where padding comes first, a text begins after it.
    begins = batch.ids.gather(1, valid.argmax(1, keepdim=True)).flatten().tolist()
    other = next((b for b, token in enumerate(begins) if token != batch.special.first), None)
    if other is None:
        return ""
    sample = f"prompt {i}" if batch.token_texts else f"sample {other}"
    return f"{sample} begins with token {begins[other]}, not with the class token, {batch.special.first}"
