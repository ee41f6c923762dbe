"""The probe of a training run: one fixed batch that is measured at every chosen step.

The probe is a copy on the CPU of the type that the loader yields (`nested`). A checkpoint contains it as tensors, numbers and
text, so that a resumed run measures the same inputs.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from tracker.capture.inputs import Batch, batches, check_tokenizer
from tracker.errors import UsageError
from tracker.notices import warn_caller
from tracker.provenance import digest
from tracker.training.nested import contents, from_plain, is_texts, leaves, map_leaves, named_parts
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
        loaded: the probe of a checkpoint, as in `nested.to_plain`, or of the sanity check, or None.
        take: returns the batch.

    Raises:
        UsageError: for a checkpoint's probe of a class that this program does not have, unless a probe is given.
    """
    given = given() if callable(given) else given
    given = None if given is None else cpu_copy(given)
    if loaded is None:
        return first_samples(take(), max_samples) if given is None else given
    lost: set[str] = set()
    try:
        loaded = from_plain(loaded, lost)
    except UsageError as error:
        if given is None:
            raise
        warn_caller(f"{error}; the given probe is measured")
        return given
    if given is not None and inputs_digest(given) == inputs_digest(loaded):
        return given
    if given is not None:
        warn_caller("the given probe is not that of the checkpoint; the checkpoint's is measured, as before")
    if lost:
        warn_caller(
            f"a checkpoint can't contain a {', a '.join(sorted(lost))}: None is in its place in the probe; if forward= needs it, "
            "give the samples to measure: probe=..."
        )
    return loaded


def as_first(own: Any, first_digest: str, first: Any) -> Any:
    """Return a rank's own probe if it equals that of the first rank; else that one, given as in `nested.to_plain`."""
    return own if inputs_digest(own) == first_digest else from_plain(first, set())


def inputs_digest(probe: Any) -> str:
    """Return the hash of a probe that the units of a store have in common."""
    return digest(contents(probe))


def first_samples(batch: Any, count: int) -> Any:
    """Copy the first samples of a batch."""
    return cpu_copy(select_samples(batch, slice(count)))


def cpu_copy(batch: Any) -> Any:
    """Copy a batch to the CPU; its tensors, arrays and lists share no memory with it."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to("cpu", copy=True)
        return leaf.copy() if isinstance(leaf, (np.ndarray, list)) else leaf

    return map_leaves(batch, change)


def sample_count(batch: Any) -> int:
    """Return the number of samples: the first axis of the first tensor; without one, of the first array or list of texts.

    Raises:
        UsageError: if there are none.
    """
    found = leaves(batch)
    for kind in (Tensor, np.ndarray, (list, tuple)):
        n = next((_length(leaf) for leaf in found if isinstance(leaf, kind) and _length(leaf) >= 0), 0)
        if n:
            return n
    raise UsageError(
        f"the probe, {type(batch).__name__}, contains no samples; give at least one prompt, or tensors with the batch as first "
        "axis: probe=..."
    )


def select_samples(batch: Any, samples: slice) -> Any:
    """Select samples of a batch: slice every tensor, array and list of texts that is as long as the batch."""
    n = sample_count(batch)
    return map_leaves(batch, lambda leaf: leaf[samples] if _length(leaf) == n else leaf)


def is_prompts(batch: Any) -> bool:
    """Whether a batch is a list of texts."""
    return isinstance(batch, list) and is_texts(batch)


def forward_calls(model: nn.Module, batch: Any, tokenizer: Any) -> list[Batch]:
    """Return the forward calls that measure a batch.

    The model receives a tensor as it is; the first entry of a tuple or list, as the rest are training targets; and
    those entries of a mapping, or attributes of a record, that its forward takes by name, except labels.

    Raises:
        UsageError: if the model's forward takes no entry of the batch.
    """
    named = named_parts(batch)
    if isinstance(model, WithForward):
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        mask = named.get("attention_mask")
        valid = mask.bool() if isinstance(mask, Tensor) else None
        return [Batch((partial(_with_tensors, batch, tensors), *tensors), {}, [""] * sample_count(batch), valid)]
    if isinstance(batch, (tuple, list)) and not is_prompts(batch):
        return forward_calls(model, batch[0], tokenizer)
    if not named:
        return batches(model, batch, tokenizer, None)
    known = inspect.signature(model.forward).parameters
    taken = {name: value for name, value in named.items() if name in known and not name.startswith("label")}
    if not any(isinstance(value, Tensor) for value in taken.values()):
        raise UsageError(
            f"the forward of {type(model).__name__} takes {', '.join(known) or 'nothing'}, and the batch contains "
            f"{', '.join(map(str, named))}; give a function that runs a batch: forward=lambda module, batch: ..."
        )
    return batches(model, taken, None, None)


def _with_tensors(batch: Any, tensors: Sequence[Tensor], changed: Sequence[Tensor]) -> Any:
    """Return the batch with other tensors, such as those on the measuring device, in the places of its own."""
    by_id = {id(tensor): new for tensor, new in zip(tensors, changed, strict=True)}
    return map_leaves(batch, lambda leaf: by_id.get(id(leaf), leaf))


def _length(leaf: Any) -> int:
    """Return the length of a leaf's first axis, -1 if it has none."""
    has_axis = leaf.ndim > 0 if isinstance(leaf, (Tensor, np.ndarray)) else isinstance(leaf, (list, tuple))
    return len(leaf) if has_axis else -1


def interleave(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' parts of a list, of which rank r has entries r, r + ranks, and so on.

    >>> interleave([[0, 3], [1, 4], [2]])
    [0, 1, 2, 3, 4]
    """
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
