"""The measured variables, collected from the files that compute them, and the headline numbers.

`MEASURES` lists every variable of a measured Dataset (`declaration.Measure`): its dimensions, its texts, formula and unit,
how it is computed from the states (where it is computed from them alone), how it is reduced to the points of a curve, and
where logs, dashboard and page show it. What the rest of the package needs is derived from it: the dimensions and attributes
of a Dataset, the counts of undefined values, the curves, the names of metrics, the dashboard, the charts of the page and the
choices of `measures=`.

To add a variable that is read off the states, write its formula and an entry of `DECLARED` in `trajectory`; one of each
block's Jacobian, in `single_blocks`. To add a definition of mis-coupling, add it to
`coupling.DEFINITIONS`.

The headline numbers are what a training run logs by default, W&B shows by default and the saved workspace begins with: those
of couplings and noise, and the median of each measure that declares it (`headline`). Each is the name of a metric of
`curves.scalars`, with its title; {k} is the smallest K measured. Those that were not measured
are left out. Walks and replays log also what the saved workspace draws, and each logs all metrics with `log="all"`.
"""

from collections.abc import Mapping

from tracker.measures import (
    block_products,
    coupling,
    layers,
    single_blocks,
    states,
    tokenwise,
    trajectory,
)
from tracker.measures.coupling import MISCOUPLINGS, VARIANTS
from tracker.measures.declaration import DIAGNOSTICS, OURS, Measure
from tracker.measures.tokenwise import KINDS

__all__ = [
    "BY_NAME",
    "DIMS",
    "HEADLINES",
    "KINDS",
    "MEASURES",
    "MISCOUPLINGS",
    "UNDEFINED",
    "VARIANTS",
    "headline_names",
]

UNDEFINED = f"{DIAGNOSTICS}undefined"  # its counts: how many values of each measure are undefined
MEASURES: tuple[Measure, ...] = (
    Measure(
        "token_position",
        ("token",),
        "position of the token",
        formula="t, counted from 0",
        reference=OURS,
    ),
    *coupling.DECLARED,
    Measure(
        "matrix",
        ("token", "layer", "layer_other", "row", "column"),
        "coupling matrix A",
        option="matrices",
        formula="A = U′ᵀ J V′, for the smallest K",
        reference="paper, eq. 10",
    ),
    Measure(
        "pair_position",
        ("pair_token",),
        "position of a token compared across tokens",
        option="tokenwise",
        formula="t, counted from 0",
        reference=OURS,
    ),
    *tokenwise.DECLARED,
    *layers.DECLARED,
    *layers.DECLARED_KEPT,
    *trajectory.DECLARED_USE,
    *single_blocks.DECLARED,
    *block_products.DECLARED,
    *trajectory.DECLARED,
    *states.DECLARED,
)
BY_NAME = {measure.name: measure for measure in MEASURES}
DIMS = {measure.name: measure.dims for measure in MEASURES}

MEAN_OFFDIAG = "miscoupling/mean_offdiag"  # the mis-coupling off the diagonal, for the smallest K
MEAN_OFFDIAG_NULL = "miscoupling/mean_offdiag_null"
LSS = BY_NAME["lss"].point(statistic="median")
UNDEFINED_COUNT = "diagnostics/undefined"

_NORMALIZED, _K = BY_NAME["offdiag_normalized"], "{k}"

HEADLINES: Mapping[str, str] = {
    MEAN_OFFDIAG: "mis-coupling m_K, mean over l ≠ l′",
    MEAN_OFFDIAG_NULL: "its null level",
    BY_NAME["miscoupling"].point(
        "_coupling", k=_K, pairs="mean_offdiag"
    ): "coupling: null level minus mis-coupling m_K",
    BY_NAME["miscoupling"].point(
        k=_K, pairs="mean_adjacent"
    ): "mis-coupling m_K of adjacent blocks",
    _NORMALIZED.point(k=_K, pairs="mean_offdiag"): f"{_NORMALIZED.label}, mean over l ≠ l′",
    _NORMALIZED.point("_null", k=_K, pairs="mean_offdiag"): "its null level",
    _NORMALIZED.point(
        "_coupling", k=_K, pairs="mean_offdiag"
    ): f"coupling: null level minus {_NORMALIZED.label}",
    **{
        measure.point(
            statistic="median"
        ): f"{measure.label}{'' if measure.unit == '1' else f', {measure.unit}'}, median"
        for measure in MEASURES
        if measure.headline
    },
    BY_NAME["noise_similarity"].point(
        noise=0.1
    ): "cosine to the states without noise, noise of 10 %",
    **{
        BY_NAME[f"{kind}_offdiag_normalized"].point(k=_K): f"{_NORMALIZED.label}, {text}"
        for kind, text in KINDS.items()
    },
    UNDEFINED_COUNT: "number of undefined values, where there are any",
}


def headline_names(k: int) -> tuple[str, ...]:
    """Return the names of the headline numbers, for the smallest K measured."""
    return tuple(name.format(k=k) for name in HEADLINES)


def panel_metrics(measure: Measure, k: int = 0) -> list[str]:
    """Return the metrics that the panel of a measure shows: with its null level for one K, or over all positions."""
    if measure.null:
        labels = {"k": k} | ({"pairs": "mean_offdiag"} if measure.curve == "pairs" else {})
        return [measure.point(part, **labels) for part in ("", "_null")]
    if measure.curve == "last mean":
        return [measure.point(noise=level) for level in states.NOISE]
    return [measure.point(statistic=statistic) for statistic in ("median", "q25", "q75")]
