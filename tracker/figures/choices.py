"""What the caller of a figure chooses: K, the measure, a step, blocks, the axis of training steps, and whose convention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tracker.common.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Axis = Literal["auto", "linear", "log"]  # of training steps; auto: linear if they are evenly spaced
Convention = Literal["package", "paper"]


@dataclass(frozen=True)
class Choices:
    """Choices of one figure.

    Attributes:
        k: number of singular vectors.
        measure: of pairs of blocks; None for that of the figure.
        step: the training step of a matrix, or the one that curves mark; None for the last.
        axis: the scale of training steps.
        convention: "package": coupling is the null level minus the mis-coupling, mean over pairs of different blocks, and the
            final norm is left out. "paper": minus the mis-coupling, mean over all pairs, l = l' and pairs of one module among
            them, and variables that count the final norm, where there are such; results without them are refused.
        layers: the blocks to show; None for those of the figure.
        ax: the axes to draw into, for a figure of one panel.
        recipes: the results that are runs of each recipe; None where each result is a recipe by itself.
    """

    k: int = 0
    measure: str | None = None
    step: float | None = None
    axis: Axis = "auto"
    convention: Convention = "package"
    layers: Sequence[int] | None = None
    ax: "Axes | None" = None
    recipes: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        for option, known in (("axis", Axis), ("convention", Convention)):
            value = getattr(self, option)
            if value not in get_args(known):
                raise UsageError(f"{option} {value!r}; choose from {', '.join(get_args(known))}")

    @property
    def paper(self) -> bool:
        """Whether the paper's convention was chosen."""
        return self.convention == "paper"

    @property
    def pairs(self) -> str:
        """The pairs of blocks whose mean is shown."""
        return "mean" if self.paper else "mean_offdiag"

    def variable(self, name: str) -> str:
        """Return the variable that a figure shows for this one, by the convention.

        >>> Choices(convention="paper").variable("lss")
        'lss_normed'
        """
        # Imported here: the command line takes its options' types from this module, and its --help needs no torch.
        from tracker.measures.declaration import NORMED
        from tracker.measures.registry import BY_NAME

        return f"{name}{NORMED}" if self.paper and f"{name}{NORMED}" in BY_NAME else name
