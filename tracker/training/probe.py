"""The probe of a training run: one fixed batch that is measured at every chosen step.

The probe is kept on the CPU as tensors, numbers and text in tuples, lists and dictionaries, so that a checkpoint can
contain it and a resumed run measures the same inputs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from tracker.capture import inputs
from tracker.capture.inputs import Batch, batches, check_tokenizer
from tracker.errors import UsageError
from tracker.notices import warn_caller
from tracker.provenance import digest
from tracker.training.target import Forward, WithForward


def check(probe: Any, tokenizer: Any, forward: Forward | None) -> Any:
    """Check a probe against the other arguments of the callback; return it, a single prompt as a list.

    Raises:
        UsageError: for prompts without a tokenizer or with a forward function, and for a tokenizer that can't be called.
    """
    check_tokenizer(tokenizer)
    probe = [probe] if isinstance(probe, str) else probe
    if is_prompts(probe) and tokenizer is None:
        raise UsageError("the probe is prompts; give their tokenizer too: tokenizer=...")
    if is_prompts(probe) and forward is not None:
        raise UsageError("the probe is prompts, which are passed to the language model itself; leave forward= out")
    return probe


def resolve(given: Any, loaded: Any, take: Callable[[], Any], max_samples: int) -> Any:
    """Return the probe of a checkpoint, else the given one, else the first samples of a batch.

    Args:
        given: the probe passed to the callback, a function that returns it, or None.
        loaded: the probe of a checkpoint or of the sanity check, or None.
        take: returns the batch.
    """
    given = given() if callable(given) else given
    given = None if given is None else cpu_copy(given)
    if loaded is None:
        return first_samples(take(), max_samples) if given is None else given
    if given is not None and digest(given) != digest(loaded):
        warn_caller("the given probe is not that of the checkpoint; the checkpoint's is measured, as before")
    return loaded


def first_samples(batch: Any, count: int) -> Any:
    """Copy the first samples of a batch."""
    return cpu_copy(select_samples(batch, slice(count)))


def cpu_copy(batch: Any) -> Any:
    """Copy a batch to the CPU; the copy shares no memory with it.

    Raises:
        UsageError: if it contains something other than tensors, numbers and text.
    """
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        return {name: cpu_copy(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return (list if isinstance(batch, list) else tuple)(cpu_copy(value) for value in batch)
    if batch is None or isinstance(batch, (str, int, float)):
        return batch
    raise UsageError(
        f"the batch contains a {type(batch).__name__}, which can't be part of a probe; give tensors: probe=, a tensor, a "
        "mapping, or prompts with their tokenizer"
    )


def sample_count(batch: Any) -> int:
    """Return the number of samples: of prompts, or the first axis of the first tensor.

    Raises:
        UsageError: if there are none.
    """
    if is_prompts(batch):
        return len(batch)
    n = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if not n:
        raise UsageError(
            "the probe contains no samples; give at least one prompt, or tensors with the batch as first axis"
        )
    return n


def select_samples(batch: Any, samples: slice) -> Any:
    """Select samples of a batch: slice every tensor whose first axis is as long as the batch."""
    n = sample_count(batch)
    if is_prompts(batch):
        return batch[samples]
    return inputs.select_samples(batch, samples, n)


def is_prompts(batch: Any) -> bool:
    """Whether a batch is a list of texts."""
    return isinstance(batch, list) and bool(batch) and all(isinstance(entry, str) for entry in batch)


def forward_calls(model: nn.Module, batch: Any, tokenizer: Any) -> list[Batch]:
    """Return the forward calls that measure a batch.

    The model receives a tensor as it is; the first entry of a tuple or list, as the rest are training targets; and
    those entries of a mapping that its forward takes by name, except labels.

    Raises:
        UsageError: if the model's forward takes no entry of the batch.
    """
    if isinstance(model, WithForward):
        leaves, structure = tree_flatten(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return [Batch((structure, *leaves), {}, [""] * sample_count(batch), None if mask is None else mask.bool())]
    if isinstance(batch, (tuple, list)) and not is_prompts(batch):
        return forward_calls(model, batch[0], tokenizer)
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        taken = {name: value for name, value in batch.items() if name in known and not name.startswith("label")}
        if not any(isinstance(value, Tensor) for value in taken.values()):
            raise UsageError(
                f"the forward of {type(model).__name__} takes {', '.join(known) or 'nothing'}, and the batch contains "
                f"{', '.join(map(str, batch))}; give a function that runs a batch: forward=lambda module, batch: ..."
            )
        return batches(model, taken, None, None)
    return batches(model, batch, tokenizer, None)


def interleave(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' parts of a list, of which rank r has entries r, r + ranks, and so on.

    >>> interleave([[0, 3], [1, 4], [2]])
    [0, 1, 2, 3, 4]
    """
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
