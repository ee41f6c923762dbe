"""Boundaries of blocks that are not modules.

Where a model's forward calls attention and MLP by itself (x = attn(x) + x; x = ff(x) + x), no module maps one hidden
state to the next. Such a block is a span between two boundaries of the forward pass:

    "input of layers.0.0"     the first tensor that the module layers.0.0 is given
    "output of layers.0.1"    the tensor that it returns, or the first entry of the tuple that it returns
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tracker.errors import UsageError

SIDES = ("input", "output")


@dataclass(frozen=True)
class Boundary:
    """What a module, by its qualified name, is given or returns."""

    side: str
    module: str

    def __str__(self) -> str:
        return f"{self.side} of {self.module}"


Span = tuple[Boundary, Boundary]


def read_spans(blocks: Any) -> list[Span] | None:
    """Spans from pairs of boundaries, or from L + 1 boundaries in order of depth; None where `blocks` names modules.

    Raises:
        UsageError: for boundaries that are not written as such, or stand among modules.
    """
    if isinstance(blocks, (str, nn.Module)) or not isinstance(blocks, Sequence):
        return None
    if not any(isinstance(entry, (tuple, list)) or _is_boundary(entry) for entry in blocks):
        return None
    if all(isinstance(entry, (tuple, list)) and len(entry) == 2 for entry in blocks):
        return [(_read(start), _read(end)) for start, end in blocks]
    if len(blocks) < 2 or any(isinstance(entry, (tuple, list)) for entry in blocks):
        raise UsageError(
            f"blocks={blocks!r}; give pairs of boundaries, [('input of A', 'output of B'), ...], or the boundaries in "
            "order of depth, at least two: ['input of A', 'input of B', ..., 'output of Z']"
        )
    boundaries = [_read(entry) for entry in blocks]
    return list(zip(boundaries[:-1], boundaries[1:], strict=True))


def _is_boundary(entry: Any) -> bool:
    return isinstance(entry, str) and entry.startswith(tuple(f"{side} of " for side in SIDES))


def _read(entry: Any) -> Boundary:
    if not _is_boundary(entry):
        raise UsageError(
            f"{entry!r} is no boundary; write 'input of NAME' or 'output of NAME', of a module of the model"
        )
    side, _, module = entry.partition(" of ")
    return Boundary(side, module)


def suggestions(model: nn.Module) -> list[str]:
    """For every list of lists that hold attention (vit-pytorch, x-transformers): the `blocks=` that would measure it.

    The blocks are taken to begin where the first module of each is called, and the last to end where the norm beside
    the list is, or where the module that holds the list returns. The measurement checks it.
    """
    return [line for name, module in model.named_modules() if (line := _suggestion(model, name, module))]


def _suggestion(model: nn.Module, name: str, layers: nn.Module) -> str | None:
    children = list(layers.children())
    plain = (nn.ModuleList, nn.Sequential)
    if type(layers) is not nn.ModuleList or len(children) < 2 or not all(type(child) in plain for child in children):
        return None
    kinds = [tuple(type(part).__name__ for part in child.modules()) for child in children]
    period = next(p for p in range(1, len(kinds) + 1) if kinds == kinds[:p] * (len(kinds) // p))
    first = _first(children[0])
    if (
        period == len(kinds)
        or first is None
        or not any("attention" in kind.lower() or "attn" in kind.lower() for kind in sum(kinds, ()))
    ):
        return None
    holder, _, _ = name.rpartition(".")
    prefix = f"{holder}." if holder else ""
    beside = model.get_submodule(holder).named_children()
    norms = [child for child, module in beside if "norm" in type(module).__name__.lower()]
    if len(norms) > 1 or not (norms or holder):
        return None
    end = f"input of {prefix}{norms[0]}" if norms else f"output of {holder}"
    every = f"{len(kinds)}" if period == 1 else f"0, {len(kinds)}, {period}"
    return f'blocks=[f"input of {name}.{{i}}.{first}" for i in range({every})] + ["{end}"]'


def _first(module: nn.Module) -> str | None:
    """The name of the first module in lists of modules, as far as it is what comes first."""
    path: list[str] = []
    while type(module) in (nn.ModuleList, nn.Sequential):
        entries: Iterator[tuple[str, nn.Module | None]] = iter(module._modules.items())
        name, first = next(entries, ("", None))
        if first is None:
            return None
        path, module = [*path, name], first
    return ".".join(path)
