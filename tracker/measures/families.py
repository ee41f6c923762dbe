"""Families of measured variables: for layer pairs, for token pairs and for the Jacobians of blocks.

Each is generated from `coupling.DEFINITIONS`, the variants and the kinds of token pairs.
"""

from dataclasses import replace
from typing import Any

from tracker.measures.coupling import DEFINITIONS
from tracker.measures.declaration import Measure

PAIR = ("token", "k", "layer", "layer_other")
TOKEN_PAIR = ("k", "layer", "pair_token", "pair_token_other")  # J of block `layer`, basis of block `pair_layer_other`
KINDS = {  # of token pairs
    "self": "self: J of t against J of t′",
    "fixed_input": "fixed input: first token to t, to t′",
    "fixed_output": "fixed output: t, t′ to last token",
}
CERTIFICATE = {  # of each Jacobian and its singular triplets
    "residual": "largest residual of a triplet, relative to s_1",
    "complete": "whether no larger singular value was missed",
    "formed": "whether the Jacobian was formed, not known by its products alone",
    "full_svd": "whether the triplets come from a full decomposition",
    "sliced": "whether the Jacobian was evaluated at its row alone, not over the full sequence",
    "value_error": "error of the row's output against the recorded one",
    "derivative_error": "error of a vector-Jacobian product against that of the full sequence",
}
BEFORE_NORM = "before the final norm"
EXTRAS = "Tokens, entropy, noise"  # a section of the W&B dashboard


def couplings() -> tuple[Measure, ...]:
    """Return the variables for layer pairs: each definition's measure, its variants and their null levels."""
    measures = []
    for definition in DEFINITIONS:
        name, shown = definition.name, definition.dashboard
        plain = Measure(
            name,
            PAIR,
            definition.label,
            option="coupling",
            curve="pairs",
            null=f"{name}_null",
            counted=True,
            metric=f"coupling/{name}",
            logged=("", "_q25", "_q75", "_null"),
            dashboard="Coupling" if "" in shown else "",
            text=definition.text,
        )
        variant = replace(plain, base=name, dashboard="")
        raw = replace(
            variant,
            name=f"{name}_raw",
            variant="raw",
            label=f"{definition.label}, before final norm",
            null=f"{name}_raw_null",
            metric=f"coupling/{name}_raw",
            logged=("", "_null") if "" in shown else (),
            dashboard=EXTRAS if "raw" in shown else "",
            text=f"{definition.text} Here the last block is taken without the final norm.",
        )
        swapped = replace(
            variant,
            name=f"{name}_vju",
            variant="vju",
            label=f"{definition.label}, sides swapped",
            option="vju",
            metric=f"coupling/{name}_vju",
            logged=("",),
            dashboard=EXTRAS if "vju" in shown else "",
            text=f"{definition.text} Here A = V′ᵀ J U′, the sides of the basis swapped.",
        )
        measures += [plain, raw, swapped, _null(plain), _null(raw)]
    return tuple(measures)


def across_tokens() -> tuple[Measure, ...]:
    """Return the variables for token pairs of every kind."""
    measures = []
    for kind, text in KINDS.items():
        shared: dict[str, Any] = {"option": "tokenwise", "variant": kind}
        for definition in DEFINITIONS:
            name, shown = definition.name, "tokens" in definition.dashboard
            measure = Measure(
                f"{kind}_{name}",
                TOKEN_PAIR,
                f"{definition.label}, {text}",
                base=name,
                curve="token pairs",
                null=f"{kind}_{name}_null",
                counted=True,
                metric=f"tokens/{kind}/{name}",
                logged=("", "_null"),
                dashboard=EXTRAS if shown else "",
                **shared,
            )
            measures += [measure, _null(measure)]
        tokens = TOKEN_PAIR[1:3]
        measures += [
            Measure(f"{kind}_residual", tokens, f"largest residual of a triplet, {text}", **shared),
            Measure(f"{kind}_complete", tokens, f"whether no larger singular value was missed, {text}", **shared),
            Measure(f"{kind}_singular_value", (*tokens, "rank"), f"singular value, {text}", **shared),
            Measure(f"{kind}_matrix", (*TOKEN_PAIR[1:], "row", "column"), f"coupling matrix A, {text}", **shared),
        ]
    return tuple(measures)


def jacobians() -> tuple[Measure, ...]:
    """Return the singular values and certificates of the Jacobians, with and without the final norm in the last block."""
    measures = []
    for end, variant, text in (("", "", ""), ("_raw", "raw", f", last block {BEFORE_NORM}")):
        shared: dict[str, Any] = {"option": "coupling", "variant": variant}
        layer, rank = ("token", "layer"), ("token", "layer", "rank")
        gap = "gap to the next singular value, relative to s_1"
        measures += [
            Measure(f"singular_value{end}", rank, f"singular value{text}", **shared),
            Measure(f"singular_gap{end}", rank, f"{gap}{text}", **shared),
            *(Measure(f"{name}{end}", layer, f"{label}{text}", **shared) for name, label in CERTIFICATE.items()),
        ]
    return tuple(measures)


def _null(measure: Measure) -> Measure:
    return Measure(
        measure.null,
        measure.dims[:-1],
        f"{measure.label}: null level",
        option=measure.option,
        variant=measure.variant,
        base=measure.name,
        metric=f"{measure.metric}_null",
    )
