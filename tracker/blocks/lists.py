"""Lists that may be blocks where no attention module is recognised by its name, and what may be named instead.

A candidate is a run of consecutive modules of one class, each with at least two matrices outside convolutions and recurrent
layers: the entries of a ModuleList, Sequential or ModuleDict, or the numbered attributes of a module (block0, block1, ...).
Stacks of MLPs are candidates too: `behaviour` tells blocks from them in a forward pass. So are the entries of a list that are of
several classes (attention and convolution, say), from the first that has attention or whose class is repeated to the last.

Lists of lists have no forward pass that would make each entry a block: their blocks are proposed by boundaries.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from tracker.blocks.towers import (
    ModuleRun,
    find_runs,
    holds_attention,
    named_attention,
    nested,
    proposals,
)
from tracker.model.proposals import BlocksNotFound, Proposal
from tracker.model.state_maps import has_matrices, may_be_block

RECOGNISED = (
    "A block is recognised by an attention module in it: a class whose name contains 'attention' or 'attn', or an attribute "
    "attn, attention, self_attn or self_attention that contains a Linear. Without such names, a list of modules of one class "
    "is recognised in the forward pass of a measurement: each module takes and returns (batch, tokens, width), takes the "
    "output of the one before it, and its output at one token depends on other tokens."
)
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def candidate_runs(model: nn.Module) -> list[ModuleRun]:
    """Return all candidates, those inside other candidates included, in the order in which the model registers them."""
    runs = []
    for name, module in model.named_modules():
        for run in (*_mixed_runs(name, module), *_runs_of(name, module)):
            # Of several classes, only a list whose entries multiply: activations and dropout in a list are no blocks.
            if "/" not in run.block_class or any(
                has_matrices(model.get_submodule(entry)) for entry in run.names
            ):
                runs.append(run)
    return runs


def classes_of(run: ModuleRun) -> str:
    """Return "one class" or "several classes"."""
    return "several classes" if "/" in run.block_class else "one class"


def mixed_run(model: nn.Module, runs: Sequence[ModuleRun]) -> ModuleRun | None:
    """Return the entries of a list, of several classes, that all of these runs are a part of; None if there is no such list."""
    if len({run.container for run in runs}) != 1:
        return None
    container, names = runs[0].container, {name for run in runs for name in run.names}
    mixed = _mixed_runs(container, model.get_submodule(container))
    return next((run for run in mixed if names <= set(run.names)), None)


def _mixed_runs(container: str, module: nn.Module) -> Iterator[ModuleRun]:
    """Yield runs of several classes, each from the first to the last entry with attention, or whose class is repeated."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not isinstance(module, LISTS):
        return
    prefix = f"{container}." if container else ""
    for may_be, group in groupby(children, lambda entry: may_be_block(entry[1])):
        stretch = list(group)
        counts = Counter(type(child) for _, child in stretch)
        certain = [
            i
            for i, (_, child) in enumerate(stretch)
            if counts[type(child)] > 1 or holds_attention(child)
        ]
        if may_be and certain and len(counts) > 1:
            chosen = stretch[certain[0] : certain[-1] + 1]
            classes = dict.fromkeys(type(child).__name__ for _, child in chosen)
            # One may be there several times
            names = {id(child): f"{prefix}{name}" for name, child in reversed(chosen)}
            if len(classes) > 1:
                ordered = tuple(dict.fromkeys(names[id(child)] for _, child in chosen))
                yield ModuleRun(
                    container, ordered, "/".join(classes), len(chosen) == len(children), len(chosen)
                )


def outermost(runs: Sequence[ModuleRun]) -> list[ModuleRun]:
    """Return the runs that are not inside a module of another run, and no part of another one."""
    return [
        run
        for run in runs
        if not any(nested(run, other.names) or set(run.names) < set(other.names) for other in runs)
    ]


def nothing_found(
    model: nn.Module,
    runs: Sequence[ModuleRun],
    findings: Sequence[str] | None = None,
    pairs: Sequence[Proposal] = (),
) -> BlocksNotFound:
    """Return the error for a model without blocks: how they are recognised, which lists were seen, and what may be named.

    Args:
        model: the model that was searched.
        runs: its candidates.
        findings: for each candidate, why a forward pass showed that it is no chain of blocks.
        pairs: blocks that a forward pass suggests.
    """
    seen = (
        []
        if runs
        else [f"The model has no list of such modules; its parts are {top_level(model)}."]
    )
    if runs and findings is not None:
        lines = "".join(
            f"\n  {run.where} ({run}): {finding}"
            for run, finding in zip(runs, findings, strict=True)
        )
        seen.append(f"Its lists of modules are no blocks:{lines}")
    boundaries = propose_boundaries(model)
    if boundaries:
        seen.append("It calls attention and MLP separately, so that no module is a block.")
    elif any(map(is_list_of_lists, model.children())):
        seen.append(
            "It calls attention and MLP separately, so that no module is a block, and the last block may end where the model "
            "returns, which has a name only inside another module: measure a model that contains this one."
        )
    single = [run for run in find_runs(model) if run.depth == 1]
    if single:
        seen.append("A list of one block with attention is measured if it is named.")
    message = "\n".join(
        [f"no residual blocks found in {type(model).__name__}. {RECOGNISED}", *seen]
    )
    listed = proposals(model, runs) if findings is None else pairs
    return BlocksNotFound(message, [*listed, *proposals(model, single), *boundaries])


def _runs_of(container: str, module: nn.Module) -> Iterator[ModuleRun]:
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    stretch: list[tuple[str, nn.Module]] = []
    for name, child in children:
        if stretch and not _follows(module, *stretch[-1], name, child):
            yield from _run(container, stretch, children)
            stretch = []
        stretch.append((name, child))
    yield from _run(container, stretch, children)


def _follows(
    holder: nn.Module, before: str, first: nn.Module, name: str, second: nn.Module
) -> bool:
    """Whether two children that were registered one after the other are of one class and in one list."""
    if type(first) is not type(second):
        return False
    if isinstance(holder, LISTS):
        return True
    a, b = (re.fullmatch(r"(.*?)(\d+)", entry) for entry in (before, name))
    return a is not None and b is not None and a[1] == b[1] and int(a[2]) + 1 == int(b[2])


def _run(
    container: str,
    stretch: Sequence[tuple[str, nn.Module]],
    children: Sequence[tuple[str, nn.Module]],
) -> Iterator[ModuleRun]:
    modules = [child for _, child in stretch]
    if len(modules) < 2 or isinstance(modules[0], (nn.ModuleList, nn.ModuleDict)):
        return
    if not all(map(has_matrices, modules)):
        return
    prefix = f"{container}." if container else ""
    # A module may be in a list several times
    first = {id(child): name for name, child in reversed(stretch)}
    names = tuple(f"{prefix}{name}" for name, child in stretch if first[id(child)] == name)
    yield ModuleRun(
        container, names, type(modules[0]).__name__, len(stretch) == len(children), len(stretch)
    )


def propose_boundaries(model: nn.Module) -> list[Proposal]:
    """Propose the boundaries between blocks of every list of lists that may contain attention (vit-pytorch, x-transformers).

    It assumes that each block begins at the input of its first module, and that the last block ends at the input of the norm
    next to the list, or at the output of the module that contains the list. The measurement checks both.
    """
    return [
        line for name, module in model.named_modules() if (line := _proposal(model, name, module))
    ]


def _proposal(model: nn.Module, name: str, layers: nn.Module) -> Proposal | None:
    if not is_list_of_lists(layers):
        return None
    children = list(layers.children())
    # Attention and MLP in turn are two entries a block: the classes repeat after so many.
    classes = [tuple(type(part).__name__ for part in child.modules()) for child in children]
    period = next(
        p for p in range(1, len(classes) + 1) if classes == classes[:p] * (len(classes) // p)
    )
    first = _first(children[0])
    if period == len(classes) or first is None:
        return None
    attends = any(map(named_attention, sum(classes, ())))
    if not attends and not has_matrices(model.get_submodule(f"{name}.0.{first}")):
        return None
    holder, _, _ = name.rpartition(".")
    prefix = f"{holder}." if holder else ""
    siblings = model.get_submodule(holder).named_children()
    norms = [child for child, module in siblings if "norm" in type(module).__name__.lower()]
    if len(norms) > 1 or not (norms or holder):
        return None
    end = f"input of {prefix}{norms[0]}" if norms else f"output of {holder}"
    every = f"{len(classes)}" if period == 1 else f"0, {len(classes)}, {period}"
    starts = [f"input of {name}.{i}.{first}" for i in range(0, len(classes), period)]
    return Proposal(
        f'[f"input of {name}.{{i}}.{first}" for i in range({every})] + ["{end}"]',
        [*starts, end],
        f"{starts[0]} to {end}",
        f"{len(starts)} blocks of {period} x {type(children[0]).__name__} in {name}",
    )


def is_list_of_lists(layers: nn.Module) -> bool:
    """Whether a module is a list of two lists or more, which have no forward pass that would make each a block."""
    children = list(layers.children())
    plain = (nn.ModuleList, nn.Sequential)
    return (
        type(layers) is nn.ModuleList
        and len(children) > 1
        and all(type(child) in plain for child in children)
    )


def _first(module: nn.Module) -> str | None:
    """Return the path of the first module that is not a list, inside nested lists; None if a list is empty."""
    path: list[str] = []
    while type(module) in (nn.ModuleList, nn.Sequential):
        entries: Iterator[tuple[str, nn.Module | None]] = iter(module._modules.items())
        name, first = next(entries, ("", None))
        if first is None:
            return None
        path, module = [*path, name], first
    return ".".join(path)


def top_level(model: nn.Module) -> str:
    """Name the model's own children, with their classes, for a message."""
    return (
        ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        or "none"
    )
