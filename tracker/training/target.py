"""The target of a callback: the part of a training module that runs on a batch by itself, its blocks, and the weights that are
measured: those in training, or those of an averaging callback.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tracker.blocks.boundaries import Boundary
from tracker.blocks.find import Blocks, Named, find_blocks, huggingface_owner, names_by_id, unwrap
from tracker.common.errors import LIGHTNING, UsageError
from tracker.loggers.lightning import is_lightning

AVERAGING = "callbacks.WeightAveraging"


def check_readable(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> None:
    """Check that the weights can be read during the training.

    Raises:
        UsageError: for averaged weights without an averaging callback, and for weights in flattened pieces.
    """
    if weights == "averaged" and not _before(callback, trainer, AVERAGING):
        raise UsageError(
            "weights='averaged' takes those of a WeightAveraging callback; list one before this CouplingCallback"
        )
    if is_lightning(trainer.strategy, "strategies.FSDPStrategy") or any(
        hasattr(p, "ds_id") for p in module.parameters()
    ):
        raise UsageError(
            f"{type(trainer.strategy).__name__} keeps weights in flattened pieces that can't be read one by one; "
            "shard with ModelParallelStrategy (FSDP2), or train with DDP"
        )


def measured_module(callback: Callback, trainer: Trainer, module: LightningModule, weights: str) -> nn.Module:
    """Return the training module, or its averaged copy."""
    if weights == "raw":
        return module
    averaged = _before(callback, trainer, AVERAGING)[0]._average_model  # Lightning has no public access
    assert averaged is not None
    return averaged.module


def replaces_raw_weights(callback: Callback, trainer: Trainer) -> bool:
    """Whether averaged weights have replaced the raw ones when `callback.on_train_end` is called."""
    return bool(_before(callback, trainer, AVERAGING, "callbacks.StochasticWeightAveraging"))


def _before(callback: Callback, trainer: Trainer, *names: str) -> list[Any]:
    """Return the callbacks of some of Lightning's classes that Lightning calls before this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks[: callbacks.index(callback)] if is_lightning(other, *names)]


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
    found, module = find_blocks(module, blocks), unwrap(module)
    boundaries = [boundary for span in (*found.spans, found.fixed) for boundary in span]
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
                f"{type(module).__name__} has no forward of its own, and neither has {part!r}, which contains its blocks: "
                "define forward(self, batch), or give a function that runs a batch: forward=lambda module, batch: ..."
            )
    model = Target(part, forward, found).model(module)
    if not found.spans or named is None:
        return Target(part, forward, find_blocks(model, named))
    own = names_by_id(model)
    outside = [name for name, other in zip(names, named, strict=True) if id(other) not in own]
    if outside:
        raise UsageError(
            f"the boundaries at {', '.join(outside)} are outside {part!r}, which runs by itself on a batch; name others, or "
            "give a function that runs the whole module: forward=lambda module, batch: ..."
        )
    renamed = [str(Boundary(b.side, own[id(other)])) for b, other in zip(boundaries, named, strict=True)]
    ends = 2 * len(found.spans)
    spans = list(zip(renamed[:ends:2], renamed[1:ends:2], strict=True))
    return Target(part, forward, find_blocks(model, spans, fixed=renamed[ends:]))


def _runs(module: nn.Module) -> bool:
    """Whether the module's class defines a forward instead of inheriting the empty one of torch or Lightning."""
    return not type(module).forward.__module__.startswith(("torch.nn.modules.module", *LIGHTNING))
