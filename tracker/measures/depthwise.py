"""Depth-wise coupling of token rows: J^l_tt of every block l, its top singular triplets, and A for every pair (l, l').

Two ways. *Dense*: every Jacobian is formed from d products of the block, decomposed (`svd`) and multiplied. *Matrix-free*:
the triplets come from some products with J and J^T (`krylov`), the pairs from L K more, and no Jacobian is ever formed;
the blocks are gone through twice, as all bases have to be known before the first pair. (So they are in the dense way
where the Jacobians of all blocks do not fit into memory at once.) It takes

    2 n + L K + 2 K + 64 columns        n: those of the Krylov iteration

in place of d.

Where the final norm is counted as part of the last block, that block without it is measured too, as one Jacobian more:
measures that end in `_raw` have it in the last layer's place, and everything else as it is. The cost is (L + 1) / L times
that of one convention. |J|_F, which the null levels need, is then an estimate: the K triplets exactly, the rest from 64 random
products, as in Hutch++ (Meyer et al. 2021).
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
from tracker.jacobians.restriction import Selection
from tracker.jacobians.rows import PROBES, CheckResults, Jacobians, Rows, Sketch
from tracker.linalg.krylov import basis_fits, basis_size, expected_columns
from tracker.linalg.svd import Triplets, triplets_by_products, triplets_of_each
from tracker.measures import coupling
from tracker.measures.registry import MISCOUPLINGS
from tracker.values import Method


@dataclass(frozen=True)
class Layer:
    """What the pairs need of one block, at R rows."""

    triplets: Triplets
    product: Callable[[Tensor], Tensor]  # (R, d, m) -> (R, d, m): J V
    frobenius: Float[Tensor, " R"]
    checks: list[CheckResults]  # one for each row
    formed: bool  # the Jacobian, entry by entry


def measured_calls(recording: Recording) -> list[BlockCall]:
    """The calls whose Jacobians are found: all blocks, and after them the last one without the final norm, if that is in it."""
    return recording.calls if recording.raw_last is None else [*recording.calls, recording.raw_last]


def is_matrix_free(recording: Recording, R: int, ks: Sequence[int], method: Method) -> bool:
    """Whether products are expected to serve R rows sooner than dense Jacobians, or were asked for and can."""
    x, K = recording.calls[0].x, max(ks)
    d = x.shape[-1]
    columns = matrix_free_columns(d, len(measured_calls(recording)), K, x.dtype)
    # A product of few columns has to read all of a block's weights: measured on two cores at d = 2048 to 4096, a column
    # costs 1.6 times what it costs among many for one row, where 16 go together, and 1.3 times for four; 1 + 1 / R is
    # cautious. Dense costs 0.7 d columns among many, decomposition included, where last layers are saved (`identity`).
    return basis_fits(d, K) and (method == "matrix-free" or (method == "auto" and (1 + 1 / R) * columns < 0.7 * d))


def matrix_free_columns(d: int, L: int, K: int, dtype: torch.dtype) -> int:
    """How many products with a block's Jacobian the matrix-free way is expected to take; the dense way takes d."""
    return 2 * expected_columns(d, K, dtype) + (L + 2) * K + PROBES


def rows_at_once(recording: Recording, ks: Sequence[int], method: Method, memory: int) -> int:
    """How many rows to gather before they are measured: what fits into so many scalars."""
    d, L, K = recording.calls[0].x.shape[-1], len(measured_calls(recording)), max(ks)
    of_products = max(1, memory // (d * (3 * L * K + 2 * basis_size(d, K))))
    return of_products if is_matrix_free(recording, of_products, ks, method) else _formed_at_once(recording, memory)


def fits(recording: Recording, memory: int) -> bool:
    """Whether the Jacobians of all blocks at one row fit into so many scalars; else a second pass finds J V of the pairs."""
    return len(measured_calls(recording)) * recording.calls[0].x.shape[-1] ** 2 <= memory


def _formed_at_once(recording: Recording, memory: int) -> int:
    """How many rows' Jacobians fit: of all blocks at once or, where one row's do not, of one block after another."""
    kept = len(measured_calls(recording)) if fits(recording, memory) else 1
    return max(1, memory // (kept * recording.calls[0].x.shape[-1] ** 2))


def depthwise_couplings(
    jacobians: Jacobians,
    selected: Sequence[tuple[Recording, Rows]],
    ks: Sequence[int],
    method: Method,
    memory: int,
    beside: Sequence[str] = (),
) -> Iterator[dict[str, np.ndarray]]:
    """The coupling measures of every row selected of the recordings, with the dimensions of `registry.DIMS`.

    Args:
        beside: as in `pairs`.
    """
    first = selected[0][0]
    rows = sum(len(rows.sample) for _, rows in selected)
    matrix_free = is_matrix_free(first, rows, ks, method)
    for group in _groups(selected, rows if matrix_free else _formed_at_once(first, memory)):
        calls = [[(call, rows) for call in measured_calls(recording)] for recording, rows in group]
        blocks = [list(selections) for selections in zip(*calls, strict=True)]
        if fits(first, memory) and not matrix_free:
            layers = _dense(jacobians, blocks, max(ks), method)
        else:
            find = _by_products if matrix_free else _passing
            layers = [find(jacobians, selections, max(ks), method) for selections in blocks]
        L = len(first.calls)
        for r, values in enumerate(pairs(layers, ks, beside, L=L)):
            values |= _found(layers[:L], r)
            if len(layers) > L:
                values |= {f"{name}_raw": value for name, value in _found([*layers[: L - 1], layers[L]], r).items()}
            yield {name: value.cpu().numpy() for name, value in values.items()}


def _found(layers: Sequence[Layer], r: int) -> dict[str, Tensor]:
    """At one row, by layer: singular values, and how far they and the Jacobians are proved."""
    of_triplets = {"singular_value": "S", "singular_gap": "gap", "full_svd": "full"}
    of_triplets |= {name: name for name in ("residual", "complete")}
    values = {
        name: torch.stack([getattr(layer.triplets, part)[r] for layer in layers]) for name, part in of_triplets.items()
    }
    values["formed"] = torch.tensor([layer.formed for layer in layers])
    for name in ("sliced", "value_error", "derivative_error"):
        values[name] = torch.tensor([getattr(layer.checks[r], name) for layer in layers])
    return values


def pairs(
    layers: Sequence[Layer],
    ks: Sequence[int],
    beside: Sequence[str] = (),
    lending: Sequence[Triplets] | None = None,
    L: int | None = None,
) -> list[dict[str, Tensor]]:
    """All couplings of every row, over (k, layer, layer_other).

    Args:
        beside: "vju": the same with U and V of the bases swapped; "matrices": A itself for the smallest K, over
            (layer, layer_other, row, column).
        lending: whose bases the layers are described in; None: their own.
        L: how many layers there are; one more that is given stands in the place of layer L in measures that end in `_raw`.
    """
    lending = [layer.triplets for layer in layers] if lending is None else lending
    U, V, S_basis = (torch.stack([getattr(triplets, part) for triplets in lending], 1) for part in "UVS")
    S, frobenius = torch.stack([l.triplets.S for l in layers], 1), torch.stack([l.frobenius for l in layers], 1)
    A = _coupling_matrices(layers, U, V)
    swapped = _coupling_matrices(layers[:L], V[:, :L], U[:, :L]) if "vju" in beside else None
    rows = []
    for r, (A_r, S_r, S_lent, norm) in enumerate(zip(A, S, S_basis, frobenius, strict=True)):
        values = _of_each_k(A_r, S_r, S_lent, norm, U.shape[-2], ks)
        if L is not None and len(layers) > L:
            values = _both_conventions(values, L)
        if swapped is not None:
            of_swapped = _of_each_k(swapped[r], S_r[:L], S_lent[:L], norm[:L], U.shape[-2], ks)
            values |= {f"{name}_vju": of_swapped[name] for name in MISCOUPLINGS}
        if "matrices" in beside:
            values["matrix"] = A_r[:L, :L, : ks[0], : ks[0]]
        rows.append(values)
    return rows


def _both_conventions(values: dict[str, Tensor], L: int) -> dict[str, Tensor]:
    """Of the first L layers, and under `_raw` with the one after them in the place of the last."""
    of_layers = {name: _of_layers(value, range(L)) for name, value in values.items()}
    raw = {name: _of_layers(value, [*range(L - 1), L]) for name, value in values.items()}
    for name in MISCOUPLINGS:
        of_layers |= {f"{name}_raw": raw[name], f"{name}_raw_null": raw[f"{name}_null"]}
    return of_layers


def _of_layers(values: Tensor, layers: Sequence[int]) -> Tensor:
    """Of (k, layer) or (k, layer, layer_other), these layers."""
    at = torch.tensor(layers, device=values.device)
    return values[:, at] if values.dim() == 2 else values[:, at[:, None], at]


def _coupling_matrices(layers: Sequence[Layer], U: Tensor, V: Tensor) -> Float[Tensor, "R L M K K"]:
    """Every Jacobian in all bases."""
    columns = coupling.side_by_side(V)
    return torch.stack([coupling.in_bases(U, layer.product(columns)) for layer in layers], 1)


def _of_each_k(
    A: Tensor, S: Tensor, S_basis: Tensor, frobenius: Tensor, d: int, ks: Sequence[int]
) -> dict[str, Tensor]:
    """Mis-couplings, (k, L, M), and their null levels, (k, L)."""
    by_k = [
        coupling.miscouplings(A[..., :k, :k], S[:, :k], d, S_basis[:, :k])
        | {f"{name}_null": level for name, level in coupling.null_levels(S[:, :k], frobenius, d).items()}
        for k in ks
    ]
    return {name: torch.stack([of_k[name] for of_k in by_k]) for name in by_k[0]}


def _groups(selected: Sequence[tuple[Recording, Rows]], size: int) -> Iterator[list[tuple[Recording, Rows]]]:
    """The same rows in the same order, at most `size` at a time."""
    group, room = [], size
    for recording, rows in selected:
        start = 0
        while start < len(rows.sample):
            some = rows.subset(slice(start, start + room))
            group.append((recording, some))
            start, room = start + len(some.sample), room - len(some.sample)
            if room == 0:
                yield group
                group, room = [], size
    if group:
        yield group


def _dense(jacobians: Jacobians, blocks: Sequence[Sequence[Selection]], K: int, method: Method) -> list[Layer]:
    """Layers that keep their Jacobians."""
    Js, checks = zip(*(_formed(jacobians, selections) for selections in blocks), strict=True)
    triplets = triplets_of_each(Js, K, "auto" if method == "matrix-free" else method)
    return [
        Layer(found, J.matmul, torch.linalg.matrix_norm(J), of_rows, True)
        for found, J, of_rows in zip(triplets, Js, checks, strict=True)
    ]


def _formed(jacobians: Jacobians, selections: Sequence[Selection]) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
    Js, checks = zip(*jacobians(selections), strict=True)
    return Js[0] if len(Js) == 1 else torch.cat(Js), _for_each_row(checks, selections)


def _passing(jacobians: Jacobians, selections: Sequence[Selection], K: int, method: Method) -> Layer:
    """A layer that finds its products anew."""
    (layer,) = _dense(jacobians, [selections], K, method)
    return replace(layer, product=lambda V: jacobians.sketch(selections).operator.apply(V))


def _by_products(jacobians: Jacobians, selections: Sequence[Selection], K: int, method: Method) -> Layer:
    sketch = jacobians.sketch(selections)
    operator, like = sketch.operator, sketch.signs[..., 0]
    triplets = triplets_by_products(operator.apply, operator.apply_transpose, like, K)
    if not triplets.complete.all():  # not converged: the dense Jacobians have to be asked
        return _passing(jacobians, selections, K, "full")
    product = partial(jacobians.product, selections, sketch.compute_dtype)
    return Layer(triplets, product, _frobenius(sketch, triplets), _for_each_row(sketch.checks, selections), False)


def _frobenius(sketch: Sketch, triplets: Triplets) -> Float[Tensor, " R"]:
    """An estimate of |J|_F."""
    U, S, V = triplets.U, triplets.S, triplets.V
    rest = sketch.products - V @ (S[..., None] * (U.mT @ sketch.signs))
    scale = S[:, :1].clamp_min(torch.finfo(S.dtype).tiny)  # squares of tiny entries underflow
    rest = torch.linalg.matrix_norm(rest / scale[..., None] / sqrt(PROBES))
    return scale[:, 0] * torch.hypot(torch.linalg.vector_norm(S / scale, dim=-1), rest)


def _for_each_row(checks: Sequence[CheckResults], selections: Sequence[Selection]) -> list[CheckResults]:
    return [found for found, (_, rows) in zip(checks, selections, strict=True) for _ in rows.sample]
