"""The probe of a training run, one fixed batch that is measured at every chosen step, and its target, the part of the training
module that runs on a batch by itself.

The probe is a copy on the CPU: tensors, numbers and texts in dictionaries, tuples and lists (`plain`). A checkpoint contains it
as it is, so that a resumed run measures the same inputs. What the model's forward does not take by itself, `forward=` runs.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tracker.blocks.find import find_blocks
from tracker.common.errors import UsageError, warn_caller
from tracker.loggers.lightning import classes
from tracker.model.boundaries import Boundary
from tracker.model.description import Blocks, Named
from tracker.model.guard import SCALARS
from tracker.model.huggingface import huggingface_owner, is_encoder_decoder
from tracker.model.inputs import Batch, batches, check_tokenizer
from tracker.model.records import ARRAYS, describe, is_record, is_texts, named_parts
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

    def forward(self, batch: Any) -> Any:
        """Run the function."""
        return self.function(self.module, with_attributes(batch))


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
    part = ""
    owner = huggingface_owner(module, names[0])
    if forward is None and owner is not None:
        part = names_by_id(module)[id(owner)]
    elif forward is None and not runs(module):
        part = names[0].partition(".")[0]
        if not runs(module.get_submodule(part)):
            raise UsageError(
                f"{type(module).__name__} has no forward of its own, and neither has {part!r}, which contains its blocks: "
                "define forward(self, batch), or give a function that runs a batch: forward=lambda module, batch: ..."
            )
    model = Target(part, forward, whole).model(module)
    if blocks is None:
        return Target(part, forward, find_blocks(model))
    own = names_by_id(model)
    inside = {name: own.get(id(module.get_submodule(name)), "") for name in names}
    outside = [name for name in inside if not inside[name]]
    if outside:
        raise UsageError(
            f"{', '.join(outside)} is outside {part!r}, which runs by itself on a batch; name other blocks, or give a function "
            "that runs the whole module: forward=lambda module, batch: ..."
        )

    def renamed(boundary: Boundary) -> str:
        return str(Boundary(boundary.side, inside[boundary.module]))

    spans = [(renamed(start), renamed(end)) for start, end in whole.spans]
    named = spans or [inside[name] for name in names]
    return Target(part, forward, find_blocks(model, named, fixed=list(map(renamed, whole.fixed))))


def runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward instead of inheriting the empty one of torch or Lightning."""
    empty = (base.forward for base in (nn.Module, *classes("LightningModule")))
    return type(module).forward not in empty


def plain(batch: Any) -> Any:
    """Return a batch as tensors, numbers and texts in dictionaries, tuples and lists, which `torch.load` reads with
    `weights_only=True`, its default.

    Mappings, dataclasses and other records become dictionaries, arrays of numbers tensors, members of enumerations their names.
    Anything else becomes None.
    """
    if isinstance(batch, Enum):
        return batch.name
    if isinstance(batch, Tensor):
        return batch.as_subclass(Tensor)
    if isinstance(batch, SCALARS) and batch is not None:
        kind: Any = next(kind for kind in SCALARS if isinstance(batch, kind))
        return kind(batch)
    if isinstance(batch, ARRAYS):
        return torch.from_numpy(np.array(batch)) if batch.dtype.kind in "biufc" else None
    if isinstance(batch, tuple):
        return tuple(map(plain, batch))
    if isinstance(batch, list):
        return list(map(plain, batch))
    if isinstance(batch, Mapping) or is_record(batch):
        return {f"{name}": plain(part) for name, part in named_parts(batch).items()}
    return None


class Parts(dict):
    """The named parts of a batch, for a function that a user wrote for a mapping or for a record."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the batch has no part {name!r}, but {', '.join(self)}")


def with_attributes(batch: Any) -> Any:
    """Return a plain batch whose dictionaries have their entries as attributes, too."""
    if isinstance(batch, dict):
        return Parts((name, with_attributes(part)) for name, part in batch.items())
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(with_attributes, batch))
    return batch


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


def resolve(given: Any, held: Any, take: Callable[[], Any] | None) -> Any:
    """Return the probe measured before, else the given one, else the first samples of a batch.

    Args:
        given: the probe passed to the callback, or what the function that was passed returns, or None.
        held: the probe of a checkpoint, of the sanity check or of an earlier training, or None.
        take: returns the batch. None: a probe is given.
    """
    if given is None and held is None:
        assert take is not None
        return first_samples(take())
    if given is None:
        return held
    given = copied(given)
    if held is None or digest(given) == digest(held):
        return given
    warn_caller(
        f"the given probe, {describe(given)}, is not that of the checkpoint, {describe(held)}: the checkpoint's is measured, "
        "so that all steps have the same inputs; another probe needs a run and a save_dir of its own"
    )
    return held


def first_samples(batch: Any) -> Any:
    """Copy the samples that are measured of a batch where no probe is given."""
    return copied(batch, slice(SAMPLES))


def copied(batch: Any, samples: slice = slice(None)) -> Any:
    """Return a copy on the CPU of a batch, or of some of its samples, as tensors, numbers and texts."""
    selected = select_samples(plain(batch), samples)
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf,
        selected,
    )


def sample_count(batch: Any) -> int:
    """Return the number of samples: the first axis of the first tensor; without one, of the first list of texts.

    Raises:
        UsageError: if there are none.
    """
    divided = [leaf for leaf in tree_leaves(batch, is_texts) if divides(leaf)]
    tensors = [leaf for leaf in divided if isinstance(leaf, Tensor)]
    count = len((tensors or divided or [()])[0])
    if count == 0:
        raise UsageError(
            f"the probe, read as {describe(batch)}, contains no samples; give at least one prompt, or tensors with the batch as "
            "first axis: probe=..."
        )
    return count


def select_samples(batch: Any, samples: slice) -> Any:
    """Select samples of a batch: slice every tensor and list of texts that is as long as the batch."""
    count = sample_count(batch)

    def select(leaf: Any) -> Any:
        return leaf[samples] if divides(leaf) and len(leaf) == count else leaf

    return tree_map(select, batch, is_leaf=is_texts)


def divides(leaf: Any) -> bool:
    """Whether a part of a batch may have an entry for each sample."""
    return is_texts(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def is_prompts(batch: Any) -> bool:
    """Whether a batch is a list of texts."""
    return isinstance(batch, list) and is_texts(batch)


def forward_calls(model: nn.Module, batch: Any, tokenizer: Any) -> list[Batch]:
    """Return the forward calls that measure a plain batch.

    The model receives a tensor as it is; the first entry of a tuple or list, as the rest are training targets; and
    those entries of a dictionary that its forward takes by name, except labels from which it makes no inputs.

    Raises:
        UsageError: if the model's forward takes no entry of the batch.
    """
    if isinstance(model, WithForward):
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        valid = mask.bool() if isinstance(mask, Tensor) else None
        return [Batch((batch,), {}, [""] * sample_count(batch), valid)]
    if isinstance(batch, (tuple, list)) and not is_prompts(batch):
        return forward_calls(model, batch[0], tokenizer)
    if not isinstance(batch, dict):
        return batches(model, batch, tokenizer, None)
    known, owner = inspect.signature(model.forward).parameters, huggingface_owner(model)
    # Of labels alone, an encoder-decoder makes the inputs of its decoder.
    shifted = owner is not None and is_encoder_decoder(owner) and "decoder_input_ids" not in batch
    taken = {
        name: value
        for name, value in batch.items()
        if name in known and (shifted or not name.startswith("label"))
    }
    if not any(isinstance(taken[name], Tensor) for name in taken.keys() - {"attention_mask"}):
        raise UsageError(
            f"the forward of {type(model).__name__} takes {', '.join(known) or 'nothing'}, and the batch contains "
            f"{', '.join(batch)}; give a function that runs a batch: forward=lambda module, batch: ..."
        )
    return batches(model, taken, tokenizer, None)


def refusal(model: nn.Module, probe: Any, error: Exception) -> str:
    """Say that a model does not run on a probe: what failed, what the probe holds, and what to do."""
    runs = f"the forward of {type(model).__name__}"
    remedy = "If the training step prepares a batch for the model, or calls another part of it, do the same:"
    if isinstance(model, WithForward):
        runs = "the function given as forward="
        remedy = 'It takes the module and the probe, whose parts with names are batch["x"] or batch.x, others batch[0]:'
    elif is_prompts(probe):
        remedy = "If the model does not take what the tokenizer returns, give a batch as probe=, and run it as the training does:"
    failed = f"{runs} fails on the probe, {describe(probe)}: {type(error).__name__}: {error}"
    if isinstance(error, FloatingPointError):
        return failed  # it is no matter of what the model is given
    return f"{failed.rstrip('.')}. {remedy} forward=lambda module, batch: ..."


def interleave(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' parts of a list, of which rank r has entries r, r + ranks, and so on.

    >>> interleave([[0, 3], [1, 4], [2]])
    [0, 1, 2, 3, 4]
    """
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
