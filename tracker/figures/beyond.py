"""The declarations of the figures of measures that are not the paper's: products of blocks, normality of Jacobians."""

from functools import partial

from tracker.figures import halves, products, states
from tracker.figures.declaration import AT_STEPS, MEDIANS, Declaration

WITHOUT_NORM = "the last block without the final norm"
_PRODUCTS = tuple(
    f"{form}_{name}" for name in ("effective_rank", "amplification") for form in ("from_first", "to_last")
)
_USE = ("block_influence", "update_cosine", "jacobian_gain", "linear_error")
_HALVES = tuple(f"{half}_{name}" for half in ("attention", "mlp") for name in ("gain", "share", "coupling"))

BEYOND = (
    Declaration(
        "products",
        "What the blocks do together to a small change of the state",
        products.spectra,
        f"not in the paper; {MEDIANS}, at the first and the last step; the other tokens held fixed; {WITHOUT_NORM}; singular "
        "values at the depths that are decomposed, exponents of all blocks",
        ("from_first_singular_value", "lyapunov_exponent"),
    ),
    Declaration(
        "effective_rank",
        "How many directions survive, and how much the strongest grows",
        partial(states.by_depth, variables=_PRODUCTS),
        f"not in the paper; {MEDIANS}; Roy and Vetterli's effective rank, at most the width; the other tokens held fixed; "
        f"{WITHOUT_NORM}; {AT_STEPS}",
        _PRODUCTS,
    ),
    Declaration(
        "depth_use",
        "How much each block is used",
        partial(states.by_depth, variables=_USE),
        f"not in the paper; {MEDIANS}; block influence as in ShortGPT, whose least are the first to remove; states before the "
        f"final norm; {WITHOUT_NORM}; {AT_STEPS}",
        _USE,
    ),
    Declaration(
        "halves",
        "Attention and MLP apart, by depth",
        partial(states.by_depth, variables=_HALVES),
        f"not in the paper; {MEDIANS}; mis-coupling of each half in the bases of the other, null levels dotted; "
        f"{WITHOUT_NORM}; {AT_STEPS}",
        _HALVES,
    ),
    Declaration(
        "residual_alignment",
        "Residual alignment of attention and MLP",
        halves.residual_alignment,
        "not in the paper (Li and Papyan, 2023); the first prompt at the last step; an early, a middle and a late block; the "
        f"smallest K; in the singular bases of the whole block, {WITHOUT_NORM}",
        ("attention_matrix", "mlp_matrix"),
    ),
    Declaration(
        "normality",
        "Symmetry of the Jacobians by depth",
        partial(states.by_depth, variables=("symmetric_share", "mean_alignment")),
        f"not in the paper; {MEDIANS}; symmetric share 1/2 and alignment 0 for unrelated directions; {WITHOUT_NORM}; {AT_STEPS}",
        ("symmetric_share", "mean_alignment"),
    ),
)
