"""Variables of parts of blocks' Jacobians beyond the paper: words for directions, attention and MLP; part of the registry."""

from typing import Any

from tracker.measures.block_table import LAYER, SECTION
from tracker.measures.declaration import OURS, Measure

_HALF = {"attention": ("attention", "J_A", "MLP"), "mlp": ("MLP", "J_M", "attention")}  # words, symbol, the other half


def _of_halves() -> tuple[Measure, ...]:
    measures = []
    for half, (words, symbol, other) in _HALF.items():
        shared: dict[str, Any] = {"option": "halves", "reference": OURS}
        drawn: dict[str, Any] = shared | {
            "curve": "quartiles",
            "logged": ("",),
            "dashboard": SECTION,
            "charts": ("depth",),
        }
        measures += [
            Measure(
                f"{half}_gain",
                LAYER,
                f"gain of the {words}",
                formula=f"‖{symbol}‖ / √d",
                metric=f"jacobian/{half}_gain",
                text=f"Root mean square singular value of the Jacobian of the {words} alone.",
                axis="logarithmic",
                **drawn,
            ),
            Measure(
                f"{half}_share",
                LAYER,
                f"share of the {words} in the block's top directions",
                formula=f"Σₖ uₖ · {symbol} vₖ / Σₖ sₖ, J = U S Vᵀ of the block, k ≤ the smallest K",
                metric=f"jacobian/{half}_share",
                text=f"How much of what the block does along its strongest directions the {words} does; where both read the same "
                "state, the shares add up to 1.",
                **drawn,
            ),
            Measure(
                f"{half}_coupling",
                LAYER,
                f"mis-coupling of the {words} in the bases of the {other}",
                formula=f"‖A − S‖ / ‖s‖₂, A = U′ᵀ {symbol} V′, U′ and V′ of the {other}, for the smallest K",
                metric=f"jacobian/{half}_coupling",
                text=f"Mis-coupling m_K of the {words} in the singular bases of the {other} of the same block; about 1 for "
                "unrelated ones.",
                **drawn,
            ),
            Measure(
                f"{half}_coupling_null",
                LAYER,
                f"mis-coupling of the {words} in the bases of the {other}: null level",
                formula=f"√E[‖A − S‖²] / ‖s‖₂, A = (Q U′)ᵀ {symbol} Q V′, Q a random rotation",
                **shared,
            ),
            Measure(
                f"{half}_matrix",
                (*LAYER, "row", "column"),
                f"residual alignment of the {words}",
                option="halves",
                formula=f"Uᵀ {symbol} V, J = U S Vᵀ of the block, for the smallest K",
                reference="Li and Papyan (2023)",
            ),
        ]
    return tuple(measures)


OF_HALVES = _of_halves()
_LOGITS = "logits of the next token, to first order, if xᴸ moves along"


def _of_directions() -> tuple[Measure, ...]:
    shared: dict[str, Any] = {"option": "directions", "reference": OURS}
    measures = []
    for part, symbol, what, signs in (
        ("out", "uₖ", "output", "the better of both signs"),
        ("in", "vₖ", "input", "one sign"),
    ):
        score = f"max of ({_LOGITS} {symbol}, minus their mean), / their standard deviation"
        measures += [
            Measure(
                f"direction_{part}_words",
                (*LAYER, "direction"),
                f"words of the {what} direction",
                formula=f"tokens of the largest {_LOGITS} {symbol}; the sign is that of the larger score of uₖ",
                **shared,
            ),
            Measure(
                f"direction_{part}_score",
                (*LAYER, "direction"),
                f"score of the words of the {what} direction",
                formula=score,
                **shared,
            ),
            Measure(
                f"direction_{part}_score_null",
                ("token",),
                f"score of the words of random {what} directions, 0.95 quantile",
                formula=f"score of 256 random directions, {signs}",
                **shared,
            ),
        ]
    words = "words of a random direction"
    return (*measures, Measure("direction_random_words", ("token", "random"), words, formula=words, **shared))


OF_DIRECTIONS = _of_directions()
