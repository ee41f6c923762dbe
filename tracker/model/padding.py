"""Padding that no `attention_mask` states: read from the masks of the recorded pass, and confirmed by running the blocks again.

A position is padding if no other position attends to it, and it does not attend to itself or attends to nothing else. So a causal
mask has no padding: its last position, to which no other attends, attends to others and to itself. Where a causal mask lets it
attend to itself alone, as the first token of a chunk or of a packed document, it is a token too.

The masks are those of the first block's own attention. Where that is not intercepted, every argument of the block and of the
model that may be a mask is tried. A reading counts if other states at its positions change no other position's state after the
last block. That of an argument also needs another token whose state does change others' so: what is behind the last token of a
causal model changes nothing. Cost: two or three runs of the blocks where a mask has such positions, else none.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tracker.common.errors import warn_caller
from tracker.linalg.precision import TOLERANCE, relative_error
from tracker.model.attention import OriginalAttention, intercept_attention
from tracker.model.inputs import Batch
from tracker.model.random_numbers import noise_like
from tracker.model.recording import Recording

# Values of a mask from which on it hides: minus infinity, the least number, or -10000 in older models
HIDDEN = -1e4
# In the names of masks of what a decoder reads
OTHER_MASKS = ("memory", "cross", "encoder", "context")
REMEDY = "give samples of one length, without padding, or the positions to measure, such as tokens=[0, 1]"


def read_padding(recording: Recording, batch: Batch) -> tuple[Bool[Tensor, "B n"] | None, str]:
    """Return which positions are not padding, and the mask that says so; (None, "") if no padding was found.

    Warns of positions that a mask hides but that are not confirmed to be padding.

    Args:
        recording: the recorded pass, its last block without the final norm.
        batch: the forward call.
    """
    first, blocks = recording.calls[0], _Blocks(recording)
    B, n, _ = first.x.shape
    own = [
        (i, a.mask)
        for i, a in enumerate(first.attention)
        if a.key.dim() == 4 and a.key.shape[-2] == n
    ]
    if not own or not all(
        mask is None or _as_attention_mask(mask, B, n) is not None for _, mask in own
    ):
        return _from_arguments(recording, batch, blocks)
    for i, mask in own:
        visible = None if mask is None else _as_attention_mask(mask, B, n)
        if visible is None:
            continue
        padding = _hidden_positions(visible if visible.dtype == torch.bool else visible > HIDDEN)
        if not padding.any() or not blocks.state_gives_keys_alone(i):
            continue
        if blocks.confirm(padding):
            return ~padding.cpu(), f"the mask of the attention in {first.name}"
        warn_caller(
            f"the mask of the attention in {first.name} hides positions from all others, as it would hide padding, but their "
            f"states change those of others, so that they are measured as tokens. If they are padding, {REMEDY}"
        )
    return None, ""


def _from_arguments(
    recording: Recording, batch: Batch, blocks: "_Blocks"
) -> tuple[Bool[Tensor, "B n"] | None, str]:
    """Do the same from arguments of the first block and of the model."""
    first = recording.calls[0]
    B, n, _ = first.x.shape
    bound = (
        inspect.signature(first.replica.module.forward)
        .bind(*batch.arguments, **batch.keywords)
        .arguments
    )
    arguments = {**first.arguments.arguments}
    # Blocks named by boundaries have no argument of that name.
    arguments.pop(first.state, None)
    masks = []
    for name, value in [*arguments.items(), *bound.items()]:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.dim() > 1:
                masks.append((name, leaf))
    for name, mask in masks:
        for visible in _readings(mask, B, n):
            padding = _hidden_positions(visible.to(blocks.x.device))
            if padding.any() and blocks.confirm(padding) and blocks.depend_on_tokens(padding):
                return ~padding.cpu(), f"the argument {name}"
    for name, mask in masks:
        readable = _as_padding_mask(mask, B, n) is not None
        if _is_named_padding(name, readable) and len(mask) == B and _marks_positions(mask):
            warn_caller(
                f"{name} {tuple(mask.shape)} marks positions, but which of the blocks' {n} tokens are padding can't be read from "
                f"it, so that all are measured as tokens. If some are padding, {REMEDY}"
            )
            break
    return None, ""


@dataclass
class _Blocks:
    """The recorded blocks, run again on other states."""

    recording: Recording

    def __post_init__(self) -> None:
        replica = self.recording.calls[0].replica
        self.x = self.recording.calls[0].x.to(replica.device, replica.dtype)
        self.plain: Float[Tensor, "B n d"] | None = None

    def state_gives_keys_alone(self, i: int) -> bool:
        """Whether attention i of the first block takes its keys from the state, and its mask does not change with it.

        Neither does a mask of a memory of the same length state padding, nor one that sparse attention computes from the state.
        """
        call, masks = self.recording.calls[0], []

        def collect(attention: OriginalAttention) -> Any:
            masks.append((attention.key, attention.mask))
            return attention()

        with call.replica.materialize(call.block), intercept_attention(collect):
            for x in (self.x, self.x + noise_like(self.x)):
                call.on_device()(x)
        (keys, mask), (other_keys, other_mask) = masks[i], masks[len(masks) // 2 + i]
        return (
            keys.shape == other_keys.shape
            and not torch.equal(keys, other_keys)
            and torch.equal(mask, other_mask)
        )

    def confirm(self, rows: Bool[Tensor, "B n"]) -> bool:
        """Whether other states at these rows leave the states of the other rows after the last block as they are."""
        before, after, x = self.run(None)[~rows], self.run(rows)[~rows], self.x[~rows]
        dtype = self.x.dtype
        return bool(relative_error(after - x, before - x, before, dtype) <= TOLERANCE[dtype])

    def depend_on_tokens(self, padding: Bool[Tensor, "B n"]) -> bool:
        """Whether the last token before padding, or the first after it, changes another token, in every sample with padding."""
        tokens, positions = ~padding, torch.arange(padding.shape[1], device=padding.device)
        last = (positions * tokens).amax(1)
        at_end = (padding & (positions > last[:, None])).any(1)
        at = torch.where(at_end, last, tokens.int().argmax(1))
        rows = (positions == at[:, None]) & padding.any(1, keepdim=True)
        changed = (self.run(rows) != self.run(None)).any(-1) & tokens & ~rows
        return bool((changed.any(1) | ~padding.any(1)).all())

    def run(self, rows: Bool[Tensor, "B n"] | None) -> Float[Tensor, "B n d"]:
        """Return the states after the last block, with noise on the first states at these rows."""
        if rows is None and self.plain is not None:
            return self.plain
        x = self.x
        if rows is not None:
            x = torch.where(rows[..., None], x + noise_like(x), x)
        for recorded in self.recording.calls:
            call = recorded.on_device()
            with call.replica.materialize(call.block):
                x = call(x)
        if rows is None:
            self.plain = x
        return x


def _hidden_positions(visible: Bool[Tensor, "B n n"]) -> Bool[Tensor, "B n"]:
    """Return the keys that are hidden from all other queries, and whose own query sees nothing else or not even itself.

    No key of a sample in which nothing would be left.
    """
    itself = visible.diagonal(dim1=1, dim2=2)
    others = visible & ~torch.eye(visible.shape[1], dtype=torch.bool, device=visible.device)
    hidden = ~others.any(1) & ~(itself & others.any(2))
    causal = ~visible.triu(1).any((1, 2))
    hidden[:, -1] &= ~(itself[:, -1] & causal)  # no later position could attend to it
    return hidden & (itself & ~hidden).any(1, keepdim=True)


def _as_attention_mask(mask: Any, B: int, n: int) -> Tensor | None:
    """Return a mask of attention as (B, n, n), the largest value over the heads; None if it has another shape.

    Shapes as in `scaled_dot_product_attention`; also (B, n), a mask of the keys.
    """
    if not isinstance(mask, Tensor) or mask.dim() > 4:
        return None
    if mask.shape == (B, n) and B != n:
        mask = mask[:, None, None]
    mask = mask[(None,) * (4 - mask.dim())]
    fits = mask.shape[0] in (1, B) and mask.shape[2] in (1, n) and mask.shape[3] == n
    return mask.amax(1).expand(B, n, n) if fits else None


def _as_padding_mask(mask: Tensor, B: int, n: int) -> Tensor | None:
    """Return an argument (B, n), (B, 1 or n, n) or (1 or B, H, 1 or n, n) as (B, n, n); None if it has another shape."""
    if mask.dim() == 2:
        return mask[:, None].expand(B, n, n) if mask.shape == (B, n) else None
    return _as_attention_mask(mask[:, None] if mask.dim() == 3 else mask, B, n)


def _readings(mask: Tensor, B: int, n: int) -> Iterator[Bool[Tensor, "B n n"]]:
    """Yield what a mask may make visible: a Boolean one may mark padding or tokens."""
    entries = _as_padding_mask(mask, B, n)
    if entries is None:
        return
    if _is_binary(mask):
        yield entries == 0
        yield entries != 0
    elif mask.is_floating_point():
        yield entries > HIDDEN


def _is_binary(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


def _marks_positions(mask: Tensor) -> bool:
    """Whether a mask has both values within a sample."""
    if not _is_binary(mask) and not (mask.is_floating_point() and bool((mask <= HIDDEN).any())):
        return False
    marked = (mask != 0).flatten(1)
    return bool((marked.any(1) & ~marked.all(1)).any())


def _is_named_padding(name: str, readable: bool) -> bool:
    """Whether a name is one of a mask of padding: one that was read, and rejected, has to say so."""
    if any(word in name for word in OTHER_MASKS):
        return False
    return "pad" in name or (not readable and "mask" in name)
