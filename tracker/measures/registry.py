"""The measured variables, collected from the files that compute them, and the headline numbers.

`MEASURES` lists every variable of a measured Dataset (`declaration.Measure`): its dimensions, its texts, formula and unit,
how it is computed from the states (where it is computed from them alone), how it is reduced to the points of a curve, and
where logs and page show it. What the rest of the package needs is derived from it: the dimensions and attributes of a
Dataset, the counts of undefined values, the curves, the names of metrics, the charts of the page and the choices of
`measures=`.

To add a variable that is read off the states, write its formula and an entry of `DECLARED` in `trajectory`; one of each
block's Jacobian, in `single_blocks`. To add a definition of mis-coupling, add it to
`coupling.DEFINITIONS`.

The headline numbers (`headline_names`) are what a training run logs by default and W&B shows by default: those of couplings
and noise, and the median of each measure that declares it (`headline`). Those that were not measured are left out. Walks and
replays log also the curves of the main measures (`main`), and each logs all metrics with `log="all"`.
"""

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
from tracker.measures.declaration import DIAGNOSTICS, Measure
from tracker.measures.tokenwise import KINDS

__all__ = [
    "BY_NAME",
    "DIMS",
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


def headline_names(k: int) -> tuple[str, ...]:
    """Return the names of the headline numbers, for the smallest K measured."""
    miscoupling, normalized = BY_NAME["miscoupling"], BY_NAME["offdiag_normalized"]
    over = {"k": k, "pairs": "mean_offdiag"}
    return (
        MEAN_OFFDIAG,
        MEAN_OFFDIAG_NULL,
        miscoupling.point("_coupling", **over),
        miscoupling.point(k=k, pairs="mean_adjacent"),
        *(normalized.point(part, **over) for part in ("", "_null", "_coupling")),
        *(measure.point(statistic="median") for measure in MEASURES if measure.headline),
        BY_NAME["noise_similarity"].point(noise=0.1),
        *(BY_NAME[f"{kind}_offdiag_normalized"].point(k=k) for kind in KINDS),
        UNDEFINED_COUNT,
    )
