"""Find the class token of a text encoder: the token that its tokenizer puts at the beginning of a text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tracker.blocks.reachability import differ, run_with_noise
from tracker.common.errors import UsageError
from tracker.model.hidden_state import floating_tensors
from tracker.model.inputs import Batch
from tracker.model.replica import Replica


def require_class_token(replica: Replica, calls: Sequence[Batch]) -> None:
    """Require the class token of a text encoder at position 0, where its tokenizer puts it.

    Without a tokenizer, and if the config states no class token either, position 0 is the class token if the model's pooler,
    or its head for classes, reads it and no other. Call inside `preserve_global_state`.

    Raises:
        UsageError: if a prompt does not begin with a class token, or nothing shows that the inputs do.
    """
    for i, batch in enumerate(calls):
        reason = _why_no_class_token(batch, i, replica)
        if reason:
            raise UsageError(
                f"tokens='cls', but {reason}; choose 'last', 'all' or indices such as [0]"
            )
        if batch.special.first is None:
            break  # what the model reads is the same in every call


def _why_no_class_token(batch: Batch, i: int, replica: Replica) -> str:
    """Return why position 0 is not known to be a class token; "" if it is."""
    if batch.ids is not None and batch.special.first is not None:
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
    if batch.token_texts:
        return "the tokenizer has no class token (cls_token_id)"
    if batch.valid is not None and not batch.valid[:, 0].all():
        return "a sample begins with padding, and no tokenizer or config states a class token"
    if not reads_first_position_alone(replica, batch):
        return "the model has no class token: no pooler or classifier reads position 0 alone, and no config states one"
    return ""


def reads_first_position_alone(replica: Replica, batch: Batch) -> bool:
    """Whether the outputs with one vector per sample (a pooler's, or logits of classes) depend on position 0 alone.

    It is then the class token, whatever reads it. Blocks between boundaries are not examined. Cost: up to three forward passes.
    """
    if replica.description.spans:
        return False
    first = batch.of_first_sample()

    def per_sample(noise_at: slice | None) -> list[Tensor]:
        outputs = floating_tensors(run_with_noise(replica, first, noise_at=noise_at))
        return [value for value in outputs if value.dim() == 2]

    # Noise at position 0, and at all others
    plain, at_first, elsewhere = map(per_sample, (None, slice(0, 1), slice(1, None)))
    return bool(plain) and differ(plain, at_first) and not differ(plain, elsewhere)
