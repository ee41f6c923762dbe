"""The probe of a training run: one fixed batch, measured again at every chosen step.

It is kept on the CPU as plain tensors, numbers and text in tuples, lists and dictionaries, so that a checkpoint can
carry it and a resumed run measures the same inputs.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tracker.capture.inputs import Batch, batches
from tracker.errors import UsageError
from tracker.training.target import WithForward


def plain(batch: Any) -> Any:
    """A copy of a batch that shares nothing with it, on the CPU.

    Raises:
        UsageError: if it holds something other than tensors, numbers and text.
    """
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return (list if isinstance(batch, list) else tuple)(plain(value) for value in batch)
    if batch is None or isinstance(batch, (str, int, float)):
        return batch
    raise UsageError(
        f"the batch holds a {type(batch).__name__}, which a probe can't keep; give tensors: probe=, a tensor, a mapping, "
        "or prompts with their tokenizer"
    )


def size(batch: Any) -> int:
    """The number of samples: of prompts, or the first axis of the first tensor.

    Raises:
        UsageError: if there are none.
    """
    if is_prompts(batch):
        return len(batch)
    n = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if not n:
        raise UsageError(
            "the probe holds no samples; give at least one prompt, or tensors with the batch as first axis"
        )
    return n


def select(batch: Any, samples: slice) -> Any:
    """Some of a batch's samples: of whatever is as long as the batch, only these."""
    n = size(batch)
    if is_prompts(batch):
        return batch[samples]
    return tree_map(
        lambda leaf: leaf[samples] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n else leaf, batch
    )


def is_prompts(batch: Any) -> bool:
    """Whether a batch is a list of texts."""
    return isinstance(batch, list) and bool(batch) and all(isinstance(entry, str) for entry in batch)


def calls(model: nn.Module, batch: Any, tokenizer: Any) -> list[Batch]:
    """The forward calls that measure a batch.

    A tensor is handed to `model` as it is; of a tuple or list its first entry, the rest being targets; of a mapping
    what the model's forward takes by name, but for labels.

    Raises:
        UsageError: if the model's forward takes nothing of the batch.
    """
    if isinstance(model, WithForward):
        leaves, structure = tree_flatten(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return [Batch((structure, *leaves), {}, [""] * size(batch), None if mask is None else mask.bool())]
    if isinstance(batch, (tuple, list)) and not is_prompts(batch):
        return calls(model, batch[0], tokenizer)
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        taken = {name: value for name, value in batch.items() if name in known and not name.startswith("label")}
        if not any(isinstance(value, Tensor) for value in taken.values()):
            raise UsageError(
                f"the forward of {type(model).__name__} takes {', '.join(known) or 'nothing'}, and the batch holds "
                f"{', '.join(map(str, batch))}; say how it is run: forward=lambda module, batch: ..."
            )
        return batches(model, taken, None, None)
    return batches(model, batch, tokenizer, None)


def in_order(parts: list[list[Any]]) -> list[Any]:
    """What the ranks measured of their shares, in the order of the samples."""
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
