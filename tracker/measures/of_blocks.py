"""Measures of each block's Jacobian, state and update at R token rows, and of the products of all blocks.

They are those of the blocks without the final norm. Each Jacobian is asked for once from the first block to the last and, for
products to the last block, once in the other direction; one at a time is held, so that layers that do not keep theirs
(`layers`) form them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.jacobians.halves import HalfJacobians
from tracker.jacobians.restriction import CallRows
from tracker.linalg.svd import Triplets
from tracker.measures import depth_use, normality
from tracker.measures.directions import LastStates, measure_directions
from tracker.measures.halves import half_values
from tracker.measures.layers import Layer
from tracker.measures.plan import FORMING
from tracker.measures.products import Products
from tracker.measures.settings import CHOICES

DECLARED = (*depth_use.DECLARED, *normality.DECLARED)  # values of each block at each token
MEASURED_HERE = tuple(option.name for option in CHOICES if option.of_jacobians)  # of `measures=` that are computed here


@dataclass(frozen=True)
class BlockRows:
    """One block at R rows: its Jacobians, the states x that enter it and the updates f(x) that it adds."""

    layer: Layer
    x: Float[Tensor, "R d"]
    f: Float[Tensor, "R d"]
    forms: bool

    @property
    def triplets(self) -> Triplets:
        """The top K singular triplets of J."""
        return self.layer.triplets

    @cached_property
    def J(self) -> Float[Tensor, "R d d"]:
        """The Jacobians."""
        return self.layer.jacobian()

    @cached_property
    def Jx(self) -> Float[Tensor, "R d"]:
        """J x, the change of f to first order if x alone grows."""
        x = self.x[..., None]
        return (self.J @ x if self.forms else self.layer.product(x))[..., 0]


def measured(choices: Sequence[str]) -> tuple[str, ...]:
    """Return those of some choices that are computed here."""
    return tuple(choice for choice in MEASURED_HERE if choice in choices)


def measure_blocks(
    layers: Sequence[Layer],
    blocks: Sequence[Sequence[CallRows]],
    choices: Sequence[str],
    head: LastStates | None = None,
    memory: int = 1 << 30,
    halves: HalfJacobians | None = None,
    K: int = 1,
) -> dict[str, Tensor]:
    """Return the measures that some choices of `measures=` ask for, over (row, layer, ...).

    Args:
        blocks: the recorded calls of each block, with the rows of each.
        head: the model's head, for the words of directions.
        memory: bytes that logits may take.
        halves: the Jacobians of blocks' halves, at the smallest number K of singular vectors.
    """
    if not measured(choices):
        return {}
    declared = [measure for measure in DECLARED if measure.option in choices]
    like = layers[0].triplets.V
    products = Products(len(layers), like.shape[-2], like.shape[-1], like.dtype) if "products" in choices else None
    forms = bool(FORMING & set(choices))
    by_name: dict[str, list[Tensor]] = {measure.name: [] for measure in declared}
    for l, (layer, selections) in enumerate(zip(layers, blocks, strict=True), 1):
        x, y = (torch.cat([rows.select(getattr(call, of)).to(like) for call, rows in selections]) for of in "xy")
        block = BlockRows(layer, x, y - x, forms)
        for measure in declared:
            assert measure.compute is not None
            by_name[measure.name].append(measure.compute(block))
        if halves is not None and "halves" in choices:
            for name, value in half_values(halves(selections, block.J), layer.triplets, K).items():
                by_name.setdefault(name, []).append(value)
        if products is not None:
            products.add(l, block.J)
    values = {name: torch.stack(of_layers, 1) for name, of_layers in by_name.items()}
    if head is not None and "directions" in choices:
        values |= measure_directions(head, [layer.triplets for layer in layers], memory)
    if products is not None:
        values |= products.values(lambda l: layers[l - 1].jacobian())
    return values
