"""Name blocks that are not modules by their boundaries in the forward pass.

If a model's forward calls attention and MLP itself (x = attn(x) + x; x = ff(x) + x), no module maps one hidden state to the
next. Such a block is a span between two boundaries:

    "input of layers.0.0"     the first tensor passed to the module layers.0.0
    "output of layers.0.1"    the tensor that the module returns, or the first entry of the tuple that it returns

Places are named in the same way for tensors that stay at their recorded values while a span is linearized (fixed tensors).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from tracker.common.errors import UsageError

SIDES = ("input", "output")


@dataclass(frozen=True)
class Boundary:
    """The input or the output of a module, by its qualified name."""

    side: str
    module: str

    def __str__(self) -> str:
        return f"{self.side} of {self.module}"


Span = tuple[Boundary, Boundary]


def chain(names: Sequence[str]) -> list[Span]:
    """Return the spans of modules that run one after another: what the model does before a module belongs to its span, and
    the first span begins at the input of the first module.
    """
    places = [Boundary("input", names[0]), *(Boundary("output", name) for name in names)]
    return list(pairwise(places))


def as_python(spans: Sequence[Span]) -> str:
    """Return a Python expression of spans, as `read_spans` takes it; places that differ in a number are counted in it."""
    if any(before != start for (_, before), (start, _) in pairwise(spans)):
        return repr([(str(start), str(end)) for start, end in spans])
    named = places(spans)
    if starts := _counted(named[:-1]):
        return f"{starts} + {named[-1:]}"
    ends = _counted(named[1:])
    return f"{named[:1]} + {ends}" if ends else repr(named)


def places(spans: Sequence[Span]) -> list[str]:
    """Return the boundaries of spans, each of which begins where the one before ended."""
    return [str(spans[0][0]), *(str(end) for _, end in spans)]


def _counted(places: Sequence[str]) -> str:
    """Return a Python expression of places that differ in a number, which grows by equal steps; "" for other places."""
    first, second = (place.split(".") for place in (*places, "")[:2])
    columns = [at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(columns) != 1 or not (first[columns[0]] + second[columns[0]]).isdecimal():
        return ""
    (at,) = columns
    start, step = int(first[at]), int(second[at]) - int(first[at])
    numbers = range(start, start + step * len(places), step)
    form = ".".join([*first[:at], "{i}", *first[at + 1 :]])
    counted = [form.replace("{i}", str(i)) for i in numbers]
    return f'[f"{form}" for i in {numbers}]' if counted == list(places) else ""


def read_fixed(fixed: str | Sequence[str]) -> list[Boundary]:
    """Parse the places of fixed tensors.

    Raises:
        UsageError: for anything but places.
    """
    if not isinstance(fixed, (str, Sequence)):
        raise UsageError(
            f"fixed={fixed!r}; give 'output of NAME' or 'input of NAME', or a list of such places"
        )
    return [_read(entry) for entry in ([fixed] if isinstance(fixed, str) else fixed)]


def read_spans(blocks: Any) -> list[Span] | None:
    """Parse spans from pairs of boundaries, or from L + 1 boundaries in order of depth; None if `blocks` names modules.

    Raises:
        UsageError: for malformed boundaries, and for a mixture of boundaries and modules.
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
    return list(pairwise(boundaries))


def _is_boundary(entry: Any) -> bool:
    return isinstance(entry, str) and entry.startswith(tuple(f"{side} of " for side in SIDES))


def _read(entry: Any) -> Boundary:
    if not _is_boundary(entry):
        raise UsageError(
            f"{entry!r} is no boundary; write 'input of NAME' or 'output of NAME', of a module of the model"
        )
    side, _, module = entry.partition(" of ")
    return Boundary(side, module)
