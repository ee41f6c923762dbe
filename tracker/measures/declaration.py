"""The declaration of a measured variable, and of a coordinate: label, formula, reference, unit, and where it is shown."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Reduction = Literal["pairs", "token pairs", "quartiles", "last quartiles", "last mean"]
Axis = Literal["linear", "logarithmic", "from zero"]
Chart = Literal["training", "depth", "blocks", "table"]
# Begins the names of variables that say how far the results can be trusted
DIAGNOSTICS = "diagnostics_"
OURS = "this package"
NORMED = "_normed"  # ends the names of variables that include the final norm
WITH_NORM, WITHOUT_NORM = "with the final norm", "without the final norm"
# Dimensions.
POSITION = ("position",)
BLOCK = ("layer", "position")
STATE = ("depth", "position")
LAYER = ("token", "layer")


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
        curve: how it is reduced to a point of a curve (`curves.curves`); None: it has no curve.
        null: whether it has a null level, which is computed when it is read (`analysis.null_levels`).
        counted: whether its undefined values are counted.
        metric: its name in logs; "" if its curve is not logged.
        logged: the parts of its curve that loggers record: "" for the value, "_q25", "_q75", "_null".
        headline: whether the median of its curve is a headline number, which training runs log by default.
        summary: whether the summary has the median of its values, with an interval; its curve is "quartiles" then.
        main: whether it is among the first variables of a Dataset, and walks log its curve by default.
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
    reference: str = OURS
    compute: Callable[..., Tensor] | None = None
    windowed: bool = False
    variant: str = ""
    base: str = ""
    curve: Reduction | None = None
    null: bool = False
    counted: bool = False
    metric: str = ""
    logged: tuple[str, ...] = ()
    headline: bool = False
    summary: bool = False
    main: bool = False
    text: str = ""
    charts: tuple[Chart, ...] = ()
    axis: Axis = "linear"

    @property
    def by_depth(self) -> bool:
        """Whether it has one value per position, or measured token, and block or state."""
        by_position = self.dims in (("layer", "position"), ("depth", "position"))
        return by_position or (self.dims == ("token", "layer") and bool(self.charts))

    def point(self, part: str = "", **labels: object) -> str:
        """Return the name in logs of a point of its curve.

        Args:
            part: one of `logged`.
            labels: of the point, along the dimensions of the curve.

        >>> Measure("offdiag", (), "off-diagonal", metric="miscoupling/offdiag").point("_null", k=10, pairs="mean")
        'miscoupling/offdiag_null/k10/mean'
        """
        # What a mis-coupling is below its null level is coupling
        metric = self.metric.removeprefix("mis") if part == "_coupling" else self.metric
        return "/".join(
            [f"{metric}{part}", *(point_label(dim, label) for dim, label in labels.items())]
        )


def point_label(dim: str, label: object) -> str:
    """Return the label of a point along a dimension as part of a metric's name, where W&B would read a dot as a path."""
    if dim == "noise":
        return f"{100 * float(str(label)):g}pct"
    return f"k{label}" if dim == "k" else str(label)


@dataclass(frozen=True)
class Coordinate:
    """A coordinate, or a variable that is no measure: the attributes that describe it.

    Attributes:
        dims: its dimensions, where it has others than its own name and `step`.
    """

    label: str
    formula: str
    reference: str = OURS
    unit: str = "1"
    dims: tuple[str, ...] = ()


COORDINATES = {
    "prompt": Coordinate("prompt or input", "0, 1, …"),
    "prompt_text": Coordinate(
        "text of the prompt", "as given; empty for inputs that are no text", dims=("prompt",)
    ),
    "prompt_source": Coordinate(
        "source of the prompt", "the benchmark or file that it is from", dims=("prompt",)
    ),
    "prompt_digest": Coordinate(
        "hash of the prompt's inputs",
        "of all tensors that the model receives, without padding",
        dims=("prompt",),
    ),
    "difficulty": Coordinate(
        "difficulty of the prompt", "as its source rates it", dims=("prompt",)
    ),
    "random_seed": Coordinate(
        "seed of the forward pass, which drew random numbers",
        "hash of its inputs; −1: drew none",
        dims=("prompt",),
    ),
    "token": Coordinate("index among the chosen tokens", "0, 1, …"),
    "token_text": Coordinate(
        "text of the token",
        "the tokenizer's; empty beyond the prompt's last token",
        dims=("prompt", "position"),
    ),
    "position": Coordinate("position in the sequence", "t = 0, …, n − 1"),
    "k": Coordinate("number of top singular vectors", "K", "paper, eq. 10"),
    "layer": Coordinate(
        "block l, whose Jacobian is expressed in a basis", "l = 1, …, L", "paper, eq. 10"
    ),
    "layer_other": Coordinate(
        "block l′, whose singular vectors are the basis", "l′ = 1, …, L", "paper, eq. 10"
    ),
    "pair_layer_other": Coordinate(
        "block l′ of the basis, across tokens",
        "l′ of each l",
        "paper, section 3.1",
        dims=("layer",),
    ),
    "pair_token": Coordinate(
        "token t of the Jacobian, among those compared", "0, 1, …", "paper, section 3.1"
    ),
    "pair_token_other": Coordinate(
        "token t′ of the basis, among those compared", "0, 1, …", "paper, section 3.1"
    ),
    "rank": Coordinate("rank of the singular value", "k = 1, …, K; 1 is the largest"),
    "exponent": Coordinate("rank of the exponent", "k = 1, …, d; 1 is the largest"),
    "row": Coordinate("row of A", "1, …, K", "paper, eq. 10"),
    "column": Coordinate("column of A", "1, …, K", "paper, eq. 10"),
    "output": Coordinate("component of the block's output", "0, …, d − 1"),
    "input": Coordinate("component of the block's input", "0, …, d − 1"),
    "depth": Coordinate(
        "number of blocks that the state has passed", "l = 0, …, L", "paper, eq. 15"
    ),
    "component": Coordinate("principal axis", "1, 2", "paper, A.2.1"),
    "noise": Coordinate(
        "length of the noise relative to the embedding", "rms ‖noise‖ / ‖x⁰‖", "paper, Fig. 32"
    ),
    "quantity": Coordinate("measure whose undefined values are counted", "name of the variable"),
    f"{DIAGNOSTICS}undefined": Coordinate(
        "number of undefined values of a measure", "NaN, except padding", dims=("quantity",)
    ),
    "step": Coordinate("training step", "optimizer steps taken"),
    "repeats": Coordinate("earlier step with the same weights", "−1: none"),
    "tokens_seen": Coordinate(
        "training tokens seen", "as the name of the checkpoint states", unit="tokens"
    ),
    "stage": Coordinate("stage of the training", "as the name of the checkpoint states"),
    "revision": Coordinate("revision of the checkpoint", "branch or tag"),
    "commit": Coordinate("commit of the checkpoint", "of its repository"),
    "files_sha256": Coordinate("hash of the weight files", "SHA-256"),
    "fingerprint": Coordinate("hash of the loaded weights", "of every tensor"),
    "token_ids_sha256": Coordinate(
        "hash of the token ids that the model received", "SHA-256, of all prompts"
    ),
    "suspect": Coordinate("why the weights may not be those of the step", "empty: not suspect"),
    "task": Coordinate("benchmark of a score", "name"),
    "score": Coordinate(
        "score on a benchmark",
        "as its source states it, 0 to 1",
        "the checkpoint, or the file of scores",
    ),
}


def of_each_block(name: str, label: str, **more: Any) -> Measure:
    """Return a variable with a value for each token and block, shown by depth, with quartiles as its curve."""
    more = {"charts": ("depth",)} | more
    more |= {
        "counted": True,
        "curve": "quartiles",
        "metric": f"jacobian/{name}",
        "logged": ("",),
        "main": True,
    }
    return Measure(name, LAYER, label, **more)
