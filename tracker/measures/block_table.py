"""Variables of blocks' Jacobians beyond the paper: of each block, and of products of blocks; part of the registry.

To add one of each block, write its formula in a module of this package and an entry in `OF_BLOCKS`; `compute` receives an
`of_blocks.BlockRows`. All are of the blocks without the final norm.
"""

from typing import Any

from tracker.measures import depth_use, normality
from tracker.measures.declaration import OURS, Axis, Measure

LAYER, POSITION = ("token", "layer"), ("layer", "position")
SECTION = "Jacobians"  # of the W&B dashboard
WITHOUT_NORM = "without the final norm"
_STATES: dict[str, Any] = {
    "curve": "quartiles",
    "counted": True,
    "logged": ("",),
    "dashboard": SECTION,
    "charts": ("depth", "table"),
}


def _of_each(name: str, label: str, **more) -> Measure:
    """Return a variable with a value for each token and block, shown by depth, with quartiles as its curve."""
    more |= {"curve": "quartiles", "metric": f"jacobian/{name}", "logged": ("",), "dashboard": SECTION}
    more.setdefault("charts", ("depth",))
    return Measure(name, LAYER, label, counted=True, **more)


OF_BLOCKS = (
    _of_each(
        "jacobian_gain",
        "gain of the Jacobian",
        option="depth_use",
        compute=lambda block: depth_use.jacobian_gain(
            block.layer.moments.frobenius(block.x.shape[-1]), block.x.shape[-1]
        ),
        formula="‖J‖ / √d",
        reference=OURS,
        text="Root mean square singular value of a block's Jacobian: how much it adds to a small random change of the state.",
        axis="logarithmic",
        charts=("depth", "table"),
    ),
    _of_each(
        "linear_error",
        "part of the update that is not linear in the state",
        option="depth_use",
        compute=lambda block: depth_use.linear_error(block.Jx, block.f),
        formula="‖J xˡ⁻¹ − f‖ / ‖f‖, f = xˡ − xˡ⁻¹",
        reference=OURS,
        text="‖J x − f‖ / ‖f‖: 0 if a block's update f is linear in the token's own state x, 1 if the length of x does not "
        "matter to it (J x = 0).",
        charts=("depth", "table"),
    ),
    _of_each(
        "symmetric_share",
        "symmetric share of the Jacobian",
        option="normality",
        compute=lambda block: normality.symmetric_share(block.J),
        formula="‖(J + Jᵀ) / 2‖² / ‖J‖²",
        reference=OURS,
        text="How much of a block's Jacobian J is symmetric: 1 all of it, 0 none, 1/2 for unrelated input and output directions.",
        axis="linear",
    ),
    _of_each(
        "mean_alignment",
        "alignment of output and input directions, mean",
        option="normality",
        compute=lambda block: normality.alignment(block.triplets).mean(-1),
        formula="mean of uₖ · vₖ over k ≤ K, for the largest K, J = U S Vᵀ",
        reference="Li and Papyan (2023); paper, section 3.2",
        text="Mean of uₖ · vₖ: 1 if a block's strongest output directions are its strongest input directions (J = U S Uᵀ), −1 if "
        "they are opposite, 0 if they are unrelated.",
    ),
    _of_each(
        "departure",
        "departure from normality",
        option="eigenvalues",
        compute=lambda block: normality.departure(block.J),
        formula="√(‖J‖² − Σₖ |λₖ|²) / ‖J‖, λ the eigenvalues of J",
        reference="Henrici (1962)",
        text="Henrici's departure of a block's Jacobian from normality, relative to its norm: 0 for a normal matrix, such as a "
        "symmetric one, 1 for a nilpotent one.",
    ),
)
OF_STATES = (
    Measure(
        "block_influence",
        POSITION,
        "block influence",
        option="depth_use",
        compute=depth_use.block_influence,
        formula="1 − cos(xˡ⁻¹, xˡ)",
        reference="Men et al. (2024)",
        text="How much a block turns the state: 0 if it keeps its direction. ShortGPT removes the blocks with the least.",
        metric="trajectory/block_influence",
        axis="logarithmic",
        **_STATES,
    ),
    Measure(
        "update_cosine",
        POSITION,
        "cosine of the update to the state",
        option="depth_use",
        compute=depth_use.update_cosine,
        formula="cos(f, xˡ⁻¹), f = xˡ − xˡ⁻¹",
        reference=OURS,
        text="1 if a block's update lengthens the state, 0 if it is at a right angle to it, −1 if it shortens the state.",
        metric="trajectory/update_cosine",
        **_STATES,
    ),
)
_FORMS = {  # of products: the blocks, in symbols and in words
    "from_first": ("P = (I + Jˡ) … (I + J¹)", "from the first block to block l"),
    "to_last": ("P = (I + Jᴸ) … (I + Jˡ)", "from block l to the last block"),
}
_OF_ONE: dict[str, tuple[str, str, str, str, Axis]] = {  # label, formula, reference, text, axis
    "amplification": (
        "amplification",
        "s₁, P = U S Vᵀ",
        "Pennington et al. (2017)",
        "The largest factor by which a small change of the token's state grows",
        "logarithmic",
    ),
    "effective_rank": (
        "effective rank",
        "exp(−Σₖ pₖ ln pₖ), pₖ = sₖ / Σⱼ sⱼ, P = U S Vᵀ",
        "Roy and Vetterli (2007)",
        "How many directions of a small change of the token's state survive alike: at most the model's width",
        "from zero",
    ),
}


def _of_products() -> tuple[Measure, ...]:
    measures = []
    for form, (product, words) in _FORMS.items():
        end = f"{product}, blocks {WITHOUT_NORM}"
        for name, (label, formula, reference, text, axis) in _OF_ONE.items():
            whole = form == "from_first"  # the curve is of its last value, the product of all blocks
            measures.append(
                Measure(
                    f"{form}_{name}",
                    LAYER,
                    f"{label} {words}",
                    option="products",
                    formula=f"{formula}, {end}",
                    reference=reference,
                    text=f"{text}, {words}, the other tokens held fixed.",
                    curve="last quartiles" if whole else None,
                    metric=f"jacobian/{name}" if whole else "",
                    logged=("",) if whole else (),
                    dashboard=SECTION if whole else "",
                    charts=("depth",),
                    axis=axis,
                )
            )
        measures.append(
            Measure(
                f"{form}_singular_value",
                (*LAYER, "rank"),
                f"singular value of the product {words}",
                option="products",
                formula=f"sₖ, P = U S Vᵀ, {end}",
                reference="Pennington et al. (2017)",
            )
        )
    exponents = Measure(
        "lyapunov_exponent",
        ("token", "exponent"),
        "Lyapunov exponent of all blocks",
        option="products",
        formula="ln(sₖ) / L, P = (I + Jᴸ) … (I + J¹) = U S Vᵀ",
        reference="Pennington et al. (2017)",
        text="Mean logarithmic growth, in a block, of each of the d directions of a small change of the token's state.",
        counted=True,
    )
    return (*measures, exponents)


OF_PRODUCTS = _of_products()
