"""The headline numbers: what a training run logs by default, W&B shows by default and the saved workspace begins with.

Each is the name of a metric of `statistics.scalars`, with its title; {k} is the smallest K measured. Those that were not
measured are left out. Walks and replays log also what the saved workspace draws, and each logs all metrics with `log="all"`.
"""

from collections.abc import Mapping

from tracker.measures.families import KINDS

MEAN_OFFDIAG = "coupling/mean_offdiag"  # the mis-coupling off the diagonal, for the smallest K
MEAN_OFFDIAG_NULL = "coupling/mean_offdiag_null"
BELOW_NULL = "coupling/null_minus_miscoupling"
LSS = "trajectory/lss/median"
UNDEFINED = "coupling/undefined"

HEADLINES: Mapping[str, str] = {
    MEAN_OFFDIAG: "mis-coupling of two blocks, mean over l ≠ l′",
    MEAN_OFFDIAG_NULL: "its null level",
    BELOW_NULL: "null level minus mis-coupling: larger is stronger coupling",
    "coupling/miscoupling/k{k}/mean_adjacent": "mis-coupling of adjacent blocks",
    "coupling/offdiag_normalized/k{k}/mean_offdiag": "off-diagonal, normalized (paper, eq. 14), mean over l ≠ l′",
    "coupling/offdiag_normalized_null/k{k}/mean_offdiag": "its null level",
    LSS: "line-shape score, median",
    "trajectory/expodistance/median": "expodistance, median",
    "trajectory/alpha_mean/median": "mean growth rate α, median",
    "trajectory/update_ratio/median": "update ratio, median",
    "trajectory/entropy/median": "entropy of the next token, nats, median",
    "trajectory/noise_similarity/10pct": "cosine to the states without noise, noise of 10 %",
    **{f"tokens/{kind}/offdiag_normalized/k{{k}}": f"off-diagonal, normalized, {text}" for kind, text in KINDS.items()},
    UNDEFINED: "number of undefined values, where there are any",
}


def headline_names(k: int) -> tuple[str, ...]:
    """Return the names of the headline numbers, for the smallest K measured."""
    return tuple(name.format(k=k) for name in HEADLINES)
