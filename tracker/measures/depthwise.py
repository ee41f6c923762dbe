"""Depth-wise coupling of token rows, and the measures of single blocks at these rows.

    A^{l l'} = U^{l'}_K^T J^l_{tt} V^{l'}_K        for every token row (sample, t) and every pair of blocks (l, l')

The Jacobians are formed from d products with the block, decomposed (`svd`) and multiplied with the bases of all blocks. `plan`
says how many rows pass through the blocks together, and where their Jacobians wait for the bases.

If the final norm is included, the last block with the norm is measured as layer L + 1. Measures that end in `_normed` use it as
the last layer. The cost is (L + 1) / L times the cost of the blocks alone.

Measures of each block alone (`measure_blocks`) are those of the blocks without the final norm. One Jacobian at a time is held,
from the first block to the last and, for products to the last block, in the other direction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.linalg.svd import Triplets, each
from tracker.linalg.transfer import to_arrays
from tracker.measures import coupling, single_blocks
from tracker.measures.block_products import Products
from tracker.measures.coupling import LEVEL, MISCOUPLINGS
from tracker.measures.declaration import DIAGNOSTICS, NORMED
from tracker.measures.layers import Layer, kept_arrays, layers_of
from tracker.measures.plan import Plan
from tracker.measures.post_norm import SHARES, most_are_singular, singular_shares
from tracker.measures.rotations import frames, mean_levels, turned
from tracker.measures.settings import OF_PAIRS
from tracker.model.recording import Recording

SPECTRA = {  # variable -> part of the triplets
    "singular_value": "S",
    f"{DIAGNOSTICS}singular_gap": "gap",
    f"{DIAGNOSTICS}full_svd": "full",
    f"{DIAGNOSTICS}residual": "residual",
    f"{DIAGNOSTICS}complete": "complete",
}
CHECKS = {  # variable -> type
    "sliced": bool,
    "value_error": np.float32,
    "derivative_error": np.float32,
    "independent_error": np.float32,
}
AT_ONCE = 1 << 20  # entries of coupling matrices that are reduced to mis-couplings at once


def depthwise_couplings(
    jacobians: Jacobians, selected: Sequence[tuple[Recording, Rows]], plan: Plan
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the coupling measures of each selected row of the recordings, with the dimensions of `registry.DIMS`."""
    for group in groups_of_rows(selected, plan.rows):
        # In a function, so that the Jacobians of a group are freed before those of the next are formed.
        arrays = _couplings(jacobians, group, plan)
        for r in range(sum(len(rows) for _, rows in group)):
            yield {name: value[r] for name, value in arrays.items()}


def _couplings(
    jacobians: Jacobians, group: Sequence[tuple[Recording, Rows]], plan: Plan
) -> dict[str, np.ndarray]:
    """Return the coupling measures of rows that are measured together, by row."""
    L, measures = plan.L, plan.measures
    calls = [[(call, rows) for call in recording.measured] for recording, rows in group]
    blocks = [list(selections) for selections in zip(*calls, strict=True)]
    layers = layers_of(jacobians, blocks, plan)
    values = pairs(layers, plan.ks, measures, L=L)
    if jacobians.through_norms is None:
        values[SHARES] = singular_shares(jacobians, layers[:L], blocks)
    of_calls = {"": layers[:L]}
    if len(layers) > L:
        # The last Jacobian is of the last block with the final norm: in this convention it takes the last block's place.
        of_calls[NORMED] = [*layers[: L - 1], layers[L]]
    for end, chosen in of_calls.items():
        values |= {f"{name}{end}": value for name, value in spectra(chosen, SPECTRA).items()}
    values |= measure_blocks(layers[:L], blocks[:L], measures)
    # All arrays of a device in one copy, which waits for it once.
    arrays = to_arrays(values)
    if SHARES in arrays:
        jacobians.through_norms = most_are_singular(arrays.pop(SHARES))
    for end, chosen in of_calls.items():
        arrays |= {f"{name}{end}": value for name, value in _checks(chosen).items()}
    arrays |= kept_arrays(layers[:L], plan.keep)
    return arrays


def spectra(layers: Sequence[Layer], parts: Mapping[str, str]) -> dict[str, Tensor]:
    """Return parts of the triplets, by name, and the declared parts of null levels, of every row, by layer."""
    triplets = [layer.triplets for layer in layers]
    values = {name: _stacked(triplets, part) for name, part in parts.items()}
    alignment = torch.stack([(of_layer.U * of_layer.V).sum(-2) for of_layer in triplets], 1)
    values["alignment"] = torch.where(_stacked(triplets, "determined"), alignment, torch.nan)
    values["isotropic"] = torch.stack([layer.moments.isotropic for layer in layers], 1)
    return values


def _stacked(triplets: Sequence[Triplets], part: str) -> Tensor:
    return torch.stack([getattr(of_layer, part) for of_layer in triplets], 1)


def _checks(layers: Sequence[Layer]) -> dict[str, np.ndarray]:
    """Return the checks of the Jacobians of every row, by layer."""
    by_row = list(zip(*(layer.checks for layer in layers), strict=True))
    return {
        f"{DIAGNOSTICS}{name}": np.array(
            [[getattr(check, name) for check in of_row] for of_row in by_row], dtype
        )
        for name, dtype in CHECKS.items()
    }


def pairs(
    layers: Sequence[Layer],
    ks: Sequence[int],
    measures: Sequence[str] = (),
    bases: Sequence[Triplets] | None = None,
    L: int | None = None,
) -> dict[str, Tensor]:
    """Return all couplings, over (row, k, layer, layer_other).

    Args:
        measures: "vju" adds the mis-couplings with U and V of the bases swapped; "matrices" adds A for the smallest K, over
            (row, layer, layer_other, row, column).
        bases: the triplets whose singular vectors are the bases; None: those of the layers.
        L: the number of layers. If `layers` has one more, that one replaces layer L in measures that end in `_normed`.
    """
    of_layers = [layer.triplets for layer in layers]
    U, V, S_bases = (_stacked(of_layers if bases is None else bases, part) for part in "UVS")
    S = _stacked(of_layers, "S")
    A, swapped, in_frames = _products(layers, U, V, "vju" in measures, L)
    values = _measures(A, S, S_bases, layers, in_frames, U, V, ks)
    if L is not None and len(layers) > L:
        values = _both_conventions(values, L)
    if swapped is not None:
        alone = slice(0, L)
        of_swapped = swapped, S[:, alone], S_bases[:, alone], layers[alone], in_frames[:, alone]
        values_of_swapped = _measures(*of_swapped, V[:, alone], U[:, alone], ks)
        values |= {f"{name}_vju": value for name, value in values_of_swapped.items()}
    if "matrices" in measures:
        values["matrix"] = A[:, :L, :L, : ks[0], : ks[0]]
    return values


def _products(
    layers: Sequence[Layer], U: Tensor, V: Tensor, swap: bool, L: int | None
) -> tuple[Float[Tensor, "R L M K K"], Float[Tensor, "R l m K K"] | None, Tensor]:
    """Return A of every Jacobian in every basis, A with the sides swapped of the first L, and every Jacobian in frames."""
    F = frames(U.shape[-2]).to(U)
    # All bases side by side: one product with J for all pairs of a block, in place of L small ones.
    right, left = coupling.side_by_side(V), coupling.side_by_side(U[:, :L])
    A, swapped, in_frames = [], [], []
    for l, layer in enumerate(layers):
        J = layer.jacobian()
        A.append(coupling.in_bases(U, J @ right))
        in_frames.append(turned(J, F))
        # Not for the last block with the final norm, of which no swapped sides are measured
        if swap and l < (L or len(layers)):
            swapped.append(coupling.in_bases(V[:, :L], J @ left))
    return torch.stack(A, 1), torch.stack(swapped, 1) if swap else None, torch.stack(in_frames, 1)


def _measures(
    A: Float[Tensor, "R L M K K"],
    S: Float[Tensor, "R L K"],
    S_bases: Float[Tensor, "R M K"],
    layers: Sequence[Layer],
    in_frames: Tensor,
    U: Float[Tensor, "R M d K"],
    V: Float[Tensor, "R M d K"],
    ks: Sequence[int],
) -> dict[str, Tensor]:
    """Return the mis-couplings, and the null levels that are measured, (R, k, L, M)."""
    parts = []
    d = U.shape[-2]
    # A part of the rows at a time: each K makes copies of A.
    for r in range(0, len(A), at_once := max(1, AT_ONCE // A[0].numel())):
        A_, S_, bases = A[r : r + at_once], S[r : r + at_once], S_bases[r : r + at_once]
        by_k = [coupling.miscouplings(A_[..., :k, :k], S_[..., :k], d, bases[..., :k]) for k in ks]
        parts.append(
            {name: torch.stack([values[name] for values in by_k], 1) for name in MISCOUPLINGS}
        )
    values = {name: torch.cat([part[name] for part in parts]) for name in MISCOUPLINGS}
    moments = [layer.moments for layer in layers]  # (R,) each
    of_layers = each(lambda *of_all: torch.stack(of_all, 1), *moments)
    for name, level in mean_levels(in_frames, S, of_layers, U, V, ks).items():
        values[f"{name}{LEVEL}"] = torch.where(values[name].isnan(), torch.nan, level)
    return values


def _both_conventions(values: dict[str, Tensor], L: int) -> dict[str, Tensor]:
    """Return the values of the first L layers and, as `_normed`, those where layer L + 1 replaces layer L."""
    alone = {name: _without_layer(value, L) for name, value in values.items()}
    return alone | {
        f"{name}{NORMED}": _without_layer(value, L - 1) for name, value in values.items()
    }


def _without_layer(values: Tensor, l: int) -> Tensor:
    """Leave layer l, from 0, out of values over (row, k, layer, layer_other)."""
    for axis in (2, 3):
        after = values.narrow(axis, l + 1, values.shape[axis] - l - 1)
        values = torch.cat([values.narrow(axis, 0, l), after], axis)
    return values


def groups_of_rows(
    selected: Sequence[tuple[Recording, Rows]], size: int
) -> Iterator[list[tuple[Recording, Rows]]]:
    """Yield the rows in their order, in groups of at most `size`."""
    group, free = [], size
    for recording, rows in selected:
        start = 0
        while start < len(rows):
            part = rows.subset(slice(start, start + free))
            group.append((recording, part))
            start, free = start + len(part.sample), free - len(part.sample)
            if free == 0:
                yield group
                group, free = [], size
    if group:
        yield group


@dataclass(frozen=True)
class BlockRows:
    """One block at R rows: its Jacobians, the states x that enter it and the updates f(x) that it adds."""

    layer: Layer
    x: Float[Tensor, "R d"]
    f: Float[Tensor, "R d"]

    @cached_property
    def J(self) -> Float[Tensor, "R d d"]:
        """The Jacobians."""
        return self.layer.jacobian()

    @cached_property
    def Jx(self) -> Float[Tensor, "R d"]:
        """J x, the change of f to first order if x alone grows."""
        return (self.J @ self.x[..., None])[..., 0]


def measure_blocks(
    layers: Sequence[Layer], blocks: Sequence[Sequence[CallRows]], choices: Sequence[str]
) -> dict[str, Tensor]:
    """Return the measures that some choices of `measures=` ask for, over (row, layer, ...).

    Args:
        blocks: the recorded calls of each block, with the rows of each.
    """
    # Rows of states are selected, and Jacobians formed again, only where a measure needs them.
    if not set(choices).difference(OF_PAIRS):
        return {}
    declared = [measure for measure in single_blocks.DECLARED if measure.option in choices]
    like = layers[0].triplets.V
    products = None
    if "products" in choices:
        products = Products(len(layers), like.shape[-2], like.shape[-1], like.dtype)
    by_name: dict[str, list[Tensor]] = {measure.name: [] for measure in declared}
    for l, (layer, selections) in enumerate(zip(layers, blocks, strict=True), 1):
        x = torch.cat([rows.select(call.x).to(like) for call, rows in selections])
        y = torch.cat([rows.select(call.y).to(like) for call, rows in selections])
        block = BlockRows(layer, x, y - x)
        for measure in declared:
            assert measure.compute is not None
            by_name[measure.name].append(measure.compute(block))
        if products is not None:
            products.add(l, block.J)
    values = {name: torch.stack(of_layers, 1) for name, of_layers in by_name.items()}
    # The products to the last block begin there, so they need the Jacobians a second time, in the other order.
    if products is not None:
        values |= products.values(lambda l: layers[l - 1].jacobian())
    return values
