"""The probe of a training run, one fixed batch that is measured at every chosen step, and its target, the part of the training
module that runs on a batch by itself.

The probe is a copy on the CPU of the type that the loader yields. It is taken apart at tuples, lists, dictionaries and records. A
record is a dataclass, a mapping, an object with `.to`, which Lightning moves to a device, or an object that holds tensors or
nothing but plain data. Any other object is kept as it is. A checkpoint contains the probe as tensors, numbers and text, so that a
resumed run measures the same inputs, in the form of the given probe or of a batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure

from tracker.blocks.find import find_blocks
from tracker.common.errors import LIGHTNING, UsageError, warn_caller
from tracker.model.boundaries import Boundary
from tracker.model.description import Blocks, Named
from tracker.model.guard import SCALARS, copy_nested
from tracker.model.huggingface import huggingface_owner
from tracker.model.inputs import Batch, batches, check_tokenizer
from tracker.model.records import ARRAYS, attributes, describe, is_record, is_texts, named_parts
from tracker.model.wrappers import names_by_id, unwrap
from tracker.provenance import digest

Forward = Callable[[nn.Module, Any], Any]
SAMPLES = 8  # measured of a batch, where no probe is given


@dataclass(frozen=True)
class Target:
    """The measured part of a training module, by name, so that it is also found in an averaged copy of the module."""

    part: str  # qualified name within the training module without wrappers
    forward: Forward | None
    blocks: Blocks  # of `model(module)`

    def model(self, module: nn.Module) -> nn.Module:
        """Return the part of the training module, or of a copy of it, that is run."""
        part = unwrap(module).get_submodule(self.part)
        return part if self.forward is None else WithForward(part, self.forward)


class WithForward(nn.Module):
    """A module that a user's function runs on a whole batch: `function(module, batch)`."""

    def __init__(self, module: nn.Module, function: Forward):
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, rebuild: Callable[[Sequence[Tensor]], Any], *tensors: Tensor) -> Any:
        """Rebuild the batch and run the function."""
        return self.function(self.module, rebuild(tensors))


def find_target(
    module: nn.Module, blocks: Named | Blocks | None, forward: Forward | None
) -> Target:
    """Find the part to run: the whole module if `forward` is given; else the Hugging Face model that contains the blocks,
    the module itself if it defines a forward, or its child that contains the blocks.

    Args:
        blocks: as in `find_blocks`, with names as they are in the module.

    Raises:
        UsageError: if no blocks are found, or no part that contains them has a forward.
    """
    whole, module = find_blocks(module, blocks), unwrap(module)
    boundaries = [boundary for span in (*whole.spans, whole.fixed) for boundary in span]
    names = [boundary.module for boundary in boundaries] or whole.names
    named = None if blocks is None else [module.get_submodule(name) for name in names]
    part = ""
    owner = huggingface_owner(module, names[0])
    if forward is None and owner is not None:
        part = next(name for name, other in module.named_modules() if other is owner)
    elif forward is None and not runs(module):
        part = names[0].partition(".")[0]
        if not runs(module.get_submodule(part)):
            raise UsageError(
                f"{type(module).__name__} has no forward of its own, and neither has {part!r}, which contains its blocks: "
                "define forward(self, batch), or give a function that runs a batch: forward=lambda module, batch: ..."
            )
    model = Target(part, forward, whole).model(module)
    if not whole.spans or named is None:
        return Target(part, forward, find_blocks(model, named))
    own = names_by_id(model)
    outside = [name for name, other in zip(names, named, strict=True) if id(other) not in own]
    if outside:
        raise UsageError(
            f"the boundaries at {', '.join(outside)} are outside {part!r}, which runs by itself on a batch; name others, or "
            "give a function that runs the whole module: forward=lambda module, batch: ..."
        )
    renamed = [
        str(Boundary(b.side, own[id(other)])) for b, other in zip(boundaries, named, strict=True)
    ]
    ends = 2 * len(whole.spans)
    spans = list(zip(renamed[:ends:2], renamed[1:ends:2], strict=True))
    return Target(part, forward, find_blocks(model, spans, fixed=renamed[ends:]))


def runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward instead of inheriting the empty one of torch or Lightning."""
    return not type(module).forward.__module__.startswith(("torch.nn.modules.module", *LIGHTNING))


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a batch with `change` applied to every tensor, array, list of texts and object that is not taken apart."""

    def is_leaf(part: Any) -> bool:
        return is_texts(part) or not (isinstance(part, (tuple, list, dict)) or is_record(part))

    return copy_nested(batch, change, {}, is_leaf)


def leaves(batch: Any) -> list[Any]:
    """Return the tensors, arrays, lists of texts and objects that are not taken apart."""
    entries: list[Any] = []

    def keep(leaf: Any) -> Any:
        entries.append(leaf)
        return leaf

    map_leaves(batch, keep)
    return entries


# What is hashed, and what a checkpoint contains.


def contents(batch: Any) -> Any:
    """Return a batch without the types of its parts: tensors, numbers and text in dictionaries and lists. Equal inputs have equal
    contents, and `torch.load` reads them with `weights_only=True`, its default. An object that is kept as it is has None.
    """
    if isinstance(batch, Enum):
        return batch.name
    if isinstance(batch, Tensor):
        return batch.as_subclass(Tensor)
    if isinstance(batch, SCALARS):
        plain: Any = next(kind for kind in SCALARS if isinstance(batch, kind))
        return None if batch is None else plain(batch)
    if isinstance(batch, ARRAYS):
        # As bytes in a tensor, which torch.load reads without running pickled code
        values = np.frombuffer(batch.tobytes(), np.uint8).copy()
        return (
            None
            if batch.dtype.hasobject
            else [batch.dtype.str, list(batch.shape), torch.from_numpy(values)]
        )
    if isinstance(batch, (tuple, list)):
        return [contents(entry) for entry in batch]
    if isinstance(batch, Mapping) or is_record(batch):
        return {f"{name}": contents(entry) for name, entry in named_parts(batch).items()}
    return None  # the text of an object may be its address


def in_form_of(batch: Any, held: Any) -> Any:
    """Return the batch whose `contents` are held, with the types of another batch, and with its objects that have no contents.

    Where the other batch has other parts, what is held is returned as it is.
    """
    if isinstance(batch, Tensor) and isinstance(held, Tensor):
        return held.as_subclass(type(batch))
    if isinstance(batch, Enum) and isinstance(held, str):
        return type(batch).__members__.get(held, held)
    if isinstance(batch, np.generic) and isinstance(held, (str, bytes, float, complex)):
        return type(batch)(held)
    if (
        isinstance(batch, ARRAYS)
        and isinstance(held, list)
        and [type(part) for part in held] == [str, list, Tensor]
    ):
        dtype, shape, values = held
        array = np.frombuffer(values.numpy().tobytes(), dtype).reshape(shape)
        return array.copy() if isinstance(batch, np.ndarray) else array[()]
    if isinstance(batch, (tuple, list)) and isinstance(held, list):
        if is_texts(batch) and is_texts(held):
            return _sequence_like(batch, held)
        if len(batch) == len(held):
            return _sequence_like(
                batch, [in_form_of(*pair) for pair in zip(batch, held, strict=True)]
            )
    named = named_parts(batch)
    if named and isinstance(held, dict) and [f"{name}" for name in named] == list(held):
        return _with_parts(
            batch, {name: in_form_of(entry, held[f"{name}"]) for name, entry in named.items()}
        )
    return batch if held is None and contents(batch) is None else held


def _sequence_like(batch: tuple | list, entries: list[Any]) -> tuple | list:
    if isinstance(batch, tuple):
        return _tuple_like(batch, entries)
    new = copy(batch)
    new[:] = entries
    return new


def _with_parts(batch: Any, parts: Mapping[Any, Any]) -> Any:
    """Copy a mapping or record with other entries or attributes of the same names."""
    new, own = copy(batch), attributes(batch)
    for name, part in parts.items():
        if isinstance(batch, Mapping):
            new[name] = part
        if name in own:
            object.__setattr__(new, name, part)  # of a frozen dataclass as well
    return new


def _tuple_like(batch: tuple, entries: list[Any]) -> tuple:
    return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)


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
        raise UsageError(
            "the probe is prompts, which are passed to the language model itself; leave forward= out"
        )
    return probe


def resolve(
    given: Any, own: Any, held: Any, take: Callable[[], Any], forward: Forward | None
) -> Any:
    """Return the probe measured before, `own` or `held`, else the given one, else the first samples of a batch.

    Args:
        given: the probe passed to the callback, or what the function that was passed returns, or None.
        own: the probe of the sanity check or of an earlier training, or None.
        held: the `contents` of a checkpoint's probe, or None. Their types are those of the given probe, or of a batch.
        take: returns the batch.
    """
    given = None if given is None else cpu_copy(given)
    if own is None and held is None:
        return first_samples(take()) if given is None else given
    if given is not None:
        if inputs_digest(given) == inputs_digest(held if own is None else own):
            return given
        kept = held if own is None else own
        warn_caller(
            f"the given probe, {describe(given)}, is not that of the checkpoint, {describe(kept)}: the checkpoint's is measured, "
            "so that all steps have the same inputs; another probe needs a run and a save_dir of its own"
        )
    if own is not None:
        return own
    # A checkpoint holds tensors, numbers and text; the types around them are those of a batch.
    form = first_samples(take()) if given is None else given
    if forward is not None and tree_structure(contents(form), is_texts) != tree_structure(
        held, is_texts
    ):
        warn_caller(
            "the probe of the checkpoint has other parts than the "
            f"{'first batch' if given is None else 'given probe'}, and is measured without their types; if forward= needs them, "
            "give samples of its form: probe=..."
        )
    return in_form_of(form, held)


def as_first(own: Any, first_digest: str, first: Any) -> Any:
    """Return a rank's own probe if it equals that of the first rank; else that one, given by its `contents`."""
    return own if inputs_digest(own) == first_digest else in_form_of(own, first)


def inputs_digest(probe: Any) -> str:
    """Return the hash of a probe that the units of a store have in common."""
    return digest(contents(probe))


def first_samples(batch: Any, count: int = SAMPLES) -> Any:
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
    entries = leaves(batch)
    for kind in (Tensor, np.ndarray, (list, tuple)):
        n = next(
            (_length(leaf) for leaf in entries if isinstance(leaf, kind) and _length(leaf) >= 0), 0
        )
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
        return [
            Batch(
                (partial(_with_tensors, batch, tensors), *tensors),
                {},
                [""] * sample_count(batch),
                valid,
            )
        ]
    if isinstance(batch, (tuple, list)) and not is_prompts(batch):
        return forward_calls(model, batch[0], tokenizer)
    if not named:
        return batches(model, batch, tokenizer, None)
    known = inspect.signature(model.forward).parameters
    taken = {
        name: value
        for name, value in named.items()
        if name in known and not name.startswith("label")
    }
    if not any(isinstance(value, Tensor) for value in taken.values()):
        raise UsageError(
            f"the forward of {type(model).__name__} takes {', '.join(known) or 'nothing'}, and the batch contains "
            f"{', '.join(map(str, named))}; give a function that runs a batch: forward=lambda module, batch: ..."
        )
    return batches(model, taken, None, None)


def refusal(model: nn.Module, probe: Any, error: Exception) -> str:
    """Say that a model does not run on a probe: what failed, what the probe holds, and what to do."""
    runs = f"the forward of {type(model).__name__}"
    remedy = "If the training step prepares a batch for the model, or calls another part of it, do the same:"
    if isinstance(model, WithForward):
        runs = "the function given as forward="
        remedy = "It takes the module and a batch like the probe:"
    elif is_prompts(probe):
        remedy = "If the model does not take what the tokenizer returns, give a batch as probe=, and run it as the training does:"
    failed = f"{runs} fails on the probe, {describe(probe)}: {type(error).__name__}: {error}"
    return f"{failed.rstrip('.')}. {remedy} forward=lambda module, batch: ..."


def _with_tensors(batch: Any, tensors: Sequence[Tensor], changed: Sequence[Tensor]) -> Any:
    """Return the batch with other tensors, such as those on the measuring device, in the places of its own."""
    by_id = {id(tensor): new for tensor, new in zip(tensors, changed, strict=True)}
    return map_leaves(batch, lambda leaf: by_id.get(id(leaf), leaf))


def _length(leaf: Any) -> int:
    """Return the length of a leaf's first axis, -1 if it has none."""
    has_axis = (
        leaf.ndim > 0 if isinstance(leaf, (Tensor, np.ndarray)) else isinstance(leaf, (list, tuple))
    )
    return len(leaf) if has_axis else -1


def interleave(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' parts of a list, of which rank r has entries r, r + ranks, and so on.

    >>> interleave([[0, 3], [1, 4], [2]])
    [0, 1, 2, 3, 4]
    """
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
