"""Find the lists of modules in a module tree that may be a model's blocks, without a forward pass.

A *run* is a sequence of consecutive modules of one container, or of the numbered attributes of a module (block0, block1, ...):

- `runs_with_attention`: each module contains an attention module, known by its class's or attribute's name. If the modules of a
  run contain runs themselves, they are stages, and the inner runs replace the outer one;
- `whole_list`: modules of several classes (attention and convolution, say), of which those runs are a part;
- `possible_runs`: modules of one class with two matrices each outside convolutions and recurrent layers, and lists of several
  classes. Stacks of MLPs are among them: a forward pass tells blocks from them (`judge`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from tracker.model.proposals import Proposal
from tracker.model.state_maps import has_matrices, may_be_block

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)

Entry = tuple[
    int, str, nn.Module
]  # of a module's children: the place among them, the name, the child


@dataclass(frozen=True)
class Run:
    """Consecutive modules of one container, by qualified name."""

    names: tuple[str, ...]  # each once
    classes: tuple[str, ...]
    depth: int  # more than names, if a module is there several times

    @property
    def container(self) -> str:
        """The name of the module that holds them."""
        return parent(self.names[0])

    def __str__(self) -> str:
        times = "" if self.depth == len(self.names) else f"{self.depth} times "
        return f"{times}{len(self.names)} x {'/'.join(self.classes)}"


def runs_with_attention(model: nn.Module) -> list[Run]:
    """Return the runs whose modules contain attention, lists of a single block included, in the order of registration."""
    names = {id(module): name for name, module in model.named_modules()}
    attention = [name for name, part in model.named_modules() if name and _is_attention(name, part)]

    def attends(path: str, holder: nn.Module, entry: Entry) -> bool:
        _, _, child = entry
        # A module that another container holds, too, is in the first alone.
        name = names[id(child)]
        is_own = isinstance(holder, (nn.ModuleList, nn.Sequential)) and parent(name) == path
        # A list that attends holds blocks, and is none itself.
        may_run = is_own and not isinstance(child, WITHOUT_FORWARD)
        return may_run and any(inside(other, name) for other in attention)

    def is_block(name: str) -> bool:
        """Whether a module contains attention and also a linear map outside it, such as an MLP's."""
        within = [other for other in attention if other != name and inside(other, name)]
        linear = (
            f"{name}.{path}"
            for path, part in model.get_submodule(name).named_modules()
            if path and any(p is not None and p.dim() > 1 for p in part._parameters.values())
        )
        return bool(within) and any(
            not any(inside(path, other) for other in within) for path in linear
        )

    runs = [_run(path, stretch) for path, stretch in _stretches(model, attends)]
    kept: list[Run] = []
    # From the innermost outward
    for run in reversed(runs):
        within = [other for other in kept if nested(other, run.names)]
        elsewhere = [other for other in kept if other not in within]
        # A block may contain a list of attentions: heads, or self- and cross-attention.
        stages = [other for other in within if run.depth == 1 or all(map(is_block, other.names))]
        if any(stage.depth > 1 for stage in stages):
            kept = elsewhere + stages
        elif run.depth > 1 or all(map(is_block, run.names)):
            kept = [*elsewhere, run]
        else:
            kept = elsewhere
    return [run for run in runs if run in kept]


def whole_list(model: nn.Module, runs: Sequence[Run]) -> Run | None:
    """Return the run of several classes that all of these runs are a part of; None if there is none."""
    names = {name for run in runs for name in run.names}
    wholes = _runs_of_several_classes(model)
    return next((whole for whole in wholes if names and names <= set(whole.names)), None)


def possible_runs(model: nn.Module) -> list[Run]:
    """Return the runs that may be blocks though nothing in them is named attention, those inside other runs included."""

    def alike(path: str, holder: nn.Module, entry: Entry) -> Any:
        at, name, child = entry
        if isinstance(child, WITHOUT_FORWARD):
            return None
        if isinstance(holder, LISTS):
            return type(child)
        # Numbers of attributes in a row grow as their places do.
        numbered = re.fullmatch(r"(.*?)(\d+)", name)
        return (type(child), numbered[1], int(numbered[2]) - at) if numbered else None

    def multiply(run: Run) -> list[bool]:
        return [has_matrices(model.get_submodule(name)) for name in run.names]

    of_one_class = [_run(path, stretch) for path, stretch in _stretches(model, alike)]
    return [
        # Beside blocks, a list may hold activations and dropout.
        *(run for run in _runs_of_several_classes(model) if any(multiply(run))),
        *(run for run in of_one_class if run.depth > 1 and all(multiply(run))),
    ]


def outermost(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are not inside a module of another run, and no part of another one."""
    return [
        run
        for run in runs
        if not any(nested(run, other.names) or set(run.names) < set(other.names) for other in runs)
    ]


def related(run: Run, names: Sequence[str]) -> bool:
    """Whether the run shares modules with the named blocks."""
    return any(inside(a, b) or inside(b, a) for a in run.names for b in names)


def nested(run: Run, names: Sequence[str]) -> bool:
    """Whether the run is inside one of the named modules."""
    return any(inside(run.container, name) for name in names)


def inside(name: str, holder: str) -> bool:
    """Whether a name is that of a module, or of a part of it."""
    return holder == "" or name == holder or name.startswith(f"{holder}.")


def parent(name: str) -> str:
    """Return the name of the module that holds this one."""
    return name.rpartition(".")[0]


def join(path: str, child: str) -> str:
    """Return the name of a module's child."""
    return f"{path}.{child}" if path else child


def named_attention(class_name: str) -> bool:
    """Whether a class is attention by its name."""
    return "attention" in class_name.lower() or "attn" in class_name.lower()


def is_class_attention(run: Run) -> bool:
    """Whether the run's blocks change only the class token, according to their class name (CaiT, XCiT)."""
    pattern = r"class_?(attn|attention|block)"
    return any(re.search(pattern, name.lower()) for name in run.classes)


def proposal(model: nn.Module, names: Sequence[str]) -> Proposal:
    """Return the `blocks=` argument for modules: their container, if it holds no others."""
    container, names = parent(names[0]), list(names)
    children = [
        join(container, name) for name, _ in model.get_submodule(container).named_children()
    ]
    classes = dict.fromkeys(type(model.get_submodule(name)).__name__ for name in names)
    description = f"{len(names)} x {'/'.join(classes)}"
    if container and children == names:
        return Proposal(repr(container), container, container, description)
    return Proposal(repr(names), names, f"{names[0]} to {names[-1]}", description)


def proposals(model: nn.Module, runs: Sequence[Run]) -> list[Proposal]:
    """Return the `blocks=` argument of each run, after that of all as one chain, if they are the entries of one list."""
    lines = [proposal(model, run.names) for run in runs]
    holders = {parent(run.container) for run in runs}
    if len(runs) < 2 or len(holders) > 1 or len({run.classes for run in runs}) > 1:
        return lines
    fill = all(line.blocks == run.container for line, run in zip(lines, runs, strict=True))
    if fill and isinstance(model.get_submodule(*holders), (nn.ModuleList, nn.Sequential)):
        lines.insert(0, proposal(model, [name for run in runs for name in run.names]))
    return lines


def _stretches(
    model: nn.Module, kind: Callable[[str, nn.Module, Entry], Any]
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield the consecutive children of each module that are of one kind, after the module's name.

    Args:
        kind: of a child, from its holder's name, its holder and its entry; what is false belongs to no stretch.
    """
    for path, holder in model.named_modules():
        children = [(name, child) for name, child in holder._modules.items() if child is not None]
        entries = [(at, name, child) for at, (name, child) in enumerate(children)]
        for of_one_kind, stretch in groupby(entries, partial(kind, path, holder)):
            if of_one_kind:
                yield path, list(stretch)


def _run(path: str, stretch: Sequence[Entry]) -> Run:
    # A module that is there several times has the name of its first place.
    first = {id(child): join(path, name) for _, name, child in reversed(stretch)}
    names = dict.fromkeys(first[id(child)] for _, _, child in stretch)
    classes = dict.fromkeys(type(child).__name__ for _, _, child in stretch)
    return Run(tuple(names), tuple(classes), len(stretch))


def _runs_of_several_classes(model: nn.Module) -> Iterator[Run]:
    """Yield the runs of a list, each from the first to the last entry with attention, or whose class is repeated."""

    def may_be(path: str, holder: nn.Module, entry: Entry) -> bool:
        return isinstance(holder, LISTS) and may_be_block(entry[-1])

    for path, stretch in _stretches(model, may_be):
        counts = Counter(type(child) for _, _, child in stretch)
        certain = [
            at
            for at, (_, _, child) in enumerate(stretch)
            if counts[type(child)] > 1
            or any(_is_attention(name, part) for name, part in child.named_modules())
        ]
        if certain:
            run = _run(path, stretch[certain[0] : certain[-1] + 1])
            if len(run.classes) > 1:
                yield run


def _is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is attention, by its class name or its attribute name."""
    called = name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    return named_attention(type(module).__name__) or (
        called and any(isinstance(m, nn.Linear) for m in module.modules())
    )
