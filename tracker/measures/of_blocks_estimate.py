"""The expected seconds of measures of blocks and of their products, from one timed block."""

from collections.abc import Callable, Sequence
from typing import Any

from tracker.jacobians.restriction import Selection
from tracker.measures import of_blocks, products
from tracker.measures.layers import Layer


def seconds_of_blocks(
    layer: Layer,
    selections: Sequence[Selection],
    L: int,
    choices: Sequence[str],
    timed: Callable[[Callable[[], Any]], tuple[float, Any]],
) -> dict[str, float]:
    """Return the seconds that each choice of `measures=` takes for L blocks like this one, at its rows.

    Args:
        timed: function -> its seconds and its result.
    """
    stages = {}
    for choice in of_blocks.measured(choices):
        if choice == "products":
            decompositions = 2 * len(products.depths(L, layer.triplets.V.shape[-2])) - 1
            step, _ = timed(lambda: products.Chain().multiply(layer.jacobian()))
            whole, _ = timed(lambda: products.of_matrices([layer.jacobian()], 1))
            stages[choice] = (2 * L - 1) * step + decompositions * max(0.0, whole - step)
        else:
            stages[choice] = L * timed(lambda one=choice: of_blocks.measure_blocks([layer], [selections], [one]))[0]
    return stages
