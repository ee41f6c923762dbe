"""Find the runs of blocks in a model's module tree, and the tower that each belongs to, without a forward pass.

A *run* is a sequence of consecutive modules in a ModuleList or Sequential that each contain an attention module. If the
modules of a run contain runs themselves, they are stages, and the inner runs replace the outer one. A *tower* is the largest
module that contains one run and no other: the vision tower of a vision-language model, an encoder, a stage.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tracker.model.proposals import Proposal


@dataclass(frozen=True)
class ModuleRun:
    """Consecutive modules in one container that each contain attention, by qualified name."""

    container: str
    names: tuple[str, ...]
    block_class: str  # the blocks' class; several are joined by "/"
    fills_container: bool
    depth: int  # entries of the container: more than names, if a module is in it several times
    tower: str = ""  # "" is the whole model
    tower_class: str = ""

    def __str__(self) -> str:
        where = (
            f" in {self.tower} ({self.tower_class})"
            if self.tower and self.tower != self.container
            else ""
        )
        number = (
            f"{self.depth} x "
            if self.depth == len(self.names)
            else f"{self.depth} times {len(self.names)} x "
        )
        return f"{number}{self.block_class}{where}"

    @property
    def where(self) -> str:
        """The container, or the first and the last module if they do not fill it."""
        return (
            self.container
            if self.fills_container and self.container
            else f"{self.names[0]} to {self.names[-1]}"
        )

    @property
    def proposal(self) -> Proposal:
        """The `blocks=` argument that selects this run."""
        blocks = self.container if self.fills_container and self.container else list(self.names)
        return Proposal(repr(blocks), blocks, self.where, str(self))


def find_runs(model: nn.Module) -> list[ModuleRun]:
    """Return all runs of blocks, lists of a single block included, in the order in which the model registers them."""
    modules = dict(model.named_modules())
    attention = [name for name, module in modules.items() if name and _is_attention(name, module)]
    attending = {name[:end] for name in attention for end in _ends(name)}
    candidates = [run for name in modules for run in _stretches(name, modules, attending)]
    outer = [
        run
        for run in candidates
        if not any(_inside(run.container, name) for other in candidates for name in other.names)
    ]
    runs = [run for top in outer for run in _resolved(top, candidates, modules, attention)]
    return [_with_tower(run, runs, modules) for run in runs]


def tower_of(names: Sequence[str], runs: Sequence[ModuleRun]) -> str:
    """Return the path of the largest module that contains the named blocks and none of the other runs."""
    others = [run.container for run in runs if not related(run, names)]
    # From the module next to the blocks outward to the first that holds them all
    parts = names[0].split(".")[:-1]
    while parts and not all(_inside(name, ".".join(parts)) for name in names):
        parts.pop()
    # From the whole model inward to the first that holds no other run
    for end in range(len(parts)):
        holder = ".".join(parts[:end])
        if not any(_inside(other, holder) for other in others):
            return holder
    return ".".join(parts)


def related(run: ModuleRun, names: Sequence[str]) -> bool:
    """Whether the run shares modules with the named blocks."""
    return any(_inside(a, b) or _inside(b, a) for a in run.names for b in names)


def nested(run: ModuleRun, names: Sequence[str]) -> bool:
    """Whether the run is inside one of the named modules."""
    return any(_inside(run.container, name) for name in names)


def proposals(model: nn.Module, runs: Sequence[ModuleRun]) -> list[Proposal]:
    """Return the `blocks=` argument of each run, after that of all as one chain, if they are the entries of one list."""
    holder = runs[0].container.rpartition(".")[0] if runs else ""
    alike = len({run.container for run in runs}) > 1 and len({run.block_class for run in runs}) == 1
    entries = all(
        run.container.rpartition(".")[0] == holder and run.fills_container for run in runs
    )
    joined = []
    holds_all = alike and entries
    if holds_all and isinstance(model.get_submodule(holder), (nn.ModuleList, nn.Sequential)):
        names = [name for run in runs for name in run.names]
        description = f"{len(names)} x {runs[0].block_class} in {holder or 'the model'}"
        joined = [Proposal(repr(names), names, f"{names[0]} to {names[-1]}", description)]
    return [*joined, *(run.proposal for run in runs)]


def is_class_attention(run: ModuleRun) -> bool:
    """Whether the run's blocks change only the class token, according to their class name (CaiT, XCiT)."""
    return re.search(r"class_?(attn|attention|block)", run.block_class.lower()) is not None


_CLASS_TOKENS = {
    "cls_token",
    "class_token",
    "class_embedding",
    "cls_embed",
    "cls_embedding",
    "classification_token",
}


def class_token_parameter(
    model: nn.Module, names: Sequence[str], runs: Sequence[ModuleRun]
) -> str | None:
    """Return the class token's parameter in these blocks' tower; None if the tower has none, or pools over the patches.

    A measurement checks that the token comes first and reaches the output (`tracker.blocks.reachability`).
    """
    path = tower_of(names, runs)
    tower = model.get_submodule(path)
    # Only modules that contain the blocks: a convolutional stem next to them has its own pooling.
    holders = names[0].split(".")[:-1]
    for part in (
        model.get_submodule(".".join(holders[:depth])) for depth in range(len(holders) + 1)
    ):
        if getattr(part, "global_pool", "token") not in ("token", ""):  # timm
            return None
        if getattr(part, "pool", None) == "mean":  # vit-pytorch
            return None
        # BEiT and its descendants
        if getattr(getattr(part, "config", None), "use_mean_pooling", False):
            return None
    for name, part in tower.named_modules():
        # An attention pool has a query of such a name, which is not one of the blocks' tokens.
        if not named_attention(type(part).__name__):
            for token in _CLASS_TOKENS & {
                key for key, value in part._parameters.items() if value is not None
            }:
                return _join(_join(path, name) if name else path, token)
    return None


def norms_around(model: nn.Module, names: Sequence[str], runs: Sequence[ModuleRun]) -> list[str]:
    """Return norm layers next to the blocks, or next to a module that contains them: the nearest first, those after the blocks
    before those registered earlier.

    In a module that contains another run, only those registered between the blocks and the next run.
    """
    others = [run.container for run in runs if not related(run, names)]
    norms: list[str] = []
    parts = names[-1].split(".")
    for depth in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:depth])
        holder = model.get_submodule(path)
        children = list(holder._modules)
        at = children.index(parts[depth])
        # A norm beyond another run belongs to that one.
        rivals = [
            i
            for i, child in enumerate(children)
            if any(_inside(o, _join(path, child)) for o in others)
        ]
        after = children[at + 1 : min((i for i in rivals if i > at), default=len(children))]
        for child in after if rivals else after + children[:at]:
            name = _join(path, child)
            if name not in names and "norm" in type(holder._modules[child]).__name__.lower():
                norms.append(name)
    return norms


def _stretches(
    container: str, modules: dict[str, nn.Module], attending: set[str]
) -> Iterator[ModuleRun]:
    if not isinstance(modules[container], (nn.ModuleList, nn.Sequential)):
        return
    entries = [child for child in modules[container]._modules.values() if child is not None]
    children = [_join(container, child) for child, _ in modules[container].named_children()]
    stretch: list[str] = []
    # None ends the last stretch.
    for name in [*children, None]:
        # A list that attends holds blocks, and is none itself.
        if name in attending and not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            stretch.append(name)
        elif stretch:
            block_classes = dict.fromkeys(type(modules[element]).__name__ for element in stretch)
            depth = sum(any(entry is modules[name] for name in stretch) for entry in entries)
            yield ModuleRun(
                container, tuple(stretch), "/".join(block_classes), stretch == children, depth
            )
            stretch = []


def _resolved(
    run: ModuleRun,
    candidates: Sequence[ModuleRun],
    modules: dict[str, nn.Module],
    attention: Sequence[str],
) -> list[ModuleRun]:
    """Return the run, or the runs inside it if its modules are stages; nothing if it is a single module that is no block."""
    within = [other for other in candidates if other is not run and nested(other, run.names)]
    direct = [
        other
        for other in within
        if not any(nested(other, third.names) for third in within if third is not other)
    ]
    inner = [r for other in direct for r in _resolved(other, candidates, modules, attention)]
    # A block may contain a list of attentions: heads, or self- and cross-attention
    if run.depth > 1:
        inner = [
            other
            for other in inner
            if all(_is_block(name, modules, attention) for name in other.names)
        ]
    if any(other.depth > 1 for other in inner):
        return inner
    return (
        [run]
        if run.depth > 1 or all(_is_block(name, modules, attention) for name in run.names)
        else []
    )


def _is_block(name: str, modules: dict[str, nn.Module], attention: Sequence[str]) -> bool:
    """Whether a module contains attention and also a linear map outside it, such as an MLP's."""
    inner = [other for other in attention if other != name and _inside(other, name)]
    linear = (
        f"{name}.{path}"
        for path, module in modules[name].named_modules()
        if path and any(p is not None and p.dim() > 1 for p in module._parameters.values())
    )
    return bool(inner) and any(not any(_inside(path, other) for other in inner) for path in linear)


def _is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is attention, by its class name or its attribute name."""
    called = name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    return named_attention(type(module).__name__) or (
        called and any(isinstance(m, nn.Linear) for m in module.modules())
    )


def holds_attention(module: nn.Module) -> bool:
    """Whether a module is attention, or contains it, by class names and attribute names."""
    return any(_is_attention(name, part) for name, part in module.named_modules())


def named_attention(class_name: str) -> bool:
    """Whether a class is attention by its name."""
    return "attention" in class_name.lower() or "attn" in class_name.lower()


def _with_tower(
    run: ModuleRun, runs: Sequence[ModuleRun], modules: dict[str, nn.Module]
) -> ModuleRun:
    tower = tower_of(run.names, runs)
    return replace(run, tower=tower, tower_class=type(modules[tower]).__name__)


def _ends(name: str) -> list[int]:
    return [i for i, character in enumerate(name) if character == "."] + [len(name)]


def _inside(name: str, holder: str) -> bool:
    return holder == "" or name == holder or name.startswith(f"{holder}.")


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child
