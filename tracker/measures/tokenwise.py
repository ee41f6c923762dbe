"""Token-wise coupling: J of one token in block l, in the basis of another token in block l' (paper, section 3.1).

With J^l_{t1 t2} = d f^l(X)_{t2} / d x_{t1}, and chosen tokens t_1 < ... < t_T of one prompt, for all pairs (t, t'):

                   Jacobian       basis of
    self           J^l_{t t}      J^{l'}_{t' t'}      a token's effect on itself                (Figs 4, 17, 21)
    fixed_input    J^l_{t_1 t}    J^{l'}_{t_1 t'}     the first chosen token's effect on t      (Figs 18, 22)
    fixed_output   J^l_{t t_T}    J^{l'}_{t' t_T}     the effect of t on the last chosen token  (Figs 19, 23)

None of these Jacobians is zero in a causal model. Cost: 3 T - 3 Jacobians of every block, each computed once, and 3 T^2
coupling matrices for every pair of blocks.

Block l' is measured before block l where possible, so that the Jacobians of block l can be dropped once they are expressed
in its basis. Otherwise (l' = l, or cycles of blocks) the Jacobians of block l are kept until block l' is measured; if they
do not fit into memory, their products are computed again.

Memory: as many Jacobians as fit, and the singular vectors of the blocks whose bases are still needed.
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
from tracker.linalg.svd import Triplets
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.depthwise import pairs
from tracker.measures.layers import Layer, triplets_of_jacobians
from tracker.measures.registry import DIMS, KINDS
from tracker.values import Method

Link = tuple[int, int]  # (t1, t2) of J_{t1 t2}
PARTS = {  # of the singular triplets, by name of the variable with the kind left open
    "{}_singular_value": "S",
    f"{DIAGNOSTICS}{{}}_residual": "residual",
    f"{DIAGNOSTICS}{{}}_complete": "complete",
}


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
    """Return the measures of all kinds at these tokens of a sample, with the dimensions of `registry.DIMS`.

    Blocks that have no basis block are NaN.

    Args:
        basis_layers: block l -> basis block l', from 1.
        memory: the scalars that Jacobians kept together may take.
    """
    kinds = _links_by_kind(tokens)
    links = list(dict.fromkeys(link for links_of_kind in kinds.values() for link in links_of_kind))
    d = recording.calls[0].x.shape[-1]
    at_once = max(1, memory // d**2)
    extras = ("matrices",) if matrices else ()
    bases: dict[int, dict[Link, Triplets]] = {}  # of the measured blocks whose bases are still needed
    pending: dict[int, dict[Link, Layer]] = {}  # blocks whose basis block is not measured yet
    certificates: dict[tuple[int, Link], dict[str, Tensor]] = {}
    rows: dict[tuple[int, str, Link], dict[str, Tensor]] = {}

    def couple(l: int, layers: Mapping[Link, Layer]) -> None:
        for link, layer in layers.items():
            for kind in (kind for kind in KINDS if link in kinds[kind]):
                kind_bases = [bases[basis_layers[l]][other] for other in kinds[kind]]
                values = pairs([layer], ks, extras, bases=kind_bases)
                rows[l, kind, link] = {name: value[0] for name, value in values.items()}

    order = _measuring_order(basis_layers)
    for place, l in enumerate(order):
        call, block_triplets = recording.calls[l - 1], {}
        for start in range(0, len(links), at_once):
            layers = _layers(jacobians, call, sample, links[start : start + at_once], max(ks), method, memory)
            block_triplets |= {link: _contiguous(layer.triplets) for link, layer in layers.items()}
            if basis_layers.get(l) in bases:
                couple(l, layers)
            elif l in basis_layers:
                kept = layers if len(links) <= at_once else _recomputed_layers(layers, jacobians, call, sample)
                pending.setdefault(l, {}).update(kept)
            del layers
        bases[l] = block_triplets
        for link, triplets in block_triplets.items():
            certificates[l, link] = {name: getattr(triplets, part) for name, part in PARTS.items()}
        for m in [m for m in pending if basis_layers[m] in bases]:
            couple(m, pending.pop(m))
        needed = {basis_layers.get(m) for m in (*order[place + 1 :], *pending)}
        bases = {m: triplets for m, triplets in bases.items() if m in needed}
    return _assemble(kinds, rows, certificates, len(recording.calls))


def tokenwise_steps(tokens: Sequence[int], basis_layers: Mapping[int, int]) -> int:
    """Return how many steps `Jacobians.advance` counts for one sample: a Jacobian and its singular vectors for each link."""
    links = {link for of_kind in _links_by_kind(tokens).values() for link in of_kind}
    return 2 * len(links) * len(_measuring_order(basis_layers))


def _links_by_kind(tokens: Sequence[int]) -> dict[str, list[Link]]:
    first, last = tokens[0], tokens[-1]
    links = {
        "self": [(t, t) for t in tokens],
        "fixed_input": [(first, t) for t in tokens],
        "fixed_output": [(t, last) for t in tokens],
    }
    return {kind: links[kind] for kind in KINDS}


def _measuring_order(basis_layers: Mapping[int, int]) -> list[int]:
    """Return the blocks to measure, each after its basis block, except in cycles."""
    order: list[int] = []
    for l in basis_layers:
        chain: list[int] = []
        while l not in order and l not in chain:
            chain.append(l)
            l = basis_layers.get(l, l)
        order += reversed(chain)
    return order


def _layers(
    jacobians: Jacobians, call: BlockCall, sample: int, links: Sequence[Link], K: int, method: Method, memory: int
) -> dict[Link, Layer]:
    """Return a layer with the block's Jacobian for each link."""
    Js: dict[Link, Float[Tensor, "1 d d"]] = {}
    for same in (True, False):  # separate calls, because the identity is subtracted where t1 = t2
        chosen = [link for link in links if (link[0] == link[1]) == same]
        if chosen:
            ((J, _),) = jacobians([(call, _rows(sample, chosen))])
            jacobians.advance(len(chosen))
            Js |= dict(zip(chosen, J.split(1), strict=True))
    triplets = triplets_of_jacobians(list(Js.values()), K, method, memory, jacobians.advance)
    return {
        link: Layer(of_link, J.matmul, torch.linalg.matrix_norm(J), [], True)
        for (link, J), of_link in zip(Js.items(), triplets, strict=True)
    }


def _recomputed_layers(
    layers: Mapping[Link, Layer], jacobians: Jacobians, call: BlockCall, sample: int
) -> dict[Link, Layer]:
    """Return the layers without their Jacobians: their products linearise the block again."""

    def product(link: Link, V: Tensor) -> Tensor:
        return jacobians.sketch([(call, _rows(sample, [link]))]).operator.apply(V)

    return {link: replace(layer, product=partial(product, link)) for link, layer in layers.items()}


def _rows(sample: int, links: Sequence[Link]) -> Rows:
    """Return the rows of links that all have t1 = t2, or all t1 != t2."""
    source, token = torch.tensor(links).unbind(1)
    return Rows(torch.full_like(token, sample), token, None if links[0][0] == links[0][1] else source)


def _contiguous(triplets: Triplets) -> Triplets:
    """Return the triplets with singular vectors in contiguous memory.

    A full decomposition returns views, which would keep all d vectors in memory.
    """
    return replace(triplets, U=triplets.U.contiguous(), V=triplets.V.contiguous())


def _assemble(
    kinds: Mapping[str, Sequence[Link]],
    rows: Mapping[tuple[int, str, Link], Mapping[str, Tensor]],
    certificates: Mapping[tuple[int, Link], Mapping[str, Tensor]],
    L: int,
) -> dict[str, np.ndarray]:
    """Return the arrays of all blocks by variable name."""
    by_layer: dict[str, dict[int, Tensor]] = {}
    for kind, links in kinds.items():
        for l in {l for l, row_kind, _ in rows if row_kind == kind}:
            for name in rows[l, kind, links[0]]:
                axis = [dim for dim in DIMS[f"{kind}_{name}"] if dim != "layer"].index("pair_token")
                values = torch.cat([rows[l, kind, link][name] for link in links], axis)
                by_layer.setdefault(f"{kind}_{name}", {})[l] = values
        for l in {l for l, _ in certificates}:
            for name in PARTS:
                values = torch.cat([certificates[l, link][name] for link in links])
                by_layer.setdefault(name.format(kind), {})[l] = values
    return {name: _stack_layers(values, DIMS[name].index("layer"), L) for name, values in by_layer.items()}


def _stack_layers(by_layer: Mapping[int, Tensor], axis: int, L: int) -> np.ndarray:
    """Stack the values of L layers; NaN where a layer has none."""
    if len(by_layer) == L:
        return torch.stack([by_layer[l] for l in range(1, L + 1)], axis).cpu().numpy()
    example = next(iter(by_layer.values()))
    missing = torch.full(example.shape, torch.nan, dtype=torch.promote_types(example.dtype, torch.float32))
    return torch.stack([by_layer.get(l, missing).to(missing).cpu() for l in range(1, L + 1)], axis).numpy()
