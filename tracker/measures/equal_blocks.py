"""Layers whose blocks are coupled by construction: one module that is called again, or modules whose weights are alike.

The attribute `equal_blocks` names their layers, each group with spaces between, and the share of the parameters that are alike:

    one module: 1 3, 2 4; alike weights (67%): 1 2 3 4            "none" if all blocks differ

*One module* is also said of modules of one class that share all their weights (tied): they stay equal however long they are
trained. Matrices of one name are *alike* in two modules if they are one tensor, or if their cosine is far above what two
independent draws have, 1 / sqrt(numbers). The means of rows and columns, which training may give to all blocks, are subtracted
first. `nn.TransformerEncoder` makes its layers as copies of one, which training moves apart slowly. A group is the layers
that share such matrices, one with the next.
Weights are compared where a model holds them whole: those that are sharded over ranks, offloaded or quantized are not, and
neither are blocks between boundaries.

Cost: at most 65,536 numbers of every matrix.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from tracker.linalg.transfer import to_arrays
from tracker.model.recording import Recording
from tracker.model.weights import is_plain
from tracker.model.wrappers import unwrap

ATTRIBUTE, NONE = "equal_blocks", "none"
ONE_MODULE, ALIKE_WEIGHTS = "one module", "alike weights"
Groups = list[list[int]]  # of layers, from 1

# Rows and columns of a matrix that are compared, at most. Of 64, training may leave a cosine of 0.21 where that of all is 0.04.
SIDE = 256
ALIKE = 0.2  # cosine; in a model that trained, such as `nano`, it was at most 0.05
STANDARD_DEVIATIONS = 6  # of the cosine of independent draws, for matrices with fewer numbers
LEAST = 0.01  # of the parameters


def equal_blocks(recording: Recording) -> str:
    """Return the attribute `equal_blocks` of a recorded pass."""
    replica = recording.calls[0].replica
    if replica.description.spans:
        return NONE
    tree = unwrap(replica.model)
    modules = [tree.get_submodule(call.name) for call in recording.calls]
    identities = [_identity(module) for module in modules]
    one_module = _groups(identities)
    found = [f"{ONE_MODULE}: {_written(one_module)}"] if one_module else []
    # The first module of each identity: one that is called again is not compared with itself.
    different = dict(zip(reversed(identities), reversed(modules), strict=True))
    numbers = {identity: i for i, identity in enumerate(different)}
    of_layers = [numbers[identity] for identity in identities]
    shares = shares_alike(list(different.values()))
    _, connected = connected_components(shares > LEAST)
    for group in _groups([int(connected[i]) for i in of_layers]):
        members = sorted({of_layers[layer - 1] for layer in group})
        if len(members) > 1:
            of_pairs = shares[members][:, members]
            share = (of_pairs.sum() - of_pairs.trace()) / (len(members) * (len(members) - 1))
            found.append(f"{ALIKE_WEIGHTS} ({share:.0%}): {_written([group])}")
    return "; ".join(found) or NONE


@dataclass(frozen=True)
class Group:
    """Layers of one module, or with alike weights, and the share of their parameters that is alike."""

    one_module: bool
    layers: list[int]
    share: str


_PART = re.compile(r"([a-z ]+?)(?: \((\d+%)\))?: ([\d ,]+)")


def read_equal_blocks(text: str) -> list[Group]:
    """Return the groups of layers that the attribute names.

    >>> read_equal_blocks("one module: 1 3; alike weights (67%): 1 2 3")
    [Group(one_module=True, layers=[1, 3], share='100%'), Group(one_module=False, layers=[1, 2, 3], share='67%')]
    >>> read_equal_blocks("none")
    []
    """
    # Earlier versions wrote "equal weights", without a share.
    parts = [read.groups() for read in map(_PART.fullmatch, text.split("; ")) if read]
    return [
        Group(kind == ONE_MODULE, list(map(int, layers.split())), share or "100%")
        for kind, share, groups in parts
        for layers in groups.split(", ")
    ]


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


def shares_alike(modules: Sequence[nn.Module]) -> Float[ndarray, "M M"]:
    """Return the share of the parameters of each two modules that is in alike matrices."""
    of_modules = [_matrices(module) for module in modules]
    named: dict[str, dict[int, Tensor]] = {}
    for i, matrices in enumerate(of_modules):
        for name, matrix in matrices.items():
            kind = f"{name} {matrix.shape} {matrix.device}"
            named.setdefault(kind, {})[i] = matrix
    named = {name: holders for name, holders in named.items() if len(holders) > 1}
    # One copy to the host, which waits for it
    alike = to_arrays({name: _are_alike(list(holders.values())) for name, holders in named.items()})
    numbers = np.zeros((len(modules), len(modules)))
    for name, holders in named.items():
        at = list(holders)
        numbers[np.ix_(at, at)] += holders[at[0]].numel() * alike[name]
    sizes = [sum(matrix.numel() for matrix in matrices.values()) for matrices in of_modules]
    return numbers / np.maximum(1, np.maximum.outer(sizes, sizes))


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """Return the matrices among a module's weights that it holds whole: vectors begin as ones or zeros."""
    return {
        name: weight.detach()
        for name, weight in module.named_parameters()
        if is_plain(weight) and sum(size > 1 for size in weight.shape) > 1
    }


def _are_alike(matrices: Sequence[Tensor]) -> Bool[Tensor, "M M"]:
    """Whether each two matrices have a cosine that independent draws do not have, by some of their numbers."""
    flat = [matrix.squeeze().flatten(1) for matrix in matrices]
    every_row, every_column = (-(-size // SIDE) for size in flat[0].shape)
    parts = torch.stack([matrix[::every_row, ::every_column].float() for matrix in flat])
    free = (parts.shape[1] - 1) * (parts.shape[2] - 1)
    parts = parts - parts.mean(-1, keepdim=True)
    parts = (parts - parts.mean(-2, keepdim=True)).flatten(1)
    parts = parts / torch.linalg.vector_norm(parts, dim=-1, keepdim=True)
    return parts @ parts.mT > max(ALIKE, STANDARD_DEVIATIONS / free**0.5)
