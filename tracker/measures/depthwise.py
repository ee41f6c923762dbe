"""Depth-wise coupling of token rows.

    A^{l l'} = U^{l'}_K^T J^l_{tt} V^{l'}_K        for every token row (sample, t) and every pair of blocks (l, l')

There are two methods. *Dense* forms every Jacobian from d products with the block, decomposes it (`svd`) and multiplies it
with the bases. *Matrix-free* computes the triplets from products with J and J^T (`krylov`) and each block's pairs from L K
more products, without forming a Jacobian. It needs two passes over the blocks, because the pairs of a block need the bases
of all blocks. The dense method needs two passes only where the Jacobians of all blocks fit neither into the memory budget nor,
beside an accelerator, into the host's memory.

Columns that each block is multiplied with:

    dense           d
    matrix-free     2 n + L K + 2 K + 80        n: columns of the Krylov iteration

The matrix-free method estimates the moments of J that the null levels need (`layers`).

If the final norm is included, the last block with the norm is measured as layer L + 1. Measures that end in `_normed` use it as
the last layer. The cost is (L + 1) / L times the cost of the blocks alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.capture.recording import BlockCall, Recording, host_memory
from tracker.common.values import Method
from tracker.jacobians.halves import HalfJacobians
from tracker.jacobians.rows import PROBES, Jacobians, Rows
from tracker.linalg.krylov import basis_fits, basis_size, expected_columns
from tracker.linalg.svd import Triplets
from tracker.linalg.transfer import to_arrays
from tracker.measures import coupling
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.directions import heads
from tracker.measures.kept import kept_arrays
from tracker.measures.layers import SQUARES, Layer, dense_layers, layer_on_host, matrix_free_layer, recomputed_layer
from tracker.measures.null_levels import overlap
from tracker.measures.of_blocks import measure_blocks, scalars_of_row, steps
from tracker.measures.registry import MISCOUPLINGS, NORMED

AT_ONCE = 1 << 20  # entries of coupling matrices that are reduced to mis-couplings at once


def measured_calls(recording: Recording) -> list[BlockCall]:
    """Return the calls whose Jacobians are measured.

    These are the calls of all blocks and, if the measures include the final norm, the last one with it.
    """
    return recording.calls if recording.normed_last is None else [*recording.calls, recording.normed_last]


def is_matrix_free(recording: Recording, ks: Sequence[int], method: Method, memory: int) -> bool:
    """Return whether to measure rows without forming Jacobians: as requested, or because it is expected to be faster.

    The number of rows is no part of the choice, so that a prompt gets the same method whatever else is measured.
    """
    x, K = recording.calls[0].x, max(ks)
    d = x.shape[-1]
    if method != "auto" or not basis_fits(d, K):
        return method == "matrix-free" and basis_fits(d, K)
    # On an accelerator a product of few columns takes as long to launch as a wide one, and the small problems are the host's.
    if recording.calls[0].replica.device.type != "cpu" and fits(recording, memory):
        return False
    columns = matrix_free_columns(d, len(measured_calls(recording)), K, x.dtype)
    # A product with few columns reads all weights of a block, so a column costs more than in a wide product: on two cores
    # at d = 2048 to 4096, 1.6 times as much for one row in products of 16 columns, and 1.3 times for four rows. The factor
    # 1 + 1 / R approximates this for R rows. Two rows are assumed: of all constants it wastes least where there is one row, or
    # many, at most 1.5 times the time. The dense method costs 0.7 d columns of a wide product, decomposition included,
    # because it skips the last layers (`identity`).
    return 1.5 * columns < 0.7 * d


def matrix_free_columns(d: int, L: int, K: int, dtype: torch.dtype) -> int:
    """Return the expected number of columns that the matrix-free method multiplies a block's Jacobian with."""
    return 2 * expected_columns(d, K, dtype) + (L + 2) * K + PROBES + SQUARES


def rows_at_once(recording: Recording, ks: Sequence[int], method: Method, memory: int) -> int:
    """Return how many rows to measure together so that their arrays fit into `memory` scalars."""
    d, L, K = recording.calls[0].x.shape[-1], len(measured_calls(recording)), max(ks)
    if not is_matrix_free(recording, ks, method, memory):
        return _dense_rows_at_once(recording, K, memory)
    return max(1, memory // (d * (3 * L * K + 2 * basis_size(d, K))))


def fits(recording: Recording, memory: int) -> bool:
    """Return whether `memory` scalars, or the host, can keep all blocks' Jacobians at one row; if not, J V takes another pass."""
    return _scalars_of_row(recording) <= max(memory, _host_scalars(recording))


def _scalars_of_row(recording: Recording) -> int:
    return len(measured_calls(recording)) * recording.calls[0].x.shape[-1] ** 2


def _host_scalars(recording: Recording) -> int:
    """Return how many scalars of an accelerator's Jacobians the host's memory may keep."""
    call = recording.calls[0]
    return 0 if call.replica.device.type == "cpu" else host_memory() // call.x.itemsize


def scalars_of_pairs(recording: Recording, K: int) -> int:
    """Return the scalars that the matrices A of all pairs of blocks take at one row, each block's and all together, and those
    that the overlaps of singular vectors take.
    """
    blocks = len(measured_calls(recording))
    return 2 * (blocks * K) ** 2 + 4 * blocks * K**2


def _dense_rows_at_once(recording: Recording, K: int, memory: int, extras: Sequence[str] = ()) -> int:
    """Return how many rows' arrays fit: Jacobians of all blocks or, if only the host or no memory holds them, of one block."""
    of_all, d = _scalars_of_row(recording), recording.calls[0].x.shape[-1]
    beside = scalars_of_row(extras, d)
    if of_all <= memory:
        return max(1, memory // (of_all + scalars_of_pairs(recording, K) + beside))
    of_one = max(1, memory // (d**2 + beside))
    return min(of_one, _host_scalars(recording) // of_all) if fits(recording, memory) else of_one


def depthwise_steps(recording: Recording, ks: Sequence[int], method: Method, memory: int, extras: Sequence[str]) -> int:
    """Return how often `Jacobians.advance` counts each row.

    Per block: the Jacobian and its singular vectors, and in a second pass over the blocks the products.
    """
    kept = fits(recording, memory) and not is_matrix_free(recording, ks, method, memory)
    per_block = 2 if kept else 3 + ("vju" in extras)
    return len(measured_calls(recording)) * per_block + (0 if kept else steps(extras, len(recording.calls)))


def depthwise_couplings(
    jacobians: Jacobians,
    selected: Sequence[tuple[Recording, Rows]],
    ks: Sequence[int],
    method: Method,
    memory: int,
    extras: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the coupling measures of each selected row of the recordings, with the dimensions of `registry.DIMS`.

    Args:
        extras: as in `pairs`, and choices of measures of blocks.
        keep: as in `kept.kept_arrays`.
    """
    first = selected[0][0]
    rows = sum(len(rows) for _, rows in selected)
    matrix_free = is_matrix_free(first, ks, method, memory)
    beside = scalars_of_row(extras, first.calls[0].x.shape[-1])
    free = max(1, memory // beside) if beside else rows
    at_once = min(rows, free) if matrix_free else _dense_rows_at_once(first, max(ks), memory, extras)
    halves = HalfJacobians(jacobians) if "halves" in extras else None
    for group in _groups(selected, at_once):
        calls = [[(call, rows) for call in measured_calls(recording)] for recording, rows in group]
        blocks = [list(selections) for selections in zip(*calls, strict=True)]
        if not matrix_free and _scalars_of_row(first) <= memory:
            layers = dense_layers(jacobians, blocks, max(ks), method, memory)
        else:
            dense_layer = layer_on_host if fits(first, memory) else recomputed_layer
            layer_of = matrix_free_layer if matrix_free else dense_layer
            layers = [layer_of(jacobians, selections, max(ks), method, memory) for selections in blocks]
        L = len(first.calls)
        values = pairs(layers, ks, extras, L=L)
        of_calls = {"": layers[:L]} | ({NORMED: [*layers[: L - 1], layers[L]]} if len(layers) > L else {})
        for end, chosen in of_calls.items():
            values |= {f"{name}{end}": value for name, value in _spectra(chosen, ks).items()}
        head = heads(group) if "directions" in extras else None
        how = (extras, head, memory // 2, halves, min(ks))
        values |= measure_blocks(layers[:L], blocks[:L], *how)
        arrays = to_arrays(values)
        for end, chosen in of_calls.items():
            arrays |= {f"{name}{end}": value for name, value in _checks(chosen).items()}
        arrays |= kept_arrays(layers[:L], keep)
        jacobians.without_halves |= halves.missing if halves else {}
        for r in range(len(layers[0].triplets.S)):
            yield {name: value[r] for name, value in arrays.items()}


def of_null_levels(layers: Sequence[Layer], ks: Sequence[int]) -> dict[str, Tensor]:
    """Return what the null levels need of every row, by layer: moments of the Jacobians, overlaps of the singular vectors."""
    U, V, determined = (
        torch.stack([getattr(l.triplets, part) for l in layers], 1) for part in ("U", "V", "determined")
    )
    of_bases = overlap(U, V, ks)
    parts = {"isotropic": "isotropic", "symmetric_norm": "symmetric", "antisymmetric_norm": "antisymmetric"}
    values = {name: torch.stack([getattr(l.moments, part) for l in layers], 1) for name, part in parts.items()}
    return values | {
        "alignment": torch.where(determined, of_bases.diagonal, torch.nan),
        "overlap_squares": of_bases.squares.transpose(1, 2),
        "overlap_fourths": of_bases.fourths.transpose(1, 2),
    }


def _spectra(layers: Sequence[Layer], ks: Sequence[int]) -> dict[str, Tensor]:
    """Return the singular values, certificates and parts of null levels of every row, by layer."""
    parts = {"singular_gap": "gap", "full_svd": "full", "residual": "residual", "complete": "complete"}
    parts = {"singular_value": "S"} | {f"{DIAGNOSTICS}{name}": part for name, part in parts.items()}
    spectra = {name: torch.stack([getattr(l.triplets, part) for l in layers], 1) for name, part in parts.items()}
    return spectra | of_null_levels(layers, ks)


def _checks(layers: Sequence[Layer]) -> dict[str, np.ndarray]:
    """Return the checks of the Jacobians of every row, by layer."""
    R = len(layers[0].checks)
    values = {"formed": np.array([[layer.formed[r] for layer in layers] for r in range(R)])}
    values["sliced"] = np.array([[layer.checks[r].sliced for layer in layers] for r in range(R)])
    for name in ("value_error", "derivative_error", "independent_error"):
        values[name] = np.array([[getattr(l.checks[r], name) for l in layers] for r in range(R)], np.float32)
    return {f"{DIAGNOSTICS}{name}": value for name, value in values.items()}


def pairs(
    layers: Sequence[Layer],
    ks: Sequence[int],
    extras: Sequence[str] = (),
    bases: Sequence[Triplets] | None = None,
    L: int | None = None,
) -> dict[str, Tensor]:
    """Return all couplings, over (row, k, layer, layer_other).

    Args:
        extras: "vju" adds the mis-couplings with U and V of the bases swapped; "matrices" adds A for the smallest K, over
            (row, layer, layer_other, row, column).
        bases: the triplets whose singular vectors are the bases; None: those of the layers.
        L: the number of layers. If `layers` has one more, that one replaces layer L in measures that end in `_normed`.
    """
    bases = [layer.triplets for layer in layers] if bases is None else bases
    U, V, S_bases = (torch.stack([getattr(triplets, part) for triplets in bases], 1) for part in "UVS")
    S = torch.stack([layer.triplets.S for layer in layers], 1)
    A = _coupling_matrices(layers, U, V)
    swapped = _coupling_matrices(layers[:L], V[:, :L], U[:, :L]) if "vju" in extras else None
    parts = []
    for r in range(0, len(A), at_once := max(1, AT_ONCE // A[0].numel())):
        some = slice(r, r + at_once)
        values = _measures_by_k(A[some], S[some], S_bases[some], U.shape[-2], ks)
        if L is not None and len(layers) > L:
            values = _both_conventions(values, L)
        if swapped is not None:
            swapped_values = _measures_by_k(swapped[some], S[some, :L], S_bases[some, :L], U.shape[-2], ks)
            values |= {f"{name}_vju": swapped_values[name] for name in MISCOUPLINGS}
        parts.append(values)
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
    return values | ({"matrix": A[:, :L, :L, : ks[0], : ks[0]]} if "matrices" in extras else {})


def _both_conventions(values: dict[str, Tensor], L: int) -> dict[str, Tensor]:
    """Return the values of the first L layers and, as `_normed`, those where layer L + 1 replaces layer L."""
    alone = {name: _without_layer(value, L) for name, value in values.items()}
    return alone | {f"{name}{NORMED}": _without_layer(value, L - 1) for name, value in values.items()}


def _without_layer(values: Tensor, l: int) -> Tensor:
    """Leave layer l, from 0, out of values over (row, k, layer, layer_other)."""
    for axis in (2, 3):
        after = values.narrow(axis, l + 1, values.shape[axis] - l - 1)
        values = torch.cat([values.narrow(axis, 0, l), after], axis)
    return values


def _coupling_matrices(layers: Sequence[Layer], U: Tensor, V: Tensor) -> Float[Tensor, "R L M K K"]:
    """Return A of every Jacobian in every basis."""
    columns = coupling.side_by_side(V)
    return torch.stack([coupling.in_bases(U, layer.product(columns)) for layer in layers], 1)


def _measures_by_k(A: Tensor, S: Tensor, S_basis: Tensor, d: int, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return the mis-couplings, (R, k, L, M)."""
    by_k = [coupling.miscouplings(A[..., :k, :k], S[..., :k], d, S_basis[..., :k]) for k in ks]
    return {name: torch.stack([values[name] for values in by_k], 1) for name in by_k[0]}


def _groups(selected: Sequence[tuple[Recording, Rows]], size: int) -> Iterator[list[tuple[Recording, Rows]]]:
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
