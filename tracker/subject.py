"""What of a training module is measured: the part that runs by itself on a batch, and the blocks in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_unflatten

from tracker.blocks import Blocks, UsageError, find_blocks, huggingface_owner

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Subject:
    """By name, so that it is found in an averaged copy of the module as well."""

    part: str  # qualified name within the training module
    forward: Forward | None
    blocks: Blocks  # of `model(module)`

    def model(self, module: nn.Module) -> nn.Module:
        """The part of the training module, or of a copy of it, that is run."""
        part = module.get_submodule(self.part)
        return part if self.forward is None else WithForward(part, self.forward)


class WithForward(nn.Module):
    """A module that is run by a function of its author's on a whole batch: `function(module, batch)`."""

    def __init__(self, module: nn.Module, function: Forward):
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, structure: Any, *leaves: Any) -> Any:
        """Put the batch together again, and run."""
        return self.function(self.module, tree_unflatten(list(leaves), structure))


def find_subject(module: nn.Module, blocks: str | Sequence[str | nn.Module] | None, forward: Forward | None) -> Subject:
    """Find what to run: all of the module with `forward`; else the Hugging Face model in it that holds the blocks, the
    module itself if it defines a forward, or its child that holds the blocks.

    Args:
        blocks: as in `find_blocks`, with names as they are in the module.

    Raises:
        UsageError: if no blocks are found, or nothing that holds them has a forward.
    """
    found = find_blocks(module, blocks)
    named = None if blocks is None else [module.get_submodule(name) for name in found.names]
    part = ""
    owner = huggingface_owner(module, found.names[0])
    if forward is None and owner is not None:
        part = next(name for name, other in module.named_modules() if other is owner)
    elif forward is None and not _runs(module):
        part = found.names[0].partition(".")[0]
        if not _runs(module.get_submodule(part)):
            raise UsageError(
                f"{type(module).__name__} has no forward of its own, nor has {part!r}, where its blocks are: define "
                "forward(self, batch), or say how a batch is run: forward=lambda module, batch: ..."
            )
    subject = Subject(part, forward, found)
    return Subject(part, forward, find_blocks(subject.model(module), named))


def _runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward, rather than to inherit torch's or Lightning's empty one."""
    return not type(module).forward.__module__.startswith(
        ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")
    )
