"""The declarations of all figures: number, title, function, what it needs, and how it differs from the paper's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tracker.analysis.doubts import CONVENTIONS
from tracker.figures import coupling, jacobians, model_comparisons, states
from tracker.figures.coupling import MEASURE

if TYPE_CHECKING:
    from tracker.figures.drawing import Plotted

MEDIANS = "medians and quartiles over prompts and tokens"
AT_STEPS = "at most four steps, evenly spaced"


@dataclass(frozen=True)
class FigureSpec:
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


NORM_LEFT_OUT = "the last block without the final norm"
_PRODUCTS = tuple(
    f"{form}_{name}" for name in ("effective_rank", "amplification") for form in ("from_first", "to_last")
)
_USE = ("block_influence", "update_cosine", "jacobian_gain", "linear_error")
_HALVES = tuple(f"{half}_{name}" for half in ("attention", "mlp") for name in ("gain", "share", "coupling"))

BEYOND = (
    FigureSpec(
        "products",
        "What the blocks do together to a small change of the state",
        jacobians.spectra,
        f"not in the paper; {MEDIANS}, at the first and the last step; the other tokens held fixed; {NORM_LEFT_OUT}; singular "
        "values at the depths that are decomposed, exponents of all blocks",
        ("from_first_singular_value", "lyapunov_exponent"),
    ),
    FigureSpec(
        "effective_rank",
        "How many directions survive, and how much the strongest grows",
        partial(states.by_depth, variables=_PRODUCTS),
        f"not in the paper; {MEDIANS}; Roy and Vetterli's effective rank, at most the width; the other tokens held fixed; "
        f"{NORM_LEFT_OUT}; {AT_STEPS}",
        _PRODUCTS,
    ),
    FigureSpec(
        "depth_use",
        "How much each block is used",
        partial(states.by_depth, variables=_USE),
        f"not in the paper; {MEDIANS}; block influence as in ShortGPT, whose least are the first to remove; states before the "
        f"final norm; {NORM_LEFT_OUT}; {AT_STEPS}",
        _USE,
    ),
    FigureSpec(
        "halves",
        "Attention and MLP apart, by depth",
        partial(states.by_depth, variables=_HALVES),
        f"not in the paper; {MEDIANS}; mis-coupling of each half in the bases of the other, null levels dotted; "
        f"{NORM_LEFT_OUT}; {AT_STEPS}",
        _HALVES,
    ),
    FigureSpec(
        "residual_alignment",
        "Residual alignment of attention and MLP",
        jacobians.residual_alignment,
        "not in the paper (Li and Papyan, 2023); the first prompt at the last step; an early, a middle and a late block; the "
        f"smallest K; in the singular bases of the whole block, {NORM_LEFT_OUT}",
        ("attention_matrix", "mlp_matrix"),
    ),
    FigureSpec(
        "normality",
        "Symmetry of the Jacobians by depth",
        partial(states.by_depth, variables=("symmetric_share", "mean_alignment")),
        f"not in the paper; {MEDIANS}; symmetric share 1/2 and alignment 0 for unrelated directions; {NORM_LEFT_OUT}; {AT_STEPS}",
        ("symmetric_share", "mean_alignment"),
    ),
)


_against_score = partial(FigureSpec, needs=("miscoupling", "score"), results=4)

LAST = "after the last step"
ALONE = "of the blocks alone"
WITHOUT_NORM = f"{ALONE} (paper: with the final norm)"
K_AND_NORM = f"K is the smallest measured, or --k; {WITHOUT_NORM}"
COUPLING = f"{MEASURE}, mean over l ≠ l' (paper: all pairs), prompts and tokens; {K_AND_NORM}"
ADJUSTABLE = "--measure and --step choose others"
OVER_PROMPTS = "bars are 95 % intervals over prompts"
HOLM = "p corrected for multiple tests (Holm)"
MATRICES = (
    "matrices for the smallest K and the first prompt, at the first step (for untrained) and the last (for trained); "
    f"{ALONE}"
)
LAYERS = (
    "l is the middle layer, l' = l + 1 unless others were measured (titles state l and l'; paper: two fixed layers)"
)
AT_LAYERS = "an early, a middle and a late layer"
UNTRAINED = "untrained is step 0 (--untrained where no such checkpoint is published)"
SPECTRA = (
    "medians over prompts and tokens; 1 / s₁ of each block with its straight line over depth, R² and n; "
    f"{WITHOUT_NORM[:-1]}, which flattens the last block's singular values)"
)
WINDOWS = "windows of 11 states for models of at least 20 blocks, else narrower (results record the size)"

_DECLARATIONS = (
    FigureSpec(
        "curves",
        "Mis-coupling, line-shape score and expodistance over training",
        coupling.training_curves,
        "not in the paper; mis-coupling: mean over l ≠ l', prompts and tokens, and its null level; LSS: median over prompts and "
        f"tokens; expodistance: median; {ALONE}; bands are quartiles; several results in one figure; {ADJUSTABLE}",
        ("miscoupling", "offdiag_normalized", "lss", "expodistance"),
        steps=2,
        may_differ=CONVENTIONS,
        adjustable=True,
    ),
    FigureSpec(
        "heatmap",
        "Mis-coupling of all pairs of blocks",
        coupling.heatmaps,
        f"not in the paper; mean over prompts and tokens, {LAST}; a panel for each result; {K_AND_NORM}; {ADJUSTABLE}",
        ("miscoupling",),
        may_differ=CONVENTIONS,
        adjustable=True,
    ),
    _against_score(
        "1a",
        "Coupling against benchmark score",
        model_comparisons.score_against_coupling,
        f"{COUPLING}; {LAST}; {OVER_PROMPTS}",
    ),
    FigureSpec(
        "1b",
        "Coupling over training",
        coupling.over_training,
        f"{COUPLING}; with interval over prompts, null level and onset; a panel for each result; {ADJUSTABLE}",
        (MEASURE,),
        steps=2,
        may_differ=CONVENTIONS,
        adjustable=True,
    ),
    FigureSpec(
        "1c",
        "Blocks as nodes, edges by coupling",
        coupling.layer_graph,
        f"edges show how far {MEASURE} is below its null level, mean over prompts and both directions; at most three steps, "
        f"evenly spaced; {K_AND_NORM}",
        (MEASURE,),
        also=("1d", "1e"),
    ),
    FigureSpec(
        "3",
        "Coupling matrices across depth",
        partial(jacobians.matrix_grid, variable="matrix"),
        MATRICES,
        ("matrix",),
        also=("20",),
    ),
    FigureSpec(
        "4",
        "Coupling matrices across tokens, self-coupling",
        partial(jacobians.matrix_grid, variable="self_matrix"),
        f"{MATRICES}; {LAYERS}",
        ("matrix", "self_matrix"),
        also=("17", "21"),
    ),
    FigureSpec(
        "5",
        "Line-shape score and expodistance, untrained and trained",
        partial(states.by_model, variables=("lss", "expodistance")),
        f"{MEDIANS} together (paper: over prompts); {WITHOUT_NORM}; results in the order given; {UNTRAINED}",
        ("lss", "expodistance"),
        steps=2,
        untrained=True,
    ),
    _against_score(
        "7",
        "Exponential fit between coupling and score",
        partial(model_comparisons.score_against_coupling, exponential=True),
        f"{COUPLING}; {LAST}; {OVER_PROMPTS}; with the straight line too",
    ),
    _against_score(
        "8",
        "Training tokens against coupling",
        model_comparisons.against_training_tokens,
        f"{COUPLING}; {LAST}; with straight lines, {HOLM}",
        needs=("miscoupling", "score", "tokens_seen"),
    ),
    FigureSpec(
        "9",
        "Coupling of each prompt against its difficulty and its length",
        coupling.by_prompt,
        f"{COUPLING}; {LAST}; difficulty where prompts have one: --prompts easy2hard (its GSM8K part), or a file; with "
        f"straight lines, {HOLM}",
        (MEASURE, "norm"),
    ),
    FigureSpec(
        "12",
        "Token trajectories on a principal plane",
        states.principal_planes,
        f"the first prompt; all layers in one plot, at the first and the last step; {WITHOUT_NORM}",
        ("pca",),
        also=("13",),
    ),
    FigureSpec(
        "15",
        "Coupling by layer: plain prompts and others",
        coupling.by_layer,
        f"mean and 95 % interval over prompts, {LAST}, of each block l over l' ≠ l; {K_AND_NORM}",
        (MEASURE,),
        results=2,
        may_differ=("inputs_sha256",),
    ),
    FigureSpec(
        "18",
        "Coupling matrices across tokens, fixed input",
        partial(jacobians.matrix_grid, variable="fixed_input_matrix"),
        f"{MATRICES}; {LAYERS}; the input is the first token",
        ("matrix", "fixed_input_matrix"),
        also=("22",),
    ),
    FigureSpec(
        "19",
        "Coupling matrices across tokens, fixed output",
        partial(jacobians.matrix_grid, variable="fixed_output_matrix"),
        f"{MATRICES}; {LAYERS}; the output is the last token compared",
        ("matrix", "fixed_output_matrix"),
        also=("23",),
    ),
    FigureSpec(
        "25",
        "Variation of step lengths at initialisation",
        partial(states.by_model, variables=("equidistance",), trained=False),
        f"{MEDIANS}; {ALONE}; {UNTRAINED}; the paper's caption names expodistance, its section 5.5 the step "
        "lengths, which are drawn here",
        ("equidistance",),
        untrained=True,
    ),
    FigureSpec(
        "26",
        "Norm, line-shape score, variation of step lengths and entropy by depth",
        partial(states.by_depth, variables=("norm", "lss_window", "equidistance_window", "entropy")),
        f"{MEDIANS} (paper: means of step lengths); {ALONE}, but entropy of every state through the final norm; step lengths in "
        f"windows; {AT_STEPS}; {WINDOWS}",
        ("norm", "lss_window", "equidistance_window", "entropy"),
    ),
    FigureSpec(
        "27",
        "Line-shape score over training",
        partial(states.over_training, variable="lss"),
        f"{MEDIANS}; {WITHOUT_NORM}; the paper's right half is the second panel of Fig. 26, with medians instead of means",
        ("lss",),
        steps=2,
    ),
    FigureSpec(
        "28",
        "Linearity at fixed blocks over training",
        partial(states.at_layers, variable="lss_window", sign=-1),
        f"{MEDIANS} (paper: means), {WITHOUT_NORM}; {AT_LAYERS} (paper: 5, 15 and 30); {WINDOWS}",
        ("lss_window",),
        steps=2,
    ),
    FigureSpec(
        "29",
        "Expodistance at fixed blocks over training",
        partial(states.at_layers, variable="expodistance_window"),
        f"{MEDIANS} (paper: means); {ALONE}; {AT_LAYERS}; {WINDOWS}",
        ("expodistance_window",),
        steps=2,
    ),
    FigureSpec(
        "30",
        "Norm and expodistance by depth during training",
        partial(states.by_depth, variables=("norm", "expodistance_window")),
        f"{MEDIANS}; {ALONE}; {AT_STEPS}; {WINDOWS}",
        ("norm", "expodistance_window"),
        steps=2,
    ),
    _against_score(
        "31",
        "The score on GSM8K against the mean score",
        model_comparisons.benchmark_against_mean,
        f"the mean is over the benchmarks that all results have, GSM8K included, {LAST}; with a straight line",
        needs=("score",),
        may_differ=CONVENTIONS,
    ),
    FigureSpec(
        "32",
        "Response to noise on the embeddings",
        states.noise_response,
        f"mean over tokens, then over prompts, with interval over prompts, {LAST}; one sample of noise per prompt; "
        f"{WITHOUT_NORM}",
        ("noise_similarity",),
    ),
    FigureSpec(
        "33",
        "Singular values by depth, untrained",
        partial(jacobians.singular_values, step="first"),
        f"{SPECTRA}; {UNTRAINED}",
        ("singular_value",),
        untrained=True,
    ),
    FigureSpec(
        "34",
        "Singular values by depth",
        partial(jacobians.singular_values, step="last"),
        f"{SPECTRA}; trained is the last step",
        ("singular_value",),
    ),
    _against_score(
        "35",
        "Depth, width, parameters and coupling against score",
        model_comparisons.score_against_sizes,
        f"{COUPLING}; {LAST}; sizes against the score only (the page also has them against coupling); coupling and score also "
        f"controlled for sizes; {HOLM}",
    ),
    _against_score(
        "36",
        "Coupling against score for every K",
        model_comparisons.score_against_coupling_by_k,
        f"{MEASURE}, mean over l ≠ l' (paper: all pairs), prompts and tokens, {LAST}; every K that all results have; {HOLM}",
    ),
    FigureSpec(
        "table1",
        "The models",
        model_comparisons.table_of_models,
        "with architecture and number of blocks; the score is the mean over the benchmarks that all scored results have, "
        f"{LAST}",
        may_differ=CONVENTIONS,
    ),
    _against_score(
        "table4",
        "R² of coupling and score for subsets of models",
        model_comparisons.subsets,
        "subsets: each architecture of at least four models, all models but it, and the halves by parameters; with intervals; "
        f"{COUPLING}; {LAST}",
    ),
    _against_score(
        "definitions",
        "Correlation of the score with coupling, by mis-coupling, K and layer pairs",
        model_comparisons.definitions,
        f"not in the paper; null level minus mis-coupling, all definitions, of the blocks alone and with the final norm, "
        f"{HOLM}; {LAST}, means over prompts and tokens",
    ),
    *BEYOND,
)
FIGURES = {figure.number: figure for figure in _DECLARATIONS}
ALIASES = {other: figure.number for figure in _DECLARATIONS for other in figure.also}
_VIT = "vision transformers over weight decay and stochastic depth; python -m vit.analysis GRID draws"
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
