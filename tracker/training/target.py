"""What of a training module is measured: the part that runs by itself on a batch, and the blocks in it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_unflatten

from tracker.blocks.boundaries import Boundary
from tracker.blocks.find import Blocks, Named, find_blocks, huggingface_owner
from tracker.errors import UsageError

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Target:
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


def find_target(module: nn.Module, blocks: Named | None, forward: Forward | None) -> Target:
    """Find what to run: all of the module with `forward`; else the Hugging Face model in it that holds the blocks, the
    module itself if it defines a forward, or its child that holds the blocks.

    Args:
        blocks: as in `find_blocks`, with names as they are in the module.

    Raises:
        UsageError: if no blocks are found, or nothing that holds them has a forward.
    """
    found = find_blocks(module, blocks)
    boundaries = [boundary for span in found.spans for boundary in span]
    names = [boundary.module for boundary in boundaries] or found.names
    named = None if blocks is None else [module.get_submodule(name) for name in names]
    part = ""
    owner = huggingface_owner(module, names[0])
    if forward is None and owner is not None:
        part = next(name for name, other in module.named_modules() if other is owner)
    elif forward is None and not _runs(module):
        part = names[0].partition(".")[0]
        if not _runs(module.get_submodule(part)):
            raise UsageError(
                f"{type(module).__name__} has no forward of its own, nor has {part!r}, where its blocks are: define "
                "forward(self, batch), or say how a batch is run: forward=lambda module, batch: ..."
            )
    subject = Target(part, forward, found)
    model = subject.model(module)
    if not found.spans or named is None:
        return Target(part, forward, find_blocks(model, named))
    own = {id(other): name for name, other in model.named_modules(remove_duplicate=False)}
    outside = [name for name, other in zip(names, named, strict=True) if id(other) not in own]
    if outside:
        raise UsageError(
            f"the boundaries at {', '.join(outside)} are outside {part!r}, which runs by itself on a batch; name others, or "
            "say how the whole is run: forward=lambda module, batch: ..."
        )
    renamed = [str(Boundary(b.side, own[id(other)])) for b, other in zip(boundaries, named, strict=True)]
    return Target(part, forward, find_blocks(model, list(zip(renamed[::2], renamed[1::2], strict=True))))


def _runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward, rather than to inherit torch's or Lightning's empty one."""
    return not type(module).forward.__module__.startswith(
        ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")
    )
