"""Depth-wise coupling of token rows.

    A^{l l'} = U^{l'}_K^T J^l_{tt} V^{l'}_K        for every token row (sample, t) and every pair of blocks (l, l')

There are two methods. *Dense* forms every Jacobian from d products with the block, decomposes it (`svd`) and multiplies it
with the bases. *Matrix-free* computes the triplets from products with J and J^T (`krylov`) and each block's pairs from L K
more products, without forming a Jacobian. It needs two passes over the blocks, because the pairs of a block need the bases
of all blocks. The dense method needs two passes only where the Jacobians of all blocks fit neither into the memory budget nor,
beside an accelerator, into the host's memory.

Columns that each block is multiplied with:

    dense           d
    matrix-free     2 n + L K + 2 K + 64        n: columns of the Krylov iteration

The matrix-free method estimates |J|_F, which the null levels need: exactly on the K triplets, and from 64 random products
on the rest, as in Hutch++ (Meyer et al. 2021).

If the last block includes the final norm, that block without the norm is measured as layer L + 1. Measures that end in
`_raw` use it as the last layer. The cost is (L + 1) / L times the cost of one convention.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.capture.recording import BlockCall, Recording
from tracker.capture.spill import host_memory, to_host
from tracker.jacobians.restriction import Selection
from tracker.jacobians.rows import PROBES, CheckResults, Jacobians, Rows, Sketch
from tracker.linalg.krylov import basis_fits, basis_size, expected_columns
from tracker.linalg.svd import Triplets, triplets_by_products, triplets_of_each
from tracker.measures import coupling
from tracker.measures.registry import MISCOUPLINGS
from tracker.values import Method


@dataclass(frozen=True)
class Layer:
    """Singular triplets, norms and products of one block's Jacobians at R rows.

    Attributes:
        product: V (R, d, m) -> J V (R, d, m).
        frobenius: |J|_F.
        checks: the checks of the Jacobian at each row.
        formed: whether the Jacobian was formed entry by entry.
    """

    triplets: Triplets
    product: Callable[[Tensor], Tensor]
    frobenius: Float[Tensor, " R"]
    checks: list[CheckResults]
    formed: bool


def measured_calls(recording: Recording) -> list[BlockCall]:
    """Return the calls whose Jacobians are measured.

    These are the calls of all blocks and, if the last one includes the final norm, the last one without it.
    """
    return recording.calls if recording.raw_last is None else [*recording.calls, recording.raw_last]


def is_matrix_free(recording: Recording, R: int, ks: Sequence[int], method: Method) -> bool:
    """Return whether to measure R rows without forming Jacobians: as requested, or because it is expected to be faster."""
    x, K = recording.calls[0].x, max(ks)
    d = x.shape[-1]
    columns = matrix_free_columns(d, len(measured_calls(recording)), K, x.dtype)
    # A product with few columns reads all weights of a block, so a column costs more than in a wide product: on two cores
    # at d = 2048 to 4096, 1.6 times as much for one row in products of 16 columns, and 1.3 times for four rows. The factor
    # 1 + 1 / R approximates this. The dense method costs 0.7 d columns of a wide product, decomposition included, because
    # it skips the last layers (`identity`).
    return basis_fits(d, K) and (method == "matrix-free" or (method == "auto" and (1 + 1 / R) * columns < 0.7 * d))


def matrix_free_columns(d: int, L: int, K: int, dtype: torch.dtype) -> int:
    """Return the expected number of columns that the matrix-free method multiplies a block's Jacobian with."""
    return 2 * expected_columns(d, K, dtype) + (L + 2) * K + PROBES


def rows_at_once(recording: Recording, ks: Sequence[int], method: Method, memory: int) -> int:
    """Return how many rows to measure together so that their arrays fit into `memory` scalars."""
    d, L, K = recording.calls[0].x.shape[-1], len(measured_calls(recording)), max(ks)
    rows = max(1, memory // (d * (3 * L * K + 2 * basis_size(d, K))))
    return rows if is_matrix_free(recording, rows, ks, method) else _dense_rows_at_once(recording, memory)


def fits(recording: Recording, memory: int) -> bool:
    """Return whether `memory` scalars, or the host, can keep all blocks' Jacobians at one row; if not, J V takes another pass."""
    return _scalars_of_row(recording) <= max(memory, _host_scalars(recording))


def _scalars_of_row(recording: Recording) -> int:
    return len(measured_calls(recording)) * recording.calls[0].x.shape[-1] ** 2


def _host_scalars(recording: Recording) -> int:
    """Return how many scalars of an accelerator's Jacobians the host's memory may keep."""
    call = recording.calls[0]
    return 0 if call.replica.device.type == "cpu" else host_memory() // call.x.itemsize


def _dense_rows_at_once(recording: Recording, memory: int) -> int:
    """Return how many rows' Jacobians fit: those of all blocks or, if only the host or no memory holds them, of one block."""
    of_all = _scalars_of_row(recording)
    if of_all <= memory:
        return memory // of_all
    of_one = max(1, memory // recording.calls[0].x.shape[-1] ** 2)
    return min(of_one, _host_scalars(recording) // of_all) if fits(recording, memory) else of_one


def depthwise_couplings(
    jacobians: Jacobians,
    selected: Sequence[tuple[Recording, Rows]],
    ks: Sequence[int],
    method: Method,
    memory: int,
    extras: Sequence[str] = (),
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the coupling measures of each selected row of the recordings, with the dimensions of `registry.DIMS`.

    Args:
        extras: as in `pairs`.
    """
    first = selected[0][0]
    rows = sum(len(rows.sample) for _, rows in selected)
    matrix_free = is_matrix_free(first, rows, ks, method)
    for group in _groups(selected, rows if matrix_free else _dense_rows_at_once(first, memory)):
        calls = [[(call, rows) for call in measured_calls(recording)] for recording, rows in group]
        blocks = [list(selections) for selections in zip(*calls, strict=True)]
        if not matrix_free and _scalars_of_row(first) <= memory:
            layers = _dense(jacobians, blocks, max(ks), method)
        else:
            dense_layer = _layer_on_host if fits(first, memory) else _recomputed_layer
            layer_of = _matrix_free_layer if matrix_free else dense_layer
            layers = [layer_of(jacobians, selections, max(ks), method) for selections in blocks]
        L = len(first.calls)
        for r, values in enumerate(pairs(layers, ks, extras, L=L)):
            values |= _spectra_and_checks(layers[:L], r)
            if len(layers) > L:
                raw = _spectra_and_checks([*layers[: L - 1], layers[L]], r)
                values |= {f"{name}_raw": value for name, value in raw.items()}
            yield {name: value.cpu().numpy() for name, value in values.items()}


def _spectra_and_checks(layers: Sequence[Layer], r: int) -> dict[str, Tensor]:
    """Return the singular values at row r, and the certificates and checks of triplets and Jacobians, by layer."""
    parts = {"singular_value": "S", "singular_gap": "gap", "full_svd": "full"}
    parts |= {name: name for name in ("residual", "complete")}
    values = {name: torch.stack([getattr(layer.triplets, part)[r] for layer in layers]) for name, part in parts.items()}
    values["formed"] = torch.tensor([layer.formed for layer in layers])
    for name in ("sliced", "value_error", "derivative_error"):
        values[name] = torch.tensor([getattr(layer.checks[r], name) for layer in layers])
    return values


def pairs(
    layers: Sequence[Layer],
    ks: Sequence[int],
    extras: Sequence[str] = (),
    bases: Sequence[Triplets] | None = None,
    L: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return all couplings of every row, over (k, layer, layer_other).

    Args:
        extras: "vju" adds the mis-couplings with U and V of the bases swapped; "matrices" adds A for the smallest K, over
            (layer, layer_other, row, column).
        bases: the triplets whose singular vectors are the bases; None: those of the layers.
        L: the number of layers. If `layers` has one more, that one replaces layer L in measures that end in `_raw`.
    """
    bases = [layer.triplets for layer in layers] if bases is None else bases
    U, V, S_bases = (torch.stack([getattr(triplets, part) for triplets in bases], 1) for part in "UVS")
    S, frobenius = torch.stack([l.triplets.S for l in layers], 1), torch.stack([l.frobenius for l in layers], 1)
    A = _coupling_matrices(layers, U, V)
    swapped = _coupling_matrices(layers[:L], V[:, :L], U[:, :L]) if "vju" in extras else None
    rows = []
    for r, (A_r, S_r, S_basis, norm) in enumerate(zip(A, S, S_bases, frobenius, strict=True)):
        values = _measures_by_k(A_r, S_r, S_basis, norm, U.shape[-2], ks)
        if L is not None and len(layers) > L:
            values = _both_conventions(values, L)
        if swapped is not None:
            swapped_values = _measures_by_k(swapped[r], S_r[:L], S_basis[:L], norm[:L], U.shape[-2], ks)
            values |= {f"{name}_vju": swapped_values[name] for name in MISCOUPLINGS}
        if "matrices" in extras:
            values["matrix"] = A_r[:L, :L, : ks[0], : ks[0]]
        rows.append(values)
    return rows


def _both_conventions(values: dict[str, Tensor], L: int) -> dict[str, Tensor]:
    """Return the values of the first L layers and, as `_raw`, those where layer L + 1 replaces layer L."""
    result = {name: _select_layers(value, range(L)) for name, value in values.items()}
    raw = {name: _select_layers(value, [*range(L - 1), L]) for name, value in values.items()}
    for name in MISCOUPLINGS:
        result |= {f"{name}_raw": raw[name], f"{name}_raw_null": raw[f"{name}_null"]}
    return result


def _select_layers(values: Tensor, layers: Sequence[int]) -> Tensor:
    """Select layers of values over (k, layer) or (k, layer, layer_other)."""
    at = torch.tensor(layers, device=values.device)
    return values[:, at] if values.dim() == 2 else values[:, at[:, None], at]


def _coupling_matrices(layers: Sequence[Layer], U: Tensor, V: Tensor) -> Float[Tensor, "R L M K K"]:
    """Return A of every Jacobian in every basis."""
    columns = coupling.side_by_side(V)
    return torch.stack([coupling.in_bases(U, layer.product(columns)) for layer in layers], 1)


def _measures_by_k(
    A: Tensor, S: Tensor, S_basis: Tensor, frobenius: Tensor, d: int, ks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the mis-couplings, (k, L, M), and their null levels, (k, L)."""
    by_k = [
        coupling.miscouplings(A[..., :k, :k], S[:, :k], d, S_basis[:, :k])
        | {f"{name}_null": level for name, level in coupling.null_levels(S[:, :k], frobenius, d).items()}
        for k in ks
    ]
    return {name: torch.stack([values[name] for values in by_k]) for name in by_k[0]}


def _groups(selected: Sequence[tuple[Recording, Rows]], size: int) -> Iterator[list[tuple[Recording, Rows]]]:
    """Yield the rows in their order, in groups of at most `size`."""
    group, free = [], size
    for recording, rows in selected:
        start = 0
        while start < len(rows.sample):
            part = rows.subset(slice(start, start + free))
            group.append((recording, part))
            start, free = start + len(part.sample), free - len(part.sample)
            if free == 0:
                yield group
                group, free = [], size
    if group:
        yield group


def _dense(
    jacobians: Jacobians, blocks: Sequence[Sequence[Selection]], K: int, method: Method, on_host: bool = False
) -> list[Layer]:
    """Return layers that keep their Jacobians, on the device or in the host's memory."""
    Js, checks = zip(*(_form_jacobians(jacobians, selections) for selections in blocks), strict=True)
    triplets = triplets_of_each(Js, K, "auto" if method == "matrix-free" else method)
    kept = map(to_host, Js) if on_host else Js
    products = [lambda V, J=J: J.to(V.device, non_blocking=True) @ V for J in kept]
    return [
        Layer(of_block, product, torch.linalg.matrix_norm(J), checks_of_block, True)
        for of_block, J, product, checks_of_block in zip(triplets, Js, products, checks, strict=True)
    ]


def _form_jacobians(
    jacobians: Jacobians, selections: Sequence[Selection]
) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
    Js, checks = zip(*jacobians(selections), strict=True)
    return Js[0] if len(Js) == 1 else torch.cat(Js), _for_each_row(checks, selections)


def _layer_on_host(jacobians: Jacobians, selections: Sequence[Selection], K: int, method: Method) -> Layer:
    return _dense(jacobians, [selections], K, method, on_host=True)[0]


def _recomputed_layer(jacobians: Jacobians, selections: Sequence[Selection], K: int, method: Method) -> Layer:
    """Return a layer that drops its Jacobians and computes its products from the block again."""
    (layer,) = _dense(jacobians, [selections], K, method)
    return replace(layer, product=lambda V: jacobians.sketch(selections).operator.apply(V))


def _matrix_free_layer(jacobians: Jacobians, selections: Sequence[Selection], K: int, method: Method) -> Layer:
    """Return a layer whose triplets come from products, or from the dense Jacobians where the iteration fails."""
    sketch = jacobians.sketch(selections)
    operator, like = sketch.operator, sketch.signs[..., 0]
    triplets = triplets_by_products(operator.apply, operator.apply_transpose, like, K)
    if not triplets.complete.all():
        return _recomputed_layer(jacobians, selections, K, "full")
    product = partial(jacobians.product, selections, sketch.compute_dtype)
    return Layer(triplets, product, _frobenius(sketch, triplets), _for_each_row(sketch.checks, selections), False)


def _frobenius(sketch: Sketch, triplets: Triplets) -> Float[Tensor, " R"]:
    """Estimate |J|_F."""
    U, S, V = triplets.U, triplets.S, triplets.V
    rest = sketch.products - V @ (S[..., None] * (U.mT @ sketch.signs))
    scale = S[:, :1].clamp_min(torch.finfo(S.dtype).tiny)  # squares of tiny entries underflow
    rest = torch.linalg.matrix_norm(rest / scale[..., None] / sqrt(PROBES))
    return scale[:, 0] * torch.hypot(torch.linalg.vector_norm(S / scale, dim=-1), rest)


def _for_each_row(checks: Sequence[CheckResults], selections: Sequence[Selection]) -> list[CheckResults]:
    return [check for check, (_, rows) in zip(checks, selections, strict=True) for _ in rows.sample]
