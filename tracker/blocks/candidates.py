"""List the modules that may be blocks of a model in which no attention module is recognised by its name.

A candidate is a run of consecutive modules of one class, each with at least two matrices outside convolutions and recurrent
layers: the entries of a ModuleList, Sequential or ModuleDict, or the numbered attributes of a module (block0, block1, ...).
Stacks of MLPs are candidates too: `tracker.capture.mixing` tells blocks from them in a forward pass.
"""

import re
from collections.abc import Iterator, Sequence

from torch import nn

from tracker.blocks.boundaries import suggest_boundaries
from tracker.blocks.towers import Run, has_matrices, nested

RECOGNISED = (
    "A block is recognised by an attention module in it: a class whose name contains 'attention' or 'attn', or an attribute "
    "attn, attention, self_attn or self_attention that contains a Linear. Without such names, a list of modules of one class "
    "is recognised in the forward pass of a measurement: each module takes and returns (batch, tokens, width), takes the "
    "output of the one before it, and its output at one token depends on other tokens."
)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def candidate_runs(model: nn.Module) -> list[Run]:
    """Return all candidates, those inside other candidates included, in the order in which the model registers them."""
    return [run for name, module in model.named_modules() for run in _runs_of(name, module)]


def outermost(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are not inside a module of another run."""
    return [run for run in runs if not any(nested(run, other.names) for other in runs)]


def describe_candidates(model: nn.Module, runs: Sequence[Run], findings: Sequence[str] | None = None) -> str:
    """Say how blocks are recognised, which lists were seen, with the `blocks=` argument of each, and how to name others.

    Args:
        model: the model that was searched.
        runs: its candidates.
        findings: for each candidate, what the forward pass showed.
    """
    notes = [f": {finding}" for finding in findings] if findings else [""] * len(runs)
    lines = "".join(f"\n  {run.argument}  # {run}{note}" for run, note in zip(runs, notes, strict=True))
    parts = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
    seen = (
        f"Lists of modules of one class:{lines}"
        if runs
        else f"The model has no list of such modules; its parts are {parts}."
    )
    return f"{RECOGNISED}\n{seen}\n{_naming_hint(model)}"


def _naming_hint(model: nn.Module) -> str:
    """Say how the blocks of this model can be named."""
    lines = suggest_boundaries(model)
    if lines:
        return (
            "It calls attention and MLP separately, so that no module is a block: name the boundaries between "
            f"blocks: {' or '.join(lines)}"
        )
    return (
        "Name the blocks: blocks='path.to.list', or a list of modules, or, if no module is a block, "
        "blocks=[('input of A', 'output of B'), ...]"
    )


def _runs_of(container: str, module: nn.Module) -> Iterator[Run]:
    children = list(module.named_children())
    stretch: list[tuple[str, nn.Module]] = []
    for name, child in children:
        if stretch and not _follows(module, *stretch[-1], name, child):
            yield from _run(container, stretch, children)
            stretch = []
        stretch.append((name, child))
    yield from _run(container, stretch, children)


def _follows(holder: nn.Module, before: str, first: nn.Module, name: str, second: nn.Module) -> bool:
    """Whether two children that were registered one after the other are of one class and in one list."""
    if type(first) is not type(second):
        return False
    if isinstance(holder, _LISTS):
        return True
    a, b = (re.fullmatch(r"(.*?)(\d+)", entry) for entry in (before, name))
    return a is not None and b is not None and a[1] == b[1] and int(a[2]) + 1 == int(b[2])


def _run(
    container: str, stretch: Sequence[tuple[str, nn.Module]], children: Sequence[tuple[str, nn.Module]]
) -> Iterator[Run]:
    modules = [child for _, child in stretch]
    if (
        len(modules) < 2
        or isinstance(modules[0], (nn.ModuleList, nn.ModuleDict))
        or not all(map(has_matrices, modules))
    ):
        return
    prefix = f"{container}." if container else ""
    names = tuple(f"{prefix}{name}" for name, _ in stretch)
    yield Run(container, names, type(modules[0]).__name__, len(stretch) == len(children))
