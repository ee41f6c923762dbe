"""The measured variables, each declared once.

`MEASURES` lists every variable of a measured Dataset: its dimensions, its texts, formula and unit, how it is computed from the
states (where it is computed from them alone), how it is reduced to the points of a curve, and where logs, dashboard and page
show it. What the rest of the package needs is derived from it: the dimensions and attributes of a Dataset, the counts of
undefined values, the curves, the names of metrics, the dashboard, the charts of the page and the choices of `measures=`.

To add a variable that is read off the states, write its formula in `trajectory` and an entry in `TRAJECTORY`; one of each
block's Jacobian, an entry in `block_table`. To add a definition of mis-coupling, add it to `coupling.DEFINITIONS`.
"""

from dataclasses import replace
from typing import Any

from tracker.measures import trajectory
from tracker.measures.block_parts_table import OF_DIRECTIONS, OF_HALVES
from tracker.measures.block_table import OF_BLOCKS, OF_PRODUCTS, OF_STATES
from tracker.measures.choices import OPTIONS, choices, defaults
from tracker.measures.coupling import DEFINITIONS
from tracker.measures.declaration import DIAGNOSTICS, OURS, Measure
from tracker.measures.families import EXTRAS, KINDS, NORMED, across_tokens, couplings, jacobians, kept

__all__ = [
    "BY_NAME", "DIMS", "KINDS", "MEASURES", "MISCOUPLINGS", "OF_BLOCKS", "OPTIONS", "VARIANTS",
    "choices", "defaults",
]  # fmt: skip

POSITION, BLOCK, STATE = ("position",), ("layer", "position"), ("depth", "position")
HIDDEN_STATE = "units of the hidden state"
UNDEFINED = f"{DIAGNOSTICS}undefined"  # its counts: how many values of each measure are undefined


def _of_states(name: str, dims: tuple[str, ...], label: str, both: bool = False, **more: Any) -> tuple[Measure, ...]:
    """Return a variable of `TRAJECTORY`, with quartiles as its curve if it has one.

    Args:
        both: also return the variable with the final norm applied to the last state, NAME_normed.
    """
    if "curve" in more:
        more |= {"metric": f"trajectory/{name}", "logged": ("",)}
    measure = Measure(name, dims, label, option="trajectory", **more)
    if not both:
        return (measure,)
    normed = replace(
        measure,
        name=f"{name}{NORMED}",
        label=f"{label}, with the final norm",
        variant="normed",
        base=name,
        formula=f"{measure.formula}; the final norm applied to xᴸ",
        metric=f"{measure.metric}{NORMED}" if measure.metric else "",
        dashboard="",
        charts=(),
    )
    return measure, normed


IN_WINDOW = "As over training, but over a window of states around each block; near the ends no window fits."
TRAJECTORY = (
    *_of_states(
        "lss",
        POSITION,
        "line-shape score",
        both=True,
        compute=trajectory.lss,
        formula="L / ‖Σₗ (xˡ − xˡ⁻¹) / ‖xˡ − xˡ⁻¹‖‖",
        reference="paper, eq. 15 and 16",
        text="How straight a token's path through the blocks is: 1 is a straight line, higher is more winding.",
        curve="quartiles",
        counted=True,
        dashboard="Trajectory",
        charts=("training",),
    ),
    *_of_states(
        "expodistance",
        POSITION,
        "expodistance",
        both=True,
        compute=trajectory.expodistance,
        formula="Varₗ αˡ / (Avgₗ αˡ)², αˡ = ln(‖xˡ‖ / ‖xˡ⁻¹‖)",
        reference="paper, eq. 17 and 18",
        text="How unevenly the norm of a token's state grows from block to block: 0 is exponential growth. It diverges "
        "where the mean growth rate nears zero.",
        curve="quartiles",
        counted=True,
        dashboard="Trajectory",
        charts=("training",),
        axis="logarithmic",
    ),
    *_of_states(
        "alpha_mean",
        POSITION,
        "mean growth rate α",
        both=True,
        compute=trajectory.alpha_mean,
        formula="Avgₗ αˡ, αˡ = ln(‖xˡ‖ / ‖xˡ⁻¹‖)",
        reference="paper, eq. 17",
        text="How much the norm of a token's state grows in a block: the mean over blocks of ln(‖xˡ‖ / ‖xˡ⁻¹‖).",
        curve="quartiles",
        counted=True,
        dashboard="Trajectory",
        charts=("training",),
    ),
    *_of_states(
        "equidistance",
        POSITION,
        "variation of step lengths",
        both=True,
        compute=trajectory.equidistance,
        formula="Stdₗ ‖xˡ − xˡ⁻¹‖ / Avgₗ ‖xˡ − xˡ⁻¹‖",
        reference="paper, Fig. 25",
        text="How unequal the steps of a token's state from block to block are: standard deviation over mean of their lengths; "
        "0 is equal steps.",
        curve="quartiles",
        counted=True,
        dashboard="Trajectory",
        charts=("training",),
        axis="from zero",
    ),
    *_of_states(
        "lss_window",
        BLOCK,
        "line-shape score in a window",
        both=True,
        compute=trajectory.lss_window,
        formula="line-shape score over the states around block l",
        reference="paper, Figs 26 to 28",
        windowed=True,
        text=IN_WINDOW,
        charts=("depth", "blocks"),
    ),
    *_of_states(
        "expodistance_window",
        BLOCK,
        "expodistance in a window",
        both=True,
        compute=trajectory.expodistance_window,
        formula="expodistance over the states around block l",
        reference="paper, Fig. 29 and 30",
        windowed=True,
        text=IN_WINDOW,
        charts=("depth", "blocks"),
        axis="logarithmic",
    ),
    *_of_states(
        "equidistance_window",
        BLOCK,
        "variation of step lengths in a window",
        both=True,
        compute=trajectory.equidistance_window,
        formula="equidistance over the states around block l",
        reference="paper, Fig. 26",
        windowed=True,
        text=f"{IN_WINDOW} 0 is equal steps.",
        charts=("depth",),
    ),
    *_of_states(
        "norm",
        STATE,
        "norm of the states",
        both=True,
        unit=HIDDEN_STATE,
        compute=trajectory.norms,
        formula="‖xˡ‖",
        reference="paper, Figs 26 and 30",
        text="‖xˡ‖, the length of a token's state after l blocks.",
        charts=("depth",),
        axis="logarithmic",
    ),
    *_of_states(
        "update_ratio",
        BLOCK,
        "update ratio",
        compute=trajectory.update_ratio,
        formula="‖xˡ − xˡ⁻¹‖ / ‖xˡ⁻¹‖",
        reference=OURS,
        text="‖xˡ − xˡ⁻¹‖ / ‖xˡ⁻¹‖: how far a block moves its state.",
        curve="quartiles",
        counted=True,
        dashboard="Trajectory",
        charts=("depth",),
        axis="logarithmic",
    ),
)
STATES = (*TRAJECTORY, *OF_STATES)  # the variables that are read off the states alone
OTHERS = (
    Measure(
        "entropy",
        STATE,
        "entropy of the next token",
        "nats",
        option="entropy",
        formula="−Σ p ln p, p = softmax(M norm(xˡ)), M the unembedding",
        reference="paper, Fig. 26",
        curve="last quartiles",
        counted=True,
        metric="trajectory/entropy",
        logged=("",),
        dashboard=EXTRAS,
        text="The prediction from each state, through the final norm and the unembedding.",
        charts=("depth",),
    ),
    Measure(
        "pca",
        (*STATE, "component"),
        "state on the principal axes of the last states",
        HIDDEN_STATE,
        option="pca",
        formula="components of xˡ on the two principal axes of the rows of Xᴸ",
        reference="paper, A.2.1",
        counted=True,
    ),
    Measure(
        "noise_similarity",
        ("noise", *STATE),
        "cosine to the states without noise",
        option="noise",
        formula="cos(xˡ, x̃ˡ), x̃ˡ the state with noise on the embeddings",
        reference="paper, Fig. 32",
        curve="last mean",
        counted=True,
        metric="trajectory/noise_similarity",
        logged=("",),
        dashboard=EXTRAS,
    ),
)
MEASURES: tuple[Measure, ...] = (
    Measure("token_position", ("token",), "position of the token", formula="t, counted from 0", reference=OURS),
    *couplings(),
    Measure(
        "matrix",
        ("token", "layer", "layer_other", "row", "column"),
        "coupling matrix A",
        option="matrices",
        formula="A = U′ᵀ J V′, for the smallest K",
        reference="paper, eq. 10",
    ),
    Measure(
        "pair_position",
        ("pair_token",),
        "position of a token compared across tokens",
        option="tokenwise",
        formula="t, counted from 0",
        reference=OURS,
    ),
    *across_tokens(),
    *jacobians(),
    *kept(),
    *OF_STATES,
    *OF_BLOCKS,
    *OF_PRODUCTS,
    *OF_DIRECTIONS,
    *OF_HALVES,
    *TRAJECTORY,
    *OTHERS,
)
BY_NAME = {measure.name: measure for measure in MEASURES}
DIMS = {measure.name: measure.dims for measure in MEASURES}
MISCOUPLINGS = tuple(definition.name for definition in DEFINITIONS)
VARIANTS = tuple(f"{name}{end}" for name in MISCOUPLINGS for end in ("", NORMED, "_vju"))  # over layer pairs
