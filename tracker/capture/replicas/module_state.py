"""Save and restore the attributes of modules besides weights and buffers: counters, cached keys, tables of sines.

A block that reads what an earlier call left in its attributes is not a function of its hidden state. To detect this, the
attributes are saved before a call and restored before another.

A replica's buffers are those of the caller's model at every use, so what a module writes to them is lost. So are, then, its
attributes since: a rotary embedding whose tables are buffers keeps their length as an attribute.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from tracker.capture.replicas.copies import SCALARS, clone_if_tensor, copy_nested, is_data
from tracker.errors import UsageError

STATELESS = 1e-6  # relative to the largest entry: two runs of the same code may differ in rounding on some devices
NOT_STATE = ("_parameters", "_buffers", "_modules", "_weight_hooks", "config", "training")


class ModuleState:
    """A copy of the attributes of a module and of all modules in it."""

    def __init__(self, block: nn.Module) -> None:
        memo: dict[int, Any] = {}
        self._attributes = [(part, _copy(_attributes(part), memo)) for part in block.modules()]

    def changed(self) -> bool:
        """Whether an attribute was replaced, or its contents changed, since it was saved."""
        return any(not _equal(_attributes(part), saved) for part, saved in self._attributes)

    def restore(self) -> None:
        """Restore the saved attributes and remove those added since; may be called more than once."""
        memo: dict[int, Any] = {}
        for part, saved in self._attributes:
            for name in _attributes(part).keys() - saved.keys():
                del part.__dict__[name]
            part.__dict__.update(_copy(saved, memo))


class WeightHolder:
    """A part of the replica that holds weights, and its attributes before.

    What it writes to its buffers ends with the weights. Then so do its attributes: they may say what the buffers have, such as
    the length of a table.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.before = dict(part.__dict__)
        self.given: list[tuple[str, int, int]] | None = None  # the buffers as given; None before

    def note_buffers(self) -> None:
        """Note the buffers that the part was given, to see whether it writes to them."""
        self.given = _versions(self.part)

    def release(self, written: "list[WeightHolder] | None") -> None:
        """Take the weights; restore the part, or put it into the list, if it wrote to its buffers."""
        if self.given is None or self.given == _versions(self.part):
            self.part.__dict__.update(_parameters=self.before["_parameters"], _buffers=self.before["_buffers"])
        elif written is None:
            self.restore()
        else:
            self.part.__dict__["_parameters"] = self.before["_parameters"]
            written.append(self)

    def restore(self) -> None:
        """Restore all attributes."""
        self.part.__dict__.clear()
        self.part.__dict__.update(self.before)


def _versions(part: nn.Module) -> list[tuple[str, int, int]]:
    """Identify a part's buffers and what was written to them."""
    return [(name, id(t), t._version) for name, t in part.__dict__["_buffers"].items() if t is not None]


def irreproducible(observation: str) -> UsageError:
    """Return the error for a model whose repeated call gave another result."""
    return UsageError(f"{observation}: it is random or keeps state between calls, so it has no Jacobian to measure")


def _attributes(part: nn.Module) -> dict[str, Any]:
    computed = {
        getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in part.__dict__.get("_weight_hooks", ())
    }
    return {
        name: value
        for name, value in part.__dict__.items()
        if name not in NOT_STATE and name not in computed and not name.endswith(("_hooks", "_hooks_with_kwargs"))
    }


def _copy(attributes: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {name: copy_nested(value, clone_if_tensor, memo) for name, value in attributes.items()}


def _equal(now: Any, saved: Any) -> bool:
    if now is saved:
        return True
    if type(now) is not type(saved):
        return False
    if isinstance(now, Tensor):
        return now.shape == saved.shape and now.dtype == saved.dtype and torch.equal(now, saved)
    if isinstance(now, dict):
        return now.keys() == saved.keys() and all(_equal(now[key], saved[key]) for key in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(saved) and all(map(_equal, now, saved))
    if isinstance(now, (*SCALARS, set)):
        return now == saved or now != now  # NaN
    return is_data(now) and _equal(vars(now), vars(saved))
