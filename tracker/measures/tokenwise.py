"""Token-wise coupling: J of one token in block l, described in the basis of another's in block l' (paper, section 3.1).

With J^l_{t1 t2} = d f^l(X)_{t2} / d x_{t1}, over chosen tokens t_1 < ... < t_T of one prompt, for all t, t' of them:

                   described      lends its basis
    self           J^l_{t t}      J^{l'}_{t' t'}                                                (Figs 4, 17, 21)
    fixed_input    J^l_{t_1 t}    J^{l'}_{t_1 t'}     what the first of them sends to each      (Figs 18, 22)
    fixed_output   J^l_{t t_T}    J^{l'}_{t' t_T}     what the last of them takes from each     (Figs 19, 23)

so that a causal model has no zero among them. Cost: 3 T - 3 Jacobians of every block, each found once, and T^2 coupling
matrices for every pair of blocks, three times. A block is measured after the one that lends it the basis, so a Jacobian
is kept no longer than it takes to describe it. Where that order does not exist (l' = l, or blocks that lend to each
other), the Jacobians of one block wait; where they do not fit into memory, their products are found anew.

Memory: as many Jacobians as fit, and the singular vectors of the blocks that are yet to lend them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.capture.recording import BlockCall, Recording
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.linalg.svd import Triplets, triplets_of_each
from tracker.measures.depthwise import Layer, pairs
from tracker.measures.registry import DIMS, KINDS
from tracker.values import Method

Link = tuple[int, int]  # from the token t1 to the token t2
CERTIFICATES = {"singular_value": "S", "residual": "residual", "complete": "complete"}


def tokenwise_couplings(
    jacobians: Jacobians,
    recording: Recording,
    sample: int,
    tokens: Sequence[int],
    basis_layers: Mapping[int, int],
    ks: Sequence[int],
    method: Method,
    matrices: bool,
    memory: int,
) -> dict[str, np.ndarray]:
    """All kinds at these tokens of a sample, with the dimensions of `registry.DIMS`; NaN at blocks that are not compared.

    Args:
        basis_layers: each block that is described, and the block that lends it the basis, from 1.
        memory: scalars that the Jacobians kept at once may take.
    """
    kinds = _links(tokens)
    links = list(dict.fromkeys(link for of_kind in kinds.values() for link in of_kind))
    d = recording.calls[0].x.shape[-1]
    at_once = max(1, memory // d**2)
    beside = ("matrices",) if matrices else ()
    lent: dict[int, dict[Link, Triplets]] = {}
    waiting: dict[int, dict[Link, Layer]] = {}  # for the block that lends to them
    certified: dict[tuple[int, Link], dict[str, Tensor]] = {}
    rows: dict[tuple[int, str, Link], dict[str, Tensor]] = {}

    def describe(l: int, layers: Mapping[Link, Layer]) -> None:
        for link, layer in layers.items():
            for kind in (kind for kind in KINDS if link in kinds[kind]):
                bases = [lent[basis_layers[l]][other] for other in kinds[kind]]
                (rows[l, kind, link],) = pairs([layer], ks, beside, lending=bases)

    order = _order(basis_layers)
    for place, l in enumerate(order):
        call, found = recording.calls[l - 1], {}
        for start in range(0, len(links), at_once):
            layers = _layers(jacobians, call, sample, links[start : start + at_once], max(ks), method)
            found |= {link: _own(layer.triplets) for link, layer in layers.items()}
            if basis_layers.get(l) in lent:
                describe(l, layers)
            elif l in basis_layers:
                kept = layers if len(links) <= at_once else _found_anew(layers, jacobians, call, sample)
                waiting.setdefault(l, {}).update(kept)
            del layers
        lent[l] = found
        for link, triplets in found.items():
            certified[l, link] = {name: getattr(triplets, part) for name, part in CERTIFICATES.items()}
        for described in [m for m in waiting if basis_layers[m] in lent]:
            describe(described, waiting.pop(described))
        needed = {basis_layers.get(m) for m in (*order[place + 1 :], *waiting)}
        lent = {m: triplets for m, triplets in lent.items() if m in needed}
    return _assembled(kinds, rows, certified, len(recording.calls))


def _links(tokens: Sequence[int]) -> dict[str, list[Link]]:
    first, last = tokens[0], tokens[-1]
    links = {
        "self": [(t, t) for t in tokens],
        "fixed_input": [(first, t) for t in tokens],
        "fixed_output": [(t, last) for t in tokens],
    }
    return {kind: links[kind] for kind in KINDS}


def _order(basis_layers: Mapping[int, int]) -> list[int]:
    """All blocks concerned, each after the one that lends to it, where blocks do not lend to each other in a circle."""
    order: list[int] = []
    for l in basis_layers:
        chain: list[int] = []
        while l not in order and l not in chain:
            chain.append(l)
            l = basis_layers.get(l, l)
        order += reversed(chain)
    return order


def _layers(
    jacobians: Jacobians, call: BlockCall, sample: int, links: Sequence[Link], K: int, method: Method
) -> dict[Link, Layer]:
    """The block's Jacobians at these links, with their triplets."""
    Js: dict[Link, Float[Tensor, "1 d d"]] = {}
    for same in (True, False):  # a call takes rows of one kind: the identity is subtracted where t1 = t2
        some = [link for link in links if (link[0] == link[1]) == same]
        if some:
            ((J, _),) = jacobians([(call, _rows(jacobians, sample, some))])
            Js |= dict(zip(some, J.split(1), strict=True))
    triplets = triplets_of_each(list(Js.values()), K, "auto" if method == "matrix-free" else method)
    return {
        link: Layer(found, J.matmul, torch.linalg.matrix_norm(J), [], True)
        for (link, J), found in zip(Js.items(), triplets, strict=True)
    }


def _found_anew(layers: Mapping[Link, Layer], jacobians: Jacobians, call: BlockCall, sample: int) -> dict[Link, Layer]:
    """The same without their Jacobians: their products with bases are linearised once more."""

    def product(link: Link, V: Tensor) -> Tensor:
        return jacobians.sketch([(call, _rows(jacobians, sample, [link]))]).operator.apply(V)

    return {link: replace(layer, product=partial(product, link)) for link, layer in layers.items()}


def _rows(jacobians: Jacobians, sample: int, links: Sequence[Link]) -> Rows:
    """Of links that all lead from a token to itself, or all to another."""
    source, token = torch.tensor(links, device=jacobians.replica.device).unbind(1)
    return Rows(torch.full_like(token, sample), token, None if links[0][0] == links[0][1] else source)


def _own(triplets: Triplets) -> Triplets:
    """The same in memory of their own: what a full decomposition gives are views of all d vectors."""
    return replace(triplets, U=triplets.U.contiguous(), V=triplets.V.contiguous())


def _assembled(
    kinds: Mapping[str, Sequence[Link]],
    rows: Mapping[tuple[int, str, Link], Mapping[str, Tensor]],
    certified: Mapping[tuple[int, Link], Mapping[str, Tensor]],
    L: int,
) -> dict[str, np.ndarray]:
    """By variable name, of all blocks."""
    by_layer: dict[str, dict[int, Tensor]] = {}
    for kind, links in kinds.items():
        for l in {l for l, of, _ in rows if of == kind}:
            for name in rows[l, kind, links[0]]:
                axis = [dim for dim in DIMS[f"{kind}_{name}"] if dim != "layer"].index("pair_token")
                values = torch.cat([rows[l, kind, link][name] for link in links], axis)
                by_layer.setdefault(f"{kind}_{name}", {})[l] = values
        for l in {l for l, _ in certified}:
            for name in CERTIFICATES:
                values = torch.cat([certified[l, link][name] for link in links])
                by_layer.setdefault(f"{kind}_{name}", {})[l] = values
    return {name: _stacked(values, DIMS[name].index("layer"), L) for name, values in by_layer.items()}


def _stacked(by_layer: Mapping[int, Tensor], axis: int, L: int) -> np.ndarray:
    if len(by_layer) == L:
        return torch.stack([by_layer[l] for l in range(1, L + 1)], axis).cpu().numpy()
    some = next(iter(by_layer.values()))
    missing = torch.full(some.shape, torch.nan, dtype=torch.promote_types(some.dtype, torch.float32))
    return torch.stack([by_layer.get(l, missing).to(missing).cpu() for l in range(1, L + 1)], axis).numpy()
