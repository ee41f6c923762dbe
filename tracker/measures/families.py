"""Families of measured variables: for layer pairs, for token pairs and for the Jacobians of blocks.

Each is generated from `coupling.DEFINITIONS`, the variants and the kinds of token pairs. Variables without a suffix are of the
blocks alone; in those that end in `_normed`, the last block includes the final norm, as in the paper (eq. 7).
"""

from dataclasses import replace
from typing import Any

from tracker.measures.coupling import DEFINITIONS
from tracker.measures.declaration import DIAGNOSTICS, OURS, Measure

PAIR = ("token", "k", "layer", "layer_other")
TOKEN_PAIR = ("k", "layer", "pair_token", "pair_token_other")  # J of block `layer`, basis of block `pair_layer_other`
OF_PAIRS, SWAPPED = "A = U′ᵀ J V′", "A = V′ᵀ J U′"
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
YES = "1: yes, 0: no"
CERTIFICATE = {  # of each Jacobian and its singular triplets: label, formula
    "residual": (
        "largest residual of a triplet, relative to s₁",
        "max over k of ‖J vₖ − sₖ uₖ‖ and ‖Jᵀ uₖ − sₖ vₖ‖, / s₁",
    ),
    "complete": (
        "whether no larger singular value was missed",
        f"{YES}; σ² I − R Rᵀ is positive definite, R = J − U S Vᵀ, σ = 1.0001 s_K",
    ),
    "formed": ("whether the Jacobian was formed, not known by its products alone", YES),
    "full_svd": ("whether the triplets come from a full decomposition", YES),
    "sliced": ("whether the Jacobian was evaluated at its row alone, not over the full sequence", YES),
    "value_error": (
        "error of the row's output against the recorded one",
        "‖f − f₀‖ / max(‖f₀‖, floor ‖x‖), f of the row alone, f₀ as recorded",
    ),
    "derivative_error": (
        "error of a vector-Jacobian product against that of the full sequence",
        "‖Jᵀu − g‖ / max(‖g‖, floor ‖u‖), g of the full sequence, u random",
    ),
    "independent_error": (
        "error of J v against forward mode, or differences of values",
        "root mean square over u of (uᵀ(Jv)ᵢ − (Jᵀu)ᵀv) / max(‖(Jv)ᵢ‖, floor ‖v‖), (Jv)ᵢ not by reverse mode, u and v random",
    ),
}
NORMED = "_normed"  # ends the names of variables that include the final norm
WITH_NORM = "with the final norm"
EXTRAS = "Tokens, entropy, noise"  # a section of the W&B dashboard


def couplings() -> tuple[Measure, ...]:
    """Return the variables for layer pairs: each definition's measure and its variants."""
    measures = []
    for definition in DEFINITIONS:
        name, shown = definition.name, definition.dashboard
        plain = Measure(
            name,
            PAIR,
            definition.label,
            option="coupling",
            curve="pairs",
            null=True,
            counted=True,
            metric=f"coupling/{name}",
            logged=("", "_q25", "_q75", "_null"),
            dashboard="Coupling" if "" in shown else "",
            text=definition.text,
            formula=f"{definition.equation}, {OF_PAIRS}",
            reference=definition.reference,
        )
        variant = replace(plain, base=name, dashboard="")
        normed = replace(
            variant,
            name=f"{name}{NORMED}",
            variant="normed",
            label=f"{definition.label}, {WITH_NORM}",
            metric=f"coupling/{name}{NORMED}",
            logged=("", "_null") if "" in shown else (),
            dashboard=EXTRAS if "normed" in shown else "",
            text=f"{definition.text} Here the last block includes the final norm, as in the paper.",
            formula=f"{plain.formula}; the last block includes the final norm",
            reference=f"{definition.reference}; paper, eq. 7",
        )
        swapped = replace(
            variant,
            name=f"{name}_vju",
            variant="vju",
            label=f"{definition.label}, sides swapped",
            option="vju",
            metric=f"coupling/{name}_vju",
            logged=("", "_null"),
            dashboard=EXTRAS if "vju" in shown else "",
            text=f"{definition.text} Here A = V′ᵀ J U′, the sides of the basis swapped.",
            formula=f"{definition.equation}, {SWAPPED}",
        )
        measures += [plain, normed, swapped]
    return tuple(measures)


def across_tokens() -> tuple[Measure, ...]:
    """Return the variables for token pairs of every kind."""
    measures = []
    for kind, text in KINDS.items():
        shared: dict[str, Any] = {"option": "tokenwise", "variant": kind}
        for definition in DEFINITIONS:
            name, shown = definition.name, "tokens" in definition.dashboard
            measures.append(
                Measure(
                    f"{kind}_{name}",
                    TOKEN_PAIR,
                    f"{definition.label}, {text}",
                    base=name,
                    curve="token pairs",
                    null=True,
                    counted=True,
                    metric=f"tokens/{kind}/{name}",
                    logged=("", "_null"),
                    dashboard=EXTRAS if shown else "",
                    formula=f"{definition.equation}, {OF_PAIRS}, {LINKS[kind]}",
                    reference=f"{definition.reference}; across tokens: paper, section 3.1",
                    **shared,
                )
            )
        tokens = TOKEN_PAIR[1:3]
        shared["reference"] = "paper, section 3.1"
        for name in ("residual", "complete"):
            label, formula = CERTIFICATE[name]
            formula = f"{formula}; {LINKS[kind]}"
            measures.append(
                Measure(f"{DIAGNOSTICS}{kind}_{name}", tokens, f"{label}, {text}", formula=formula, **shared)
            )
        measures += [
            *_of_null_levels(f"{kind}_", "", tokens, f", {text}", shared),
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


def jacobians() -> tuple[Measure, ...]:
    """Return the singular values and certificates of the Jacobians, with and without the final norm in the last block."""
    measures = []
    for end, variant, text in (("", "", ""), (NORMED, "normed", f", last block {WITH_NORM}")):
        shared: dict[str, Any] = {"option": "coupling", "variant": variant}
        layer, rank = ("token", "layer"), ("token", "layer", "rank")
        gap = "gap to the next singular value, relative to s_1"
        measures += [
            Measure(
                f"singular_value{end}",
                rank,
                f"singular value{text}",
                formula="sₖ, J = U S Vᵀ",
                reference="paper, eq. 9",
                **shared,
            ),
            Measure(
                f"{DIAGNOSTICS}singular_gap{end}",
                rank,
                f"{gap}{text}",
                formula="(sₖ − sₖ₊₁) / s₁",
                reference=OURS,
                **shared,
            ),
            *(
                Measure(f"{DIAGNOSTICS}{name}{end}", layer, f"{label}{text}", formula=formula, reference=OURS, **shared)
                for name, (label, formula) in CERTIFICATE.items()
            ),
            *_of_null_levels("", end, layer, text, shared),
        ]
    return tuple(measures)


def kept() -> tuple[Measure, ...]:
    """Return the variables of `keep=`: the Jacobians and singular vectors themselves."""
    layer = ("token", "layer")
    return (
        Measure(
            "jacobian",
            (*layer, "output", "input"),
            "Jacobian of the block's residual function at the token",
            option="keep",
            formula="Jˡ = ∂fˡ(x) / ∂x at x = xˡ⁻¹, without the identity of the skip connection",
            reference="paper, eq. 8",
        ),
        Measure(
            "left_singular_vector",
            (*layer, "output", "rank"),
            "left singular vector",
            option="keep",
            formula="uₖ, column k of U, J = U S Vᵀ",
            reference="paper, eq. 9",
        ),
        Measure(
            "right_singular_vector",
            (*layer, "input", "rank"),
            "right singular vector",
            option="keep",
            formula="vₖ, column k of V, J = U S Vᵀ",
            reference="paper, eq. 9",
        ),
    )


def _of_null_levels(
    start: str, end: str, dims: tuple[str, ...], text: str, shared: dict[str, Any]
) -> tuple[Measure, ...]:
    """Return the variables from which null levels are computed: moments of each Jacobian, overlaps of its singular vectors."""
    of_jacobian = {
        "isotropic": ("isotropic part of the Jacobian", "τ = tr J / d"),
        "symmetric_norm": ("norm of the Jacobian's symmetric part without the isotropic one", "‖(J + Jᵀ) / 2 − τ I‖"),
        "antisymmetric_norm": ("norm of the Jacobian's antisymmetric part", "‖(J − Jᵀ) / 2‖"),
    }
    of_vectors = {
        "alignment": ("alignment of output and input directions", "uₖ · vₖ, J = U S Vᵀ", (*dims, "rank")),
        "overlap_squares": (
            "overlap of left and right singular vectors: squares", "Σ (uᵢ · vⱼ)² over i ≠ j ≤ K", _with_k(dims),
        ),
        "overlap_fourths": (
            "overlap of left and right singular vectors: fourth powers", "Σ (uᵢ · vⱼ)⁴ over i ≠ j ≤ K", _with_k(dims),
        ),
    }  # fmt: skip
    declared = {name: (label, formula, dims) for name, (label, formula) in of_jacobian.items()} | of_vectors
    shared = {"reference": OURS} | shared
    return tuple(
        Measure(f"{start}{name}{end}", of, f"{label}{text}", formula=formula, **shared)
        for name, (label, formula, of) in declared.items()
    )


def _with_k(dims: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dimensions with K before those of blocks, as in `PAIR` and `TOKEN_PAIR`."""
    at = dims.index("layer")
    return (*dims[:at], "k", *dims[at:])
