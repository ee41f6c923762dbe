"""Token-wise coupling: J of one token in block l, in the basis of another token in block l' (paper, section 3.1).

With J^l_{t1 t2} = d f^l(X)_{t2} / d x_{t1}, and chosen tokens t_1 < ... < t_T of one prompt, for all pairs (t, t'):

                   Jacobian       basis of
    self           J^l_{t t}      J^{l'}_{t' t'}      a token's effect on itself                (Figs 4, 17, 21)
    fixed_input    J^l_{t_1 t}    J^{l'}_{t_1 t'}     the first chosen token's effect on t      (Figs 18, 22)
    fixed_output   J^l_{t t_T}    J^{l'}_{t' t_T}     the effect of t on the last chosen token  (Figs 19, 23)

None of these Jacobians is zero in a causal model. Cost: 3 T - 3 Jacobians of every block, each computed once, and 3 T^2
coupling matrices for every pair of blocks. Samples pass through a block together, as many as fit into memory.

Block l' is measured before block l where possible, so that the Jacobians of block l can be dropped once they are expressed
in its basis. Otherwise (l' = l, or cycles of blocks) the Jacobians of block l are kept until block l' is measured; if they
do not fit into memory, they wait in a file.

Memory: as many Jacobians as fit, and the singular vectors of the blocks whose bases are still needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.jacobians.kept import JacobianFile
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.linalg.svd import Triplets, joined
from tracker.linalg.transfer import to_arrays
from tracker.measures.coupling import (
    BY_ROTATIONS,
    DEFINITIONS,
    OF_PAIRS,
    Moments,
    declared_level,
    declared_parts,
    moments,
)
from tracker.measures.declaration import DIAGNOSTICS, Measure
from tracker.measures.depthwise import pairs, spectra
from tracker.measures.layers import CERTIFICATE, Layer, triplets_of_jacobians
from tracker.measures.plan import Plan
from tracker.model.recording import Recording

# J of block `layer`, basis of block `pair_layer_other`
TOKEN_PAIR = ("k", "layer", "pair_token", "pair_token_other")
KINDS = {  # of token pairs
    "self": "self: J of t against J of t′",
    "fixed_input": "fixed input: first token to t, to t′",
    "fixed_output": "fixed output: t, t′ to last token",
}
LINKS = {  # which Jacobians
    "self": "J = Jˡ(t → t), U′ and V′ of Jˡ′(t′ → t′)",
    "fixed_input": "J = Jˡ(t₁ → t), U′ and V′ of Jˡ′(t₁ → t′), t₁ the first token",
    "fixed_output": "J = Jˡ(t → T), U′ and V′ of Jˡ′(t′ → T), T the last token",
}


def _declared() -> tuple[Measure, ...]:
    """Return the variables for token pairs of every kind."""
    measures = []
    for kind, text in KINDS.items():
        shared: dict[str, Any] = {"option": "tokenwise", "variant": kind}
        for definition in DEFINITIONS:
            name = definition.name
            measure = Measure(
                f"{kind}_{name}",
                TOKEN_PAIR,
                f"{definition.label}, {text}",
                base=name,
                curve="token pairs",
                null=True,
                counted=True,
                metric=f"tokens/{kind}/{name}",
                logged=("", "_null"),
                main="tokens" in definition.main,
                formula=f"{definition.equation}, {OF_PAIRS}, {LINKS[kind]}",
                reference=f"{definition.reference}; across tokens: paper, section 3.1",
                **shared,
            )
            measures += [measure, *([declared_level(measure)] if name in BY_ROTATIONS else [])]
        tokens = TOKEN_PAIR[1:3]
        shared["reference"] = "paper, section 3.1"
        for name in ("residual", "complete"):
            label, formula = CERTIFICATE[name]
            formula = f"{formula}; {LINKS[kind]}"
            measures.append(
                Measure(
                    f"{DIAGNOSTICS}{kind}_{name}",
                    tokens,
                    f"{label}, {text}",
                    formula=formula,
                    **shared,
                )
            )
        measures += [
            *declared_parts(f"{kind}_", "", tokens, f", {text}", shared),
            Measure(
                f"{kind}_singular_value",
                (*tokens, "rank"),
                f"singular value, {text}",
                formula=f"sₖ, J = U S Vᵀ, {LINKS[kind]}",
                **shared,
            ),
            Measure(
                f"{kind}_matrix",
                (*TOKEN_PAIR[1:], "row", "column"),
                f"coupling matrix A, {text}",
                formula=f"{OF_PAIRS}, {LINKS[kind]}, for the smallest K",
                **shared,
            ),
        ]
    return tuple(measures)


DECLARED = _declared()
DIMS = {measure.name: measure.dims for measure in DECLARED}

Link = tuple[int, int]  # (i, j): J_{t1 t2} of the sample's i-th and j-th chosen token
# Values of some links of a kind, by name without the kind
Part = tuple[list[Link], dict[str, Tensor]]
# Of the singular triplets
PARTS = {"singular_value": "S", "residual": "residual", "complete": "complete"}


@dataclass(frozen=True)
class Selected:
    """A sample of a recording, and its chosen positions."""

    recording: Recording
    sample: int
    tokens: Sequence[int]


def tokenwise_couplings(
    jacobians: Jacobians,
    selected: Sequence[Selected],
    basis_layers: Mapping[int, int],
    plan: Plan,
) -> list[dict[str, np.ndarray]]:
    """Return the measures of all kinds for each selected sample, with the dimensions of `DIMS`.

    Blocks that have no basis block are NaN.

    Args:
        basis_layers: block l -> basis block l', from 1.
    """
    by_row: dict[int, dict[str, np.ndarray]] = {}
    # Samples of equally many tokens: their pairs have one shape.
    for T in {len(one.tokens) for one in selected}:
        alike = [i for i, one in enumerate(selected) if len(one.tokens) == T]
        size = plan.samples(links_of(T))
        for start in range(0, len(alike), size):
            group = alike[start : start + size]
            samples = [selected[i] for i in group]
            values = _couplings(jacobians, samples, basis_layers, plan)
            by_row |= dict(zip(group, values, strict=True))
    return [by_row[i] for i in range(len(selected))]


def links_of(T: int) -> int:
    """Return how many Jacobians a block has for a sample of T tokens."""
    return len(_all_links(_links_by_kind(T)))


def _couplings(
    jacobians: Jacobians,
    samples: Sequence[Selected],
    basis_layers: Mapping[int, int],
    plan: Plan,
) -> list[dict[str, np.ndarray]]:
    """Return the measures of samples with equally many tokens, which pass through each block together."""
    kinds = _links_by_kind(len(samples[0].tokens))
    links = _all_links(kinds)
    at_once = plan.samples(len(samples))  # links of all samples
    file = JacobianFile() if at_once < len(links) else None
    measures = [name for name in plan.measures if name == "matrices"]
    # Of the measured blocks whose bases are still needed
    bases: dict[int, dict[Link, Triplets]] = {}
    parts: dict[tuple[int, str, str], list[Part]] = {}  # by block, kind and what was measured

    def add(what: str, l: int, layers: Mapping[Link, Layer]) -> None:
        for kind, of_kind in kinds.items():
            if chosen := [link for link in layers if link in of_kind]:
                alike = [layers[link] for link in chosen]
                if what == "jacobians":
                    values = spectra(alike, PARTS)
                else:
                    kind_bases = [bases[basis_layers[l]][link] for link in of_kind]
                    values = pairs(alike, plan.ks, measures, bases=kind_bases)
                parts.setdefault((l, kind, what), []).append((chosen, values))

    order = _measuring_order(basis_layers)
    for place, l in enumerate(order):
        block_triplets: dict[Link, Triplets] = {}
        # Of a block in its own basis, until all its triplets are known
        waiting: dict[Link, Layer] = {}
        for start in range(0, len(links), at_once):
            layers = _layers(jacobians, l, samples, links[start : start + at_once], plan)
            block_triplets |= {link: layer.triplets for link, layer in layers.items()}
            add("jacobians", l, layers)
            basis = basis_layers.get(l)
            if basis == l:
                waiting |= {
                    link: layer
                    if file is None
                    else replace(layer, jacobian=file.keep(layer.jacobian()))
                    for link, layer in layers.items()
                }
            elif basis is not None:
                add("pairs", l, layers)
            # Before the next are formed: two sets of Jacobians would exceed the memory.
            del layers
        bases[l] = block_triplets
        if waiting:
            add("pairs", l, waiting)
        needed = {basis_layers.get(m) for m in order[place + 1 :]}
        bases = {m: triplets for m, triplets in bases.items() if m in needed}
    return _assemble(kinds, parts, len(samples[0].recording.calls))


def tokenwise_steps(T: int, basis_layers: Mapping[int, int]) -> int:
    """Return how many steps `Jacobians.advance` counts for a sample of T tokens: a Jacobian and its triplets for each link."""
    return 2 * links_of(T) * len(_measuring_order(basis_layers))


def _links_by_kind(T: int) -> dict[str, list[Link]]:
    tokens, last = range(T), T - 1
    return {
        "self": [(t, t) for t in tokens],
        "fixed_input": [(0, t) for t in tokens],
        "fixed_output": [(t, last) for t in tokens],
    }


def _all_links(kinds: Mapping[str, Sequence[Link]]) -> list[Link]:
    return list(dict.fromkeys(link for of_kind in kinds.values() for link in of_kind))


def _measuring_order(basis_layers: Mapping[int, int]) -> list[int]:
    """Return the blocks to measure, each after its basis block; all basis blocks are equally far from their blocks."""
    blocks = sorted({*basis_layers, *basis_layers.values()})
    basis_is_later = any(basis > l for l, basis in basis_layers.items())
    return blocks[::-1] if basis_is_later else blocks


def _layers(
    jacobians: Jacobians,
    l: int,
    samples: Sequence[Selected],
    links: Sequence[Link],
    plan: Plan,
) -> dict[Link, Layer]:
    """Return a layer with the Jacobians of block l at all samples, for each link."""
    by_link: dict[Link, list[Float[Tensor, "_ d d"]]] = {link: [] for link in links}
    for same in (True, False):  # separate calls, because the identity is subtracted where t1 = t2
        chosen = [link for link in links if (link[0] == link[1]) == same]
        if chosen:
            for J, _ in jacobians(_selections(l, samples, chosen)):
                jacobians.advance(len(J))
                for link, of_link in zip(chosen, J.split(len(J) // len(chosen)), strict=True):
                    by_link[link].append(of_link)
    Js = [J for of_link in by_link.values() for J in of_link]
    triplets = iter(triplets_of_jacobians(Js, plan, jacobians.advance))
    of_links = {
        link: joined([next(triplets) for _ in of_link]) for link, of_link in by_link.items()
    }
    return {
        link: Layer(of_links[link], partial(_together, of_link), _moments(of_link, of_links[link]))
        for link, of_link in by_link.items()
    }


def _moments(Js: Sequence[Float[Tensor, "_ d d"]], triplets: Triplets) -> Moments:
    """Return the moments of Jacobians in several tensors."""
    scales = triplets.S[:, 0].split([len(J) for J in Js])
    parts = [moments(J, scale) for J, scale in zip(Js, scales, strict=True)]
    return joined(parts)


def _together(Js: Sequence[Float[Tensor, "_ d d"]]) -> Float[Tensor, "R d d"]:
    return Js[0] if len(Js) == 1 else torch.cat([*Js])


def _selections(l: int, samples: Sequence[Selected], links: Sequence[Link]) -> list[CallRows]:
    """Return the rows of links that all have t1 = t2, or all t1 != t2: for each recording, those of one link after another."""
    selections = []
    for _, of_recording in groupby(samples, lambda one: id(one.recording)):
        selected = list(of_recording)
        rows = [(one.sample, one.tokens[i], one.tokens[j]) for i, j in links for one in selected]
        sample, source, token = torch.tensor(rows).unbind(1)
        same = links[0][0] == links[0][1]
        selections.append(
            (selected[0].recording.calls[l - 1], Rows(sample, token, None if same else source))
        )
    return selections


def _assemble(
    kinds: Mapping[str, Sequence[Link]],
    parts: Mapping[tuple[int, str, str], Sequence[Part]],
    L: int,
) -> list[dict[str, np.ndarray]]:
    """Return the values of all blocks by variable name, for each sample."""
    by_layer: dict[str, dict[int, Tensor]] = {}
    for (l, kind, _), chunks in parts.items():
        order = [link for chosen, _ in chunks for link in chosen]
        index = torch.tensor([order.index(link) for link in kinds[kind]])
        for part in chunks[0][1]:
            name = f"{DIAGNOSTICS * (part in ('residual', 'complete'))}{kind}_{part}"
            axis = 1 + [dim for dim in DIMS[name] if dim != "layer"].index("pair_token")
            values = torch.cat([values[part] for _, values in chunks], axis)
            by_layer.setdefault(name, {})[l] = values.index_select(axis, index.to(values.device))
    arrays = to_arrays(
        {
            name: _stack_layers(values, 1 + DIMS[name].index("layer"), L)
            for name, values in by_layer.items()
        }
    )
    count = len(next(iter(arrays.values())))
    return [{name: array[b] for name, array in arrays.items()} for b in range(count)]


def _stack_layers(by_layer: Mapping[int, Tensor], axis: int, L: int) -> Tensor:
    """Stack the values of L layers; NaN where a layer has none."""
    if len(by_layer) == L:
        return torch.stack([by_layer[l] for l in range(1, L + 1)], axis)
    example = next(iter(by_layer.values()))
    missing = torch.full_like(
        example, torch.nan, dtype=torch.promote_types(example.dtype, torch.float32)
    )
    return torch.stack([by_layer.get(l, missing).to(missing) for l in range(1, L + 1)], axis)
