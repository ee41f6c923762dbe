"""Find the runs of blocks in a model's module tree, and which tower each belongs to, without a forward pass.

A *run* is a stretch of neighbours in a ModuleList or Sequential that each hold an attention module. The elements of a run
that hold runs of blocks themselves are stages, and the runs inside them stand in their place. A *tower* is the largest
module that holds one run and no other: the vision tower of a vision-language model, an encoder, a stage.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Run:
    """Neighbours in one container that each hold attention; names are qualified names in the model."""

    container: str
    names: tuple[str, ...]
    kind: str  # the blocks' class; several are joined by "/"
    whole: bool  # whether it is all that the container holds
    tower: str = ""  # "" is the whole model
    tower_kind: str = ""

    def __str__(self) -> str:
        where = f" in {self.tower} ({self.tower_kind})" if self.tower and self.tower != self.container else ""
        return f"{len(self.names)} x {self.kind}{where}"

    @property
    def line(self) -> str:
        """The argument that chooses this run."""
        return f"blocks={self.container if self.whole and self.container else list(self.names)!r}"


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DataParallel and DistributedDataParallel wrappers."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def find_runs(model: nn.Module) -> list[Run]:
    """All runs of blocks, in the order in which the model registers them; single blocks in a list of their own as well."""
    modules = dict(model.named_modules())
    attention = [name for name, module in modules.items() if name and _is_attention(name, module)]
    attending = {name[:end] for name in attention for end in _ends(name)}
    found = [run for name in modules for run in _stretches(name, modules, attending)]
    outer = [run for run in found if not any(_inside(run.container, name) for other in found for name in other.names)]
    runs = [run for top in outer for run in _resolved(top, found, modules, attention)]
    return [_with_tower(run, runs, modules) for run in runs]


def tower_of(names: Sequence[str], runs: Sequence[Run]) -> str:
    """The largest module that holds the blocks of these names and none of the other runs."""
    others = [run.container for run in runs if not related(run, names)]
    parts = names[0].split(".")[:-1]
    while parts and not all(_inside(name, ".".join(parts)) for name in names):
        parts.pop()
    for end in range(len(parts)):
        holder = ".".join(parts[:end])
        if not any(_inside(other, holder) for other in others):
            return holder
    return ".".join(parts)


def related(run: Run, names: Sequence[str]) -> bool:
    """Whether the run shares modules with the blocks of these names."""
    return any(_inside(a, b) or _inside(b, a) for a in run.names for b in names)


def nested(run: Run, names: Sequence[str]) -> bool:
    """Whether the run lies within one of the modules of these names."""
    return any(_inside(run.container, name) for name in names)


def class_attention(run: Run) -> bool:
    """Whether its blocks change the class token alone, by what their class is called (CaiT, XCiT)."""
    return re.search(r"class_?(attn|attention|block)", run.kind.lower()) is not None


_CLASS_TOKENS = {"cls_token", "class_token", "class_embedding", "cls_embed", "cls_embedding", "classification_token"}


def class_token_parameter(model: nn.Module, names: Sequence[str], runs: Sequence[Run]) -> str | None:
    """The class token's parameter in the tower of these blocks; None where it says that it pools over the patches.

    That it comes first, and reaches the model's output, is confirmed when the model is measured (`reach`).
    """
    path = tower_of(names, runs)
    tower = model.get_submodule(path)
    holders = names[0].split(".")[
        :-1
    ]  # not what stands beside the blocks: a stem of convolutions has a pooling of its own
    for part in (model.get_submodule(".".join(holders[:depth])) for depth in range(len(holders) + 1)):
        if getattr(part, "global_pool", "token") not in ("token", ""):  # timm
            return None
        if getattr(part, "pool", None) == "mean":  # vit-pytorch
            return None
        if getattr(getattr(part, "config", None), "use_mean_pooling", False):  # BEiT and those made after it
            return None
    for name, part in tower.named_modules():
        # An attention pool keeps a query of its own under such a name: it is not among the blocks' tokens.
        if not _named_attention(type(part).__name__):
            for token in _CLASS_TOKENS & {key for key, value in part._parameters.items() if value is not None}:
                return _join(_join(path, name) if name else path, token)
    return None


def norms_around(model: nn.Module, names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Norm layers beside the blocks or beside a module that holds them, nearest first, those after the blocks first.

    Where the same module holds another run, only those registered between the blocks and the next run.
    """
    others = [run.container for run in runs if not related(run, names)]
    found: list[str] = []
    parts = names[-1].split(".")
    for depth in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:depth])
        holder = model.get_submodule(path)
        children = list(holder._modules)
        at = children.index(parts[depth])
        rivals = [i for i, child in enumerate(children) if any(_inside(o, _join(path, child)) for o in others)]
        after = children[at + 1 : min((i for i in rivals if i > at), default=len(children))]
        for child in after if rivals else after + children[:at]:
            name = _join(path, child)
            if name not in names and "norm" in type(holder._modules[child]).__name__.lower():
                found.append(name)
    return found


def _stretches(container: str, modules: dict[str, nn.Module], attending: set[str]) -> Iterator[Run]:
    if not isinstance(modules[container], (nn.ModuleList, nn.Sequential)):
        return
    children = [_join(container, child) for child, _ in modules[container].named_children()]
    stretch: list[str] = []
    for name in [*children, None]:
        if name is not None and name in attending and not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            stretch.append(name)
        elif stretch:
            kinds = dict.fromkeys(type(unwrap(modules[element])).__name__ for element in stretch)
            yield Run(container, tuple(stretch), "/".join(kinds), stretch == children)
            stretch = []


def _resolved(run: Run, found: Sequence[Run], modules: dict[str, nn.Module], attention: Sequence[str]) -> list[Run]:
    """The run itself, or the runs inside it if its elements are stages; nothing if it is a single module and no block."""
    within = [other for other in found if other is not run and nested(other, run.names)]
    direct = [
        other for other in within if not any(nested(other, third.names) for third in within if third is not other)
    ]
    inner = [r for other in direct for r in _resolved(other, found, modules, attention)]
    if len(run.names) > 1:  # a block may hold a list of attentions: its heads, or its own and a crossed one
        inner = [other for other in inner if all(_is_block(name, modules, attention) for name in other.names)]
    if any(len(other.names) > 1 for other in inner):
        return inner
    return [run] if len(run.names) > 1 or all(_is_block(name, modules, attention) for name in run.names) else []


def _is_block(name: str, modules: dict[str, nn.Module], attention: Sequence[str]) -> bool:
    """Whether a module holds attention and a linear map besides it, as an MLP has, rather than attention alone."""
    held = [other for other in attention if other != name and _inside(other, name)]
    linear = (
        f"{name}.{path}"
        for path, module in modules[name].named_modules()
        if path and any(p is not None and p.dim() > 1 for p in module._parameters.values())
    )
    return bool(held) and any(not any(_inside(path, other) for other in held) for path in linear)


def _is_attention(name: str, module: nn.Module) -> bool:
    """By its class, or by what the module that holds it calls it."""
    called = name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    return _named_attention(type(module).__name__) or (
        called and any(isinstance(m, nn.Linear) for m in module.modules())
    )


def _named_attention(kind: str) -> bool:
    return "attention" in kind.lower() or "attn" in kind.lower()


def _with_tower(run: Run, runs: Sequence[Run], modules: dict[str, nn.Module]) -> Run:
    tower = tower_of(run.names, runs)
    return Run(run.container, run.names, run.kind, run.whole, tower, type(unwrap(modules[tower])).__name__)


def _ends(name: str) -> list[int]:
    return [i for i, character in enumerate(name) if character == "."] + [len(name)]


def _inside(name: str, holder: str) -> bool:
    return holder == "" or name == holder or name.startswith(f"{holder}.")


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child
