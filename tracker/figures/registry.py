"""The declarations of all figures: number, title, function and what it needs.

How each differs from the paper's is in docs/figures.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tracker.analysis.across_models import SIZES, TRAINING_TOKENS
from tracker.analysis.doubts import CONVENTIONS, MEASURED
from tracker.figures import coupling, jacobians, matrices, model_comparisons, states
from tracker.figures.coupling import MEASURE
from tracker.figures.model_comparisons import COUPLING, SCORE

if TYPE_CHECKING:
    from tracker.figures.drawing import Plotted


@dataclass(frozen=True)
class FigureSpec:
    """A figure that can be drawn.

    Attributes:
        number: its name on the command line, for figures of the paper their number.
        draw: the function that draws it from results, `Choices` and the axes to draw into, if the caller gives them.
        needs: variables that each result must have.
        also: numbers of further figures of the paper that show the same.
        results: the least number of results.
        steps: the least number of steps of a result.
        untrained: whether the first step must be step 0.
        alike: attributes, of `CONVENTIONS`, in which results may not differ.
        takes: those of `choices.Choices` that it takes, besides K and the convention. A figure that takes a measure also sets
            results beside each other that were measured by different conventions, with a warning.
    """

    number: str
    title: str
    draw: "Callable[..., Plotted]"
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    results: int = 1
    steps: int = 1
    untrained: bool = False
    alike: tuple[str, ...] = CONVENTIONS
    takes: tuple[str, ...] = ()


def _of_variables(
    number: str, title: str, draw: "Callable[..., Plotted]", *variables: str, **options: Any
) -> FigureSpec:
    """Declare a figure that shows these variables, and needs no others."""
    return FigureSpec(number, title, partial(draw, variables=variables), variables, **options)


_against_score = partial(FigureSpec, needs=(MEASURE, "score"), results=4)
_over_training = partial(states.quartile_lines, of="result")
_at_blocks = partial(states.quartile_lines, of="block")
_by_depth = partial(states.quartile_lines, of="step")


def _of_matrices(number: str, title: str, variable: str, **options: Any) -> FigureSpec:
    """Declare a figure that shows these coupling matrices."""
    needs = tuple(dict.fromkeys(("matrix", variable)))
    draw = partial(matrices.matrix_grid, variable=variable)
    return FigureSpec(number, title, draw, needs, takes=("layers",), **options)


_DECLARATIONS = (
    FigureSpec(
        "curves",
        "Coupling, line-shape score and expodistance over training",
        coupling.training_curves,
        ("miscoupling", "offdiag_normalized", "lss", "expodistance"),
        steps=2,
        alike=(),
        takes=("measure", "step", "axis", "recipes"),
    ),
    FigureSpec(
        "heatmap",
        "Mis-coupling of all pairs of blocks",
        matrices.heatmaps,
        ("miscoupling",),
        alike=(),
        takes=("measure", "step"),
    ),
    _against_score("1a", "Coupling against benchmark score", model_comparisons.comparison),
    FigureSpec(
        "1b",
        "Coupling over training",
        coupling.over_training,
        (MEASURE,),
        steps=2,
        alike=(),
        takes=("measure", "step", "axis"),
    ),
    FigureSpec(
        "1c",
        "Blocks as nodes, edges by coupling",
        coupling.layer_graph,
        (MEASURE,),
        also=("1d", "1e"),
    ),
    _of_matrices(
        "3",
        "Coupling matrices across depth",
        "matrix",
        also=("20",),
    ),
    _of_matrices(
        "4", "Coupling matrices across tokens, self-coupling", "self_matrix", also=("17", "21")
    ),
    _of_variables(
        "5",
        "Line-shape score and expodistance, untrained and trained",
        states.first_and_last,
        "lss",
        "expodistance",
        steps=2,
        untrained=True,
    ),
    _against_score(
        "7",
        "Exponential fit between coupling and score",
        partial(model_comparisons.comparison, exponential=True),
    ),
    _against_score(
        "8",
        "Training tokens against coupling",
        partial(
            model_comparisons.comparison,
            shown=[(TRAINING_TOKENS, COUPLING), (TRAINING_TOKENS, SCORE)],
        ),
        needs=(MEASURE, "score", "tokens_seen"),
    ),
    FigureSpec(
        "9",
        "Coupling of each prompt against its difficulty and its length",
        model_comparisons.by_prompt,
        (MEASURE, "norm"),
    ),
    FigureSpec(
        "12",
        "Token trajectories on a principal plane",
        states.principal_planes,
        ("pca",),
        also=("13",),
    ),
    FigureSpec(
        "15",
        "Coupling by layer: plain prompts and others",
        coupling.by_layer,
        (MEASURE,),
        results=2,
        alike=MEASURED,
    ),
    _of_matrices(
        "18", "Coupling matrices across tokens, fixed input", "fixed_input_matrix", also=("22",)
    ),
    _of_matrices(
        "19", "Coupling matrices across tokens, fixed output", "fixed_output_matrix", also=("23",)
    ),
    _of_variables(
        "25",
        "Variation of step lengths at initialisation",
        partial(states.first_and_last, trained=False),
        "equidistance",
        untrained=True,
    ),
    _of_variables(
        "26",
        "Norm, line-shape score, variation of step lengths and entropy by depth",
        _by_depth,
        "norm",
        "lss_window",
        "equidistance_window",
        "entropy",
    ),
    _of_variables(
        "27", "Line-shape score over training", _over_training, "lss", steps=2, takes=("axis",)
    ),
    _of_variables(
        "28",
        "Linearity at fixed blocks over training",
        partial(_at_blocks, sign=-1),
        "lss_window",
        steps=2,
        takes=("axis", "layers"),
    ),
    _of_variables(
        "29",
        "Expodistance at fixed blocks over training",
        _at_blocks,
        "expodistance_window",
        steps=2,
        takes=("axis", "layers"),
    ),
    _of_variables(
        "30",
        "Norm and expodistance by depth during training",
        _by_depth,
        "norm",
        "expodistance_window",
        steps=2,
    ),
    _against_score(
        "31",
        "The score on GSM8K against the mean score",
        model_comparisons.benchmark_against_mean,
        needs=("score",),
        alike=(),
    ),
    FigureSpec(
        "32",
        "Response to noise on the embeddings",
        states.noise_response,
        ("noise_similarity",),
    ),
    FigureSpec(
        "33",
        "Singular values by depth, untrained",
        partial(jacobians.singular_values, step="first"),
        ("singular_value",),
        untrained=True,
    ),
    FigureSpec(
        "34",
        "Singular values by depth",
        partial(jacobians.singular_values, step="last"),
        ("singular_value",),
    ),
    _against_score(
        "35",
        "Depth, width, parameters and coupling against score",
        partial(model_comparisons.comparison, shown=[(name, SCORE) for name in (*SIZES, COUPLING)]),
    ),
    _against_score(
        "36",
        "Coupling against score for every K",
        partial(model_comparisons.comparison, every_k=True),
    ),
    FigureSpec(
        "table1",
        "The models",
        model_comparisons.table_of_models,
        alike=(),
    ),
    _against_score(
        "table4", "R² of coupling and score for subsets of models", model_comparisons.subsets
    ),
    # Not in the paper.
    FigureSpec(
        "products",
        "What the blocks do together to a small change of the state",
        jacobians.spectra,
        ("from_first_singular_value", "lyapunov_exponent"),
    ),
    _of_variables(
        "effective_rank",
        "How many directions survive, and how much the strongest grows",
        _by_depth,
        "from_first_effective_rank",
        "to_last_effective_rank",
        "from_first_amplification",
        "to_last_amplification",
    ),
    _of_variables(
        "depth_use",
        "How much each block is used",
        _by_depth,
        "block_influence",
        "update_cosine",
        "jacobian_gain",
        "linear_error",
    ),
    _of_variables(
        "normality",
        "Symmetry of the Jacobians by depth",
        _by_depth,
        "symmetric_share",
        "mean_alignment",
    ),
)
FIGURES = {figure.number: figure for figure in _DECLARATIONS}
ALIASES = {other: figure.number for figure in _DECLARATIONS for other in figure.also}
_VIT = (
    "vision transformers over weight decay and stochastic depth; python -m vit.analysis GRID draws"
)
_NO_CAPTION = "its caption is missing from the text of the paper that these figures follow"
NOT_DRAWN = {  # of the paper, with the reason
    "2": "a diagram of how coupling is computed, without data",
    "6": f"{_VIT} it",
    "10": f"{_VIT} it",
    "11": f"{_VIT} Figs 6 and 10; {_NO_CAPTION}",
    "14": f"{_NO_CAPTION}; the paper cites it for the linearity of trajectories, as Figs 5, 12, 26, 27 and 28",
    "16": f"{_NO_CAPTION}, which does not cite it either",
    "24": f"{_NO_CAPTION}, which does not cite it either",
    "table2": "a summary in words of what coupling may mean for other research, without data",
    "table3": f"{_NO_CAPTION}, which does not cite it either",
}
