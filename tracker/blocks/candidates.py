"""List the modules that may be blocks of a model in which no attention module is recognised by its name.

A candidate is a run of consecutive modules of one class, each with at least two matrices outside convolutions and recurrent
layers: the entries of a ModuleList, Sequential or ModuleDict, or the numbered attributes of a module (block0, block1, ...).
Stacks of MLPs are candidates too: `tracker.capture.mixing` tells blocks from them in a forward pass.
"""

import re
from collections.abc import Iterator, Sequence

from torch import nn

from tracker.blocks.boundaries import is_list_of_lists, propose_boundaries
from tracker.blocks.proposals import BlocksNotFound, Proposal
from tracker.blocks.towers import Run, has_matrices, nested, proposals

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


def nothing_found(
    model: nn.Module, runs: Sequence[Run], findings: Sequence[str] | None = None, pairs: Sequence[Proposal] = ()
) -> BlocksNotFound:
    """Return the error for a model without blocks: how they are recognised, which lists were seen, and what may be named.

    Args:
        model: the model that was searched.
        runs: its candidates.
        findings: for each candidate, why a forward pass showed that it is no chain of blocks.
        pairs: blocks that a forward pass suggests.
    """
    parts = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
    seen = [] if runs else [f"The model has no list of such modules; its parts are {parts}."]
    if runs and findings is not None:
        lines = "".join(f"\n  {run.where} ({run}): {finding}" for run, finding in zip(runs, findings, strict=True))
        seen.append(f"Its lists of modules of one class are no blocks:{lines}")
    boundaries = propose_boundaries(model)
    if boundaries:
        seen.append("It calls attention and MLP separately, so that no module is a block.")
    elif any(map(is_list_of_lists, model.children())):
        seen.append(
            "It calls attention and MLP separately, so that no module is a block, and the last block may end where the model "
            "returns, which has a name only inside another module: measure a model that contains this one."
        )
    found = "\n".join([f"no residual blocks found in {type(model).__name__}. {RECOGNISED}", *seen])
    return BlocksNotFound(found, [*(proposals(model, runs) if findings is None else pairs), *boundaries])


def _runs_of(container: str, module: nn.Module) -> Iterator[Run]:
    children = [(name, child) for name, child in module._modules.items() if child is not None]
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
    first = {id(child): name for name, child in reversed(stretch)}  # a module may be in a list several times
    names = tuple(f"{prefix}{name}" for name, child in stretch if first[id(child)] == name)
    yield Run(container, names, type(modules[0]).__name__, len(stretch) == len(children), len(stretch))
