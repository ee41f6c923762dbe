"""The probe of a training run, one fixed batch that is measured at every chosen step, and its target, the part of the training
module that runs on a batch by itself.

The probe is a copy on the CPU of the type that the loader yields. It is taken apart at tuples, lists, dictionaries and records. A
record is a dataclass, a mapping, an object with `.to`, which Lightning moves to a device, or an object that holds tensors or
nothing but plain data. Any other object is kept as it is. A checkpoint contains the probe as tensors, numbers and text, so that a
resumed run measures the same inputs.
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracker.blocks.boundaries import Boundary
from tracker.blocks.find import Blocks, Named, find_blocks, huggingface_owner, names_by_id, unwrap
from tracker.capture.guard import SCALARS, is_data
from tracker.capture.inputs import Batch, batches, check_tokenizer
from tracker.common.errors import LIGHTNING, UsageError, warn_caller
from tracker.provenance import digest

Forward = Callable[[nn.Module, Any], Any]


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


def find_target(module: nn.Module, blocks: Named | Blocks | None, forward: Forward | None) -> Target:
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
    elif forward is None and not _runs(module):
        part = names[0].partition(".")[0]
        if not _runs(module.get_submodule(part)):
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
    renamed = [str(Boundary(b.side, own[id(other)])) for b, other in zip(boundaries, named, strict=True)]
    ends = 2 * len(whole.spans)
    spans = list(zip(renamed[:ends:2], renamed[1:ends:2], strict=True))
    return Target(part, forward, find_blocks(model, spans, fixed=renamed[ends:]))


def _runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward instead of inheriting the empty one of torch or Lightning."""
    return not type(module).forward.__module__.startswith(("torch.nn.modules.module", *LIGHTNING))


CLASS = "tracker.class"  # key of a class's name in what a checkpoint contains
PLAIN = (*SCALARS, Tensor, torch.Size, torch.dtype, torch.device)  # classes that `torch.load` reads by default
ARRAYS = (np.ndarray, np.generic)


def map_leaves(batch: Any, change: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """Copy a batch with `change` applied to every tensor, array, list of texts and object that is not taken apart.

    Args:
        memo: copies made so far, by the original's `id`.
    """
    memo = {} if memo is None else memo
    if isinstance(batch, SCALARS):
        return batch
    if id(batch) in memo:
        return memo[id(batch)]
    if is_texts(batch) or not (isinstance(batch, (tuple, list, dict)) or is_record(batch)):
        return memo.setdefault(id(batch), change(batch))
    if isinstance(batch, tuple):
        entries = [map_leaves(entry, change, memo) for entry in batch]
        return memo.setdefault(id(batch), _tuple_like(batch, entries))
    new = memo[id(batch)] = copy(batch)
    if isinstance(batch, (list, dict)):
        for key in list(batch) if isinstance(batch, dict) else range(len(batch)):
            new[key] = map_leaves(batch[key], change, memo)
    for name, entry in attributes(batch).items():
        object.__setattr__(new, name, map_leaves(entry, change, memo))  # of a frozen dataclass as well
    return new


def leaves(batch: Any) -> list[Any]:
    """Return the tensors, arrays, lists of texts and objects that are not taken apart."""
    entries: list[Any] = []

    def keep(leaf: Any) -> Any:
        entries.append(leaf)
        return leaf

    map_leaves(batch, keep)
    return entries


def named_parts(batch: Any) -> Mapping[Any, Any]:
    """Return the entries of a mapping, or the attributes of another record; those of anything else have no names."""
    return batch if isinstance(batch, Mapping) else attributes(batch) if is_record(batch) else {}


def is_texts(value: Any) -> bool:
    """Whether a value is a list or tuple of texts, without names."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    return bool(value) and all(isinstance(entry, str) for entry in value)


def is_record(value: Any) -> bool:
    """Whether an object is taken apart by its attributes."""
    if isinstance(value, (Tensor, nn.Module, Enum, type, *ARRAYS, *SCALARS)) or not (held := attributes(value)):
        return False
    return (
        is_dataclass(value)
        or isinstance(value, Mapping)
        or hasattr(value, "to")
        or is_data(value)
        or any(isinstance(entry, (Tensor, np.ndarray)) for entry in held.values())
    )


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in slots."""
    state: Any = object.__getstate__(value)  # a dictionary, None, or a pair of these if the class has slots
    own, slots = state if isinstance(state, tuple) else (state, None)
    return (own or {}) | (slots or {})


# What is hashed, and what a checkpoint contains.


def contents(batch: Any) -> Any:
    """Return a batch without the types of its parts, for `tracker.provenance.digest`: equal inputs have equal contents."""
    if isinstance(batch, Enum):
        return batch.name
    if isinstance(batch, (Tensor, *SCALARS)):
        return batch
    if isinstance(batch, ARRAYS):
        return None if batch.dtype.hasobject else (batch.dtype.str, batch.shape, _bytes(batch))
    if isinstance(batch, (tuple, list)):
        return [contents(entry) for entry in batch]
    if isinstance(batch, Mapping) or is_record(batch):
        return {name: contents(entry) for name, entry in named_parts(batch).items()}
    return None  # the text of an object may be its address


def to_plain(batch: Any) -> Any:
    """Return a batch as tensors, numbers and text in dictionaries, lists and tuples, which `torch.load` reads with
    `weights_only=True`, its default. `from_plain` returns the batch.

    A part of another type is a dictionary with its class, entries and attributes; one of which these are not known has its
    class alone.
    """
    kind = type(batch)
    if kind in PLAIN:
        return batch
    if kind in (list, tuple):
        return kind(to_plain(entry) for entry in batch)
    if kind is dict and all(type(key) in (bool, int, float, str) for key in batch):
        return {key: to_plain(entry) for key, entry in batch.items()}
    part = {CLASS: f"{kind.__module__}:{kind.__qualname__}"}
    if isinstance(batch, ARRAYS):
        if batch.dtype.hasobject or batch.dtype.names:
            return part
        return {**part, "entries": _bytes(batch), "attributes": {"dtype": batch.dtype.str, "shape": batch.shape}}
    if isinstance(batch, Enum) and batch.name in type(batch).__members__:
        return {**part, "entries": batch.name, "attributes": {}}
    if isinstance(batch, str):
        return str.__str__(batch)
    if isinstance(batch, (int, float)):
        return int(batch) if isinstance(batch, int) else float(batch)
    own = attributes(batch)
    if isinstance(batch, Tensor):
        entries: Any = batch.as_subclass(Tensor)
    elif isinstance(batch, dict):
        entries = to_plain([list(batch), list(batch.values())])
    elif isinstance(batch, (list, tuple)):
        entries = to_plain(list(batch))
    elif is_record(batch):
        entries = None
    else:
        return part
    return {**part, "entries": entries, "attributes": to_plain(own)}


def from_plain(plain: Any, lost: set[str]) -> Any:
    """Return the batch that `to_plain` was given. No code of its classes runs, as a checkpoint may name any class.

    Args:
        lost: receives the classes of objects that a checkpoint can't contain; None is in their places.

    Raises:
        UsageError: for a class that this program does not have.
    """
    if type(plain) in (list, tuple):
        return type(plain)(from_plain(entry, lost) for entry in plain)
    if type(plain) is not dict:
        return plain
    if CLASS not in plain:
        return {key: from_plain(entry, lost) for key, entry in plain.items()}
    if "attributes" not in plain:
        lost.add(plain[CLASS].rpartition(".")[2].rpartition(":")[2])
        return None
    kind = _class(plain[CLASS])
    entries, own = from_plain(plain["entries"], lost), from_plain(plain["attributes"], lost)
    if issubclass(kind, ARRAYS):
        array = np.frombuffer(entries.numpy().tobytes(), own["dtype"]).reshape(own["shape"])
        return array.copy() if kind is np.ndarray else array[()]
    new = _new(kind, entries)
    for name, entry in own.items():
        object.__setattr__(new, name, entry)
    return new


def _new(kind: type, entries: Any) -> Any:
    """Return a new object of a class with the entries of a container; attributes are yet to be set."""
    if issubclass(kind, Enum):
        return kind.__members__[entries]
    if issubclass(kind, Tensor):
        return entries.as_subclass(kind)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, entries)
    base: Any = next(base for base in (OrderedDict, dict, list, SimpleNamespace, object) if issubclass(kind, base))
    new: Any = base.__new__(kind)
    if issubclass(base, list):
        list.extend(new, entries)
    elif issubclass(base, dict):
        for key, entry in zip(*entries, strict=True):
            base.__setitem__(new, key, entry)
    return new


def _class(name: str) -> type:
    """Return a class by the name that `to_plain` gave it, if its module is imported."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type) or hasattr(value, "__del__"):
        raise UsageError(
            f"the checkpoint's probe contains a {path}, and this program has no such class in {module}; define it there, outside "
            "functions, or give the samples to measure: probe=..."
        )
    return value


def _tuple_like(batch: tuple, entries: list[Any]) -> tuple:
    return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)


def _bytes(array: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())


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


def resolve(probe: Any, loaded: Any, take: Callable[[], Any], max_samples: int) -> Any:
    """Return the probe of a checkpoint, else the given one, else the first samples of a batch.

    Args:
        probe: the probe passed to the callback, a function that returns it, or None.
        loaded: the probe of a checkpoint, as in `to_plain`, or of the sanity check, or None.
        take: returns the batch.

    Raises:
        UsageError: for a checkpoint's probe of a class that this program does not have, unless a probe is given.
    """
    probe = probe() if callable(probe) else probe
    probe = None if probe is None else cpu_copy(probe)
    if loaded is None:
        return first_samples(take(), max_samples) if probe is None else probe
    lost: set[str] = set()
    try:
        loaded = from_plain(loaded, lost)
    except UsageError as error:
        if probe is None:
            raise
        warn_caller(f"{error}; the given probe is measured")
        return probe
    if probe is not None and inputs_digest(probe) == inputs_digest(loaded):
        return probe
    if probe is not None:
        warn_caller("the given probe is not that of the checkpoint; the checkpoint's is measured, as before")
    if lost:
        warn_caller(
            f"a checkpoint can't contain a {', a '.join(sorted(lost))}: None is in its place in the probe; if forward= needs it, "
            "give the samples to measure: probe=..."
        )
    return loaded


def as_first(own: Any, first_digest: str, first: Any) -> Any:
    """Return a rank's own probe if it equals that of the first rank; else that one, given as in `to_plain`."""
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
    entries = leaves(batch)
    for kind in (Tensor, np.ndarray, (list, tuple)):
        n = next((_length(leaf) for leaf in entries if isinstance(leaf, kind) and _length(leaf) >= 0), 0)
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
