"""What may be named where no module is a block: the boundaries between blocks whose parts are in a list of lists.

A model that calls attention and MLP itself keeps them so (vit-pytorch, x-transformers). An inner list has no forward pass, so no
module maps a state to the next one.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from tracker.blocks.candidates import Run, join, named_attention, parent, proposals
from tracker.model.proposals import BlocksNotFound, Proposal, between
from tracker.model.state_maps import has_matrices

RECOGNISED = (
    "A block is recognised by an attention module in it: a class whose name contains 'attention' or 'attn', or an attribute "
    "attn, attention, self_attn or self_attention that contains a Linear. Without such names, a list of modules of one class "
    "is recognised in the forward pass of a measurement: each module takes and returns (batch, tokens, width), takes the "
    "output of the one before it, and its output at one token depends on other tokens."
)
_PLAIN_LISTS = (nn.ModuleList, nn.Sequential)


def nothing_found(
    model: nn.Module, lines: Sequence[Proposal], single: Sequence[Run], failed: str = ""
) -> BlocksNotFound:
    """Return the error for a model without blocks: how they are recognised, what was seen, and what may be named.

    Args:
        model: the model that was searched.
        lines: what may be named of its lists of modules.
        single: its lists of one block.
        failed: which lists a forward pass showed to be no blocks, and why.
    """
    said = [f"no residual blocks found in {type(model).__name__}. {RECOGNISED}"]
    if failed:
        said.append(f"Its lists of modules are no blocks:{failed}")
    elif not lines:
        said.append(f"The model has no list of such modules; its parts are {top_level(model)}.")
    boundaries = [line for name, _ in model.named_modules() for line in _boundaries(model, name)]
    if boundaries or any(map(_is_list_of_lists, model.children())):
        said.append(
            "It calls attention and MLP separately, so that no module is a block. Where the last block ends with what the model "
            "returns, that has a name only inside another module: measure a model that contains this one."
        )
    if single:
        said.append("A list of one block with attention is measured if it is named.")
    return BlocksNotFound("\n".join(said), [*lines, *proposals(model, single), *boundaries])


def _boundaries(model: nn.Module, name: str) -> Iterator[Proposal]:
    """Propose the boundaries between blocks of a list of lists that may contain attention.

    It assumes that each block begins at the input of its first module, and that the last block ends at the input of the norm
    next to the list, or at the output of the module that contains the list. The measurement checks both.
    """
    layers, holder = model.get_submodule(name), parent(name)
    if not _is_list_of_lists(layers):
        return
    # Attention and MLP in turn are two entries a block: the classes repeat after so many.
    entries = list(layers.children())
    classes = [tuple(type(part).__name__ for part in entry.modules()) for entry in entries]
    depth = len(entries)
    period = next(p for p in range(1, depth + 1) if classes == classes[:p] * (depth // p))
    path, part = [], entries[0]
    while part is not None and type(part) in _PLAIN_LISTS:
        child, part = next(iter(part._modules.items()), ("", None))
        path.append(child)
    # Without a first module, what the next one is given may be no state of the model: the sum that a post-norm takes.
    if period == depth or part is None:
        return
    if not any(map(named_attention, sum(classes, ()))) and not has_matrices(part):
        return
    siblings = model.get_submodule(holder).named_children()
    norms = [child for child, module in siblings if "norm" in type(module).__name__.lower()]
    if len(norms) > 1 or not (norms or holder):
        return
    end = f"input of {join(holder, norms[0])}" if norms else f"output of {holder}"
    starts = [f"input of {name}.{i}.{'.'.join(path)}" for i in range(0, depth, period)]
    contents = f"{len(starts)} blocks of {period} x {type(entries[0]).__name__} in {name}"
    yield between([*starts, end], contents)


def _is_list_of_lists(layers: nn.Module) -> bool:
    """Whether a module is a list of two lists or more, which have no forward pass that would make each a block."""
    entries = list(layers.children())
    alike = all(type(entry) in _PLAIN_LISTS for entry in entries)
    return type(layers) is nn.ModuleList and len(entries) > 1 and alike


def top_level(model: nn.Module) -> str:
    """Name the model's own children, with their classes, for a message."""
    children = (f"{name} ({type(child).__name__})" for name, child in model.named_children())
    return ", ".join(children) or "none"
