"""The expected seconds of measures of blocks and of their products, from one timed block."""

from collections.abc import Callable, Sequence
from typing import Any

from tracker.capture.recording import Recording
from tracker.jacobians.halves import HalfJacobians
from tracker.jacobians.restriction import Selection
from tracker.jacobians.rows import Jacobians
from tracker.measures import of_blocks, products
from tracker.measures.directions import DIRECTIONS, RANDOM, heads
from tracker.measures.layers import Layer


def seconds_of_blocks(
    jacobians: Jacobians,
    recording: Recording,
    selections: Sequence[Selection],
    layer: Layer,
    K: int,
    choices: Sequence[str],
    timed: Callable[[Callable[[], Any]], tuple[float, Any]],
) -> dict[str, float]:
    """Return the seconds that each choice of `measures=` takes for the blocks of a recording, all like one of them.

    Args:
        selections: the call of that block, with each row.
        layer: its Jacobians there.
        K: the smallest number of singular vectors.
        timed: function -> its seconds and its result.
    """
    L, halves = len(recording.calls), HalfJacobians(jacobians)
    head = heads([(recording, rows) for _, rows in selections]) if "directions" in choices else None
    stages = {}
    for choice in of_blocks.measured(choices):
        if choice == "products":
            decompositions = 2 * len(products.depths(L, layer.triplets.V.shape[-2])) - 1
            step, _ = timed(lambda: products.Chain().multiply(layer.jacobian()))
            whole, _ = timed(lambda: products.of_matrices([layer.jacobian()], 1))
            stages[choice] = (2 * L - 1) * step + decompositions * max(0.0, whole - step)
            continue
        how = ([layer], [selections], [choice], head, 1 << 24, halves, K)
        seconds, _ = timed(lambda how=how: of_blocks.measure_blocks(*how))
        # Random directions are taken once, not for each block.
        of_each = 2 * DIRECTIONS
        stages[choice] = seconds * ((L * of_each + RANDOM) / (of_each + RANDOM) if choice == "directions" else L)
    return stages
