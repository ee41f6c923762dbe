"""Variables of parts of blocks' Jacobians beyond the paper: words for singular directions; part of the registry."""

from typing import Any

from tracker.measures.block_table import LAYER
from tracker.measures.coordinates import OURS
from tracker.measures.declaration import Measure

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
