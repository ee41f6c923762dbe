"""Token rows, and the parts of a block's arguments and of attention masks that belong to them.

A block restricted to R rows runs as a batch of R sequences of length one. Only arguments with known names are sliced, along
the axis known for that name: an axis of length n need not be the token axis.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tracker.linalg.transfer import to_device
from tracker.model.guard import contains_tensors
from tracker.model.recording import AttentionCall, BlockCall

PER_TOKEN = ("position_embeddings", "position_ids", "cache_position", "shortformer_pos_embed")
MASKS = ("attention_mask", "attn_mask", "src_mask", "mask", "src_key_padding_mask")


class NotSliceable(Exception):
    """The reason that a block can't be restricted to rows, so that the full sequence is used."""


@dataclass(frozen=True)
class Rows:
    """R token rows, each a sample (index into the batch) and a position.

    The numbers are on the CPU, where they decide how rows are grouped; `on` copies them to a device, once.

    `source` is the position whose input the row's output is differentiated with respect to; None: the row's own.
    """

    sample: Int[Tensor, " R"]
    token: Int[Tensor, " R"]
    source: Int[Tensor, " R"] | None = None
    _copies: dict[torch.device, "Rows"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def live(self) -> Int[Tensor, " R"]:
        """The position whose key and value are live, not frozen."""
        return self.token if self.source is None else self.source

    def on(self, device: torch.device) -> "Rows":
        """Return the same rows, to index tensors on a device."""
        if device not in self._copies:
            numbers = [n for n in (self.sample, self.token, self.source) if n is not None]
            self._copies[device] = Rows(*to_device(device, *numbers))
        return self._copies[device]

    def sample_in(self, tensor: Tensor) -> Int[Tensor, " R"]:
        """Return the index of each row's sample along the tensor's first axis, which all samples may share (length 1)."""
        return self.sample if tensor.shape[0] > 1 else torch.zeros_like(self.sample)

    def select(self, X: Float[Tensor, "B n d"]) -> Float[Tensor, "R d"]:
        """Return these rows of a hidden state."""
        at = self.on(X.device)
        return X[at.sample, at.token]

    def select_sources(self, X: Float[Tensor, "B n d"]) -> Float[Tensor, "R d"]:
        """Return the rows of a hidden state that these rows are differentiated with respect to."""
        at = self.on(X.device)
        return X[at.sample, at.live]

    def subset(self, index: Tensor | slice) -> "Rows":
        """Return some of the rows."""
        return Rows(
            self.sample[index],
            self.token[index],
            None if self.source is None else self.source[index],
        )

    def disjoint_groups(self) -> Iterator[tuple[Tensor, "Rows"]]:
        """Split the rows so that no two rows of a group share a sample; yield each group with its indices into the R rows."""
        # The number of earlier rows of the same sample
        order = (self.sample[:, None] == self.sample).tril(-1).sum(1)
        for group in order.unique():
            index = torch.nonzero(order == group).squeeze(-1)
            yield index, self.subset(index)


def slice_argument(name: str, value: Any, call: BlockCall, rows: Rows) -> Any:
    """Restrict an argument of the block to the rows.

    Raises:
        NotSliceable: for tensors in an argument whose name is not known.
    """
    if isinstance(value, dict):  # collected by **kwargs
        return {key: slice_argument(str(key), entry, call, rows) for key, entry in value.items()}
    if not contains_tensors(value):
        return value
    n = call.x.shape[1]
    if name in PER_TOKEN:
        if isinstance(value, (tuple, list)):
            return type(value)(_per_token(name, entry, n, rows) for entry in value)
        return _per_token(name, value, n, rows)
    if name in MASKS and isinstance(value, Tensor) and value.shape[-1] == n:
        # The mask that is used is the recorded attention's; this one only needs the shape for sequences of length one.
        if value.dim() == 4:
            return value[rows.on(value.device).sample_in(value)][..., :1, :1]
        if value.dim() == 2 and (name.endswith("padding_mask") or value.shape[0] != n):
            return value[rows.on(value.device).sample_in(value)][:, :1]
        if value.dim() == 2:
            return value[:1, :1]
    raise _unknown(name)


def concatenate_argument(name: str, parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate one argument of several recordings, each already restricted to its rows.

    Raises:
        NotSliceable: if they differ in more than their rows.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        pass
    elif isinstance(first, dict) and all(part.keys() == first.keys() for part in parts):
        return {
            key: concatenate_argument(str(key), [part[key] for part in parts], sizes)
            for key in first
        }
    elif isinstance(first, (tuple, list)) and all(len(part) == len(first) for part in parts):
        return type(first)(
            concatenate_argument(name, entries, sizes) for entries in zip(*parts, strict=True)
        )
    elif isinstance(first, Tensor):
        by_row = zip(parts, sizes, strict=True)
        if all(part.shape == (size, *first.shape[1:]) for part, size in by_row):
            return torch.cat(list(parts))
        if all(part.shape == first.shape and torch.equal(part, first) for part in parts):
            return first  # no row axis
    elif all(part is first or part == first for part in parts):
        return first
    raise NotSliceable(f"the block's argument {name!r} differs between samples")


def _per_token(name: str, value: Any, n: int, rows: Rows) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) == n:
        if bool((rows.token == rows.token[0]).all()):
            return value[int(rows.token[0])][None]  # no batch axis: the same for all rows
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == n:
        at = rows.on(value.device)
        return value[at.sample_in(value), at.token][:, None]
    raise _unknown(name)


def _unknown(name: str) -> NotSliceable:
    return NotSliceable(f"how the block's argument {name!r} divides into rows is not known")


def mask_rows(past: AttentionCall, at: Rows) -> Tensor | None:
    """Return row t of a recorded attention's mask, (R, H or 1, 1, n): causal if it was causal without a mask."""
    mask, n = past.mask, past.key.shape[-2]
    if mask is not None and not isinstance(mask, Tensor):
        raise NotSliceable(
            f"how its attention mask of type {type(mask).__name__} divides into rows is not known"
        )
    if mask is None and not past.causal:
        return None
    if mask is None:
        keys = torch.arange(n, device=at.token.device)
        return (keys <= at.token[:, None])[:, None, None]
    mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    # A mask with one row is the same for all queries.
    token = at.token if mask.shape[-2] > 1 else torch.zeros_like(at.token)
    return mask[at.sample_in(mask), :, token][:, :, None, :n]
