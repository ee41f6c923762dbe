"""The declaration of a measured variable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Reduction = Literal["pairs", "token pairs", "quartiles", "last quartiles", "last mean"]
Axis = Literal["linear", "logarithmic", "from zero"]
Chart = Literal["training", "depth", "blocks", "table"]
DIAGNOSTICS = "diagnostics_"  # begins the names of variables that say how far the results can be trusted


@dataclass(frozen=True)
class Measure:
    """A variable of a measured Dataset.

    Attributes:
        dims: its dimensions after `prompt`.
        label: its readable name: `long_name` in the Dataset and the title of its charts.
        unit: its unit; "1" for pure numbers.
        option: the choice of `measures=` that enables it; "keep" for those of `keep=`; "" for variables of every measurement.
        formula: its definition in symbols: `formula` in the Dataset.
        reference: where the definition is from: the paper's equation or section, or who else.
        compute: states -> values, for variables that depend on the states alone.
        windowed: whether `compute` takes the size of a window as its second argument.
        variant: "normed": the last block, or the last state, includes the final norm; "vju": the sides of the bases are
            swapped; a key of `KINDS`: across tokens; "": none of these, of the blocks alone.
        base: the variable that this one is a variant of; "" if it is none.
        curve: how it is reduced to a point of a curve (`statistics.curves`); None: it has no curve.
        null: whether it has a null level, which is computed when it is read (`analysis.null_levels`).
        counted: whether its undefined values are counted.
        metric: its name in logs; "" if its curve is not logged.
        logged: the parts of its curve that loggers record: "" for the value, "_q25", "_q75", "_null".
        dashboard: the section of the W&B dashboard that has its panel; "" for none.
        text: its definition in a sentence, the caption of its charts.
        charts: its charts on the page: "training" shows its curve; "depth", its values by depth at one step; "blocks", its
            values at an early, a middle and a late block over training; "table", a column of the table of blocks. Its
            variant "normed" shares the charts.
        axis: the scale of its axis in charts.
    """

    name: str
    dims: tuple[str, ...]
    label: str
    unit: str = "1"
    option: str = ""
    formula: str = ""
    reference: str = ""
    compute: Callable[..., Tensor] | None = None
    windowed: bool = False
    variant: str = ""
    base: str = ""
    curve: Reduction | None = None
    null: bool = False
    counted: bool = False
    metric: str = ""
    logged: tuple[str, ...] = ()
    dashboard: str = ""
    text: str = ""
    charts: tuple[Chart, ...] = ()
    axis: Axis = "linear"

    @property
    def by_depth(self) -> bool:
        """Whether it has one value per position, or measured token, and block or state."""
        by_position = self.dims in (("layer", "position"), ("depth", "position"))
        return by_position or (self.dims == ("token", "layer") and bool(self.charts))
