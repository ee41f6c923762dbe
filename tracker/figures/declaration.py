"""What is declared of a figure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracker.figures.drawing import Plotted

MEDIANS = "medians and quartiles over prompts and tokens"
AT_STEPS = "at most four steps, evenly spaced"


@dataclass(frozen=True)
class Declaration:
    """A figure that can be drawn.

    Attributes:
        number: its name on the command line, for figures of the paper their number.
        draw: the function that draws it from results, K and the axes to draw into, if the caller gives them; that of an
            adjustable figure also takes a measure and a step, or None for those it shows by default.
        differs: how it differs from the paper's figure.
        needs: variables that each result must have.
        also: numbers of further figures of the paper that show the same.
        results: the least number of results.
        steps: the least number of steps of a result.
        untrained: whether the first step must be step 0.
        may_differ: those of `CONVENTIONS` in which results may differ.
        adjustable: whether it shows any measure of pairs of blocks and any step, and sets results beside each other that were
            measured by different conventions, with a warning.
    """

    number: str
    title: str
    draw: "Callable[..., Plotted]"
    differs: str
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    results: int = 1
    steps: int = 1
    untrained: bool = False
    may_differ: tuple[str, ...] = ()
    adjustable: bool = False
