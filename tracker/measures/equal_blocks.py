"""Layers with equal blocks, which are coupled by construction: one module that is called again, or modules with equal weights.

The attribute `equal_blocks` names their layers, each group with spaces between:

    one module: 1 3, 2 4; equal weights: 1 2 3 4            "none" if all blocks differ

*One module* is also said of modules of one class that share all their weights (tied): they stay equal however long they are
trained. Modules with *equal weights* may become different: `nn.TransformerEncoder` makes its layers as copies of one.
Weights are compared where a model holds them whole: those that are sharded over ranks, offloaded or quantized are not, and
neither are blocks between boundaries.

Cost: eight numbers of every block, and all weights of the blocks that agree in those.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from tracker.model.recording import Recording
from tracker.model.weights import is_plain
from tracker.model.wrappers import unwrap

ATTRIBUTE, NONE = "equal_blocks", "none"
ONE_MODULE, EQUAL_WEIGHTS = "one module", "equal weights"
Groups = list[list[int]]  # of layers, from 1

FEW = 8  # numbers of a block that are compared first


def equal_blocks(recording: Recording) -> str:
    """Return the attribute `equal_blocks` of a recorded pass."""
    replica = recording.calls[0].replica
    if replica.description.spans:
        return NONE
    tree = unwrap(replica.model)
    modules = [tree.get_submodule(call.name) for call in recording.calls]
    identities = [_identity(module) for module in modules]
    one_module = _groups(identities)
    # The first module of each identity: one that is called again is not compared with itself.
    different = dict(zip(reversed(identities), reversed(modules), strict=True))
    label = dict(zip(different, _labels_of_weights(list(different.values())), strict=True))
    equal = _groups([label[identity] for identity in identities])
    found = {
        ONE_MODULE: one_module,
        # Layers of one module have equal weights, too, which is said once.
        EQUAL_WEIGHTS: [group for group in equal if group not in one_module],
    }
    named = [f"{kind}: {_written(groups)}" for kind, groups in found.items() if groups]
    return "; ".join(named) or NONE


def read_equal_blocks(text: str) -> Mapping[str, Groups]:
    """Return the groups of layers of each kind that the attribute names.

    >>> read_equal_blocks("one module: 1 3, 2 4; equal weights: 1 2 3 4")
    {'one module': [[1, 3], [2, 4]], 'equal weights': [[1, 2, 3, 4]]}
    >>> read_equal_blocks("none")
    {'one module': [], 'equal weights': []}
    """
    found: dict[str, Groups] = {ONE_MODULE: [], EQUAL_WEIGHTS: []}
    for part in text.split("; "):
        kind, _, groups = part.partition(": ")
        if groups:
            found[kind] = [[int(layer) for layer in group.split()] for group in groups.split(", ")]
    return found


def _written(groups: Groups) -> str:
    return ", ".join(" ".join(map(str, group)) for group in groups)


def _groups(labels: Sequence[Hashable]) -> Groups:
    """Return the layers, from 1, of each label that several layers have."""
    layers: dict[Hashable, list[int]] = {}
    for layer, label in enumerate(labels, 1):
        layers.setdefault(label, []).append(layer)
    return [group for group in layers.values() if len(group) > 1]


def _identity(module: nn.Module) -> Hashable:
    """Return what modules that are one have in common: their class and weights, or the module itself without weights."""
    weights = tuple(map(id, module.parameters()))
    return (type(module), weights) if weights else id(module)


def _labels_of_weights(modules: Sequence[nn.Module]) -> list[int]:
    """Return a number for each module, the same for those whose weights are equal."""
    # Modules with the same first numbers, of which no two have equal weights: comparing all of them takes long.
    alike: dict[Hashable, list[int]] = {}
    labels = []
    for i, (module, beginning) in enumerate(zip(modules, _first_numbers(modules), strict=True)):
        # Weights that are not compared are equal to no other's.
        others = [] if beginning is None else alike.setdefault((type(module), beginning), [])
        equal = next((j for j in others if _have_equal_weights(module, modules[j])), i)
        if equal == i:
            others.append(i)
        labels.append(equal)
    return labels


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _first_numbers(modules: Sequence[nn.Module]) -> list[tuple[float, ...] | None]:
    """Return the first numbers of each module's first matrix; None if its weights are not compared."""
    # Of matrices, which are drawn at random: vectors begin as ones or zeros.
    matrices = [
        next((p.detach() for p in module.parameters() if p.dim() > 1 and p.numel()), None)
        for module in modules
    ]
    rows = {
        i: matrix[(0,) * (matrix.dim() - 1)][:FEW].float()  # not every device has float64
        for i, (module, matrix) in enumerate(zip(modules, matrices, strict=True))
        if matrix is not None and all(map(is_plain, _tensors(module).values()))
    }
    of_devices: dict[torch.device, list[int]] = {}
    for i, row in rows.items():
        of_devices.setdefault(row.device, []).append(i)
    found: dict[int, tuple[float, ...]] = {}
    for places in of_devices.values():
        # One wait for each device, and not for each block
        numbers = iter(torch.cat([rows[i] for i in places]).tolist())
        for i in places:
            found[i] = tuple(islice(numbers, len(rows[i])))
    return [found.get(i) for i in range(len(modules))]


def _have_equal_weights(module: nn.Module, other: nn.Module) -> bool:
    first, second = _tensors(module), _tensors(other)
    return first.keys() == second.keys() and all(
        a.shape == second[name].shape and torch.equal(a, second[name].to(a))
        for name, a in first.items()
    )
