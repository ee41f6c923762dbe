"""The paper's figures by their numbers: what each needs, how it is drawn, and where it differs from the paper's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracker.analysis.across_models import CONVENTIONS
from tracker.figures import comparisons, leaderboard, plots, tiles
from tracker.figures.comparisons import NORMALISED, PAIRS

if TYPE_CHECKING:
    from tracker.figures.plots import Plotted

SCORED = "results with scores (a Pythia walk has its own, --scores FILE joins others), of several models"


@dataclass(frozen=True)
class PaperFigure:
    """One of the paper's figures."""

    title: str
    draw: "Callable[[plots.Results, int], Plotted]"
    needs: tuple[str, ...] = ()  # variables
    measures: str = ""  # what a walk is to be asked for, beyond the usual
    steps: int = 1  # how many at least
    untrained: bool = False  # whether the first step has to be step 0
    results: int = 1
    differs: str = ""  # from the paper's
    may_differ: tuple[str, ...] = ()  # of `CONVENTIONS`, what is being compared


def _matrices(variable: str) -> "Callable[[plots.Results, int], Plotted]":
    return lambda results, k: tiles.matrix_grid(results, variable)


MATRICES = "matrices of the smallest K, of one prompt; the first and the last step stand for untrained and trained"
LAYERS = "l the middle layer, l' = l + 1 unless results were measured with others (each title says l and l'; the paper fixes two)"
K_AND_NORM = "K the smallest measured, or --k; the last block with the final norm where the results include it"
COUPLING = f"{NORMALISED}, mean over l ≠ l' (the paper: all pairs), prompts and tokens; {K_AND_NORM}"
MEDIANS = "medians and quartiles over prompts and tokens"
SINGULAR = (
    "medians over prompts and tokens; 1 / s₁ of each block with its straight line over depth, R² and n; the last block with the "
    "final norm where the results include it, which flattens its singular values"
)
WINDOWS = "the window is 11 states where the model has 20 blocks or more, else narrower: the results say which"
FIGURES: Mapping[str, PaperFigure] = {
    "1a": PaperFigure(
        "Coupling against benchmark score",
        comparisons.against_score,
        ("miscoupling", "score"),
        results=4,
        differs=f"{COUPLING}, after the last step; bars: 95 % interval over prompts",
    ),
    "1b": PaperFigure(
        "Coupling over training",
        lambda results, k: plots.coupling_over_training(results, NORMALISED, PAIRS, k),
        (NORMALISED,),
        steps=2,
        differs=f"{COUPLING}; with its interval over prompts, its null level and its onset",
    ),
    "1c": PaperFigure(
        "Layers as nodes, edges by coupling (Figs 1c to 1e)",
        lambda results, k: plots.layer_graph(results, NORMALISED, k),
        (NORMALISED,),
        differs=(
            f"edges show how far {NORMALISED} is above its null level, mean over prompts, both directions averaged; at most "
            f"three of the steps, evenly spaced; {K_AND_NORM}"
        ),
    ),
    "3": PaperFigure("Coupling matrices across depth", _matrices("matrix"), ("matrix",), "matrices", differs=MATRICES),
    "4": PaperFigure(
        "Coupling matrices across tokens, self-coupling",
        _matrices("self_matrix"),
        ("self_matrix",),
        "tokenwise,matrices",
        differs=f"{MATRICES}; {LAYERS}",
    ),
    "5": PaperFigure(
        "Line-shape score and expodistance, untrained and trained",
        lambda results, _: plots.of_models(
            results, {"lss": "LSS", "expodistance_raw": "expodistance, before final norm"}
        ),
        ("lss", "expodistance_raw"),
        steps=2,
        untrained=True,
        differs=(
            "medians and quartiles over prompts and tokens together (the paper: over prompts); LSS with the final norm where "
            "the results include it, expodistance before it; results in the order given; untrained is step 0 (--untrained "
            "where none is published)"
        ),
    ),
    "7": PaperFigure(
        "Exponential fit between coupling and score",
        lambda results, k: comparisons.against_score(results, k, exponential=True),
        ("miscoupling", "score"),
        results=4,
        differs=f"{COUPLING}, after the last step; bars: 95 % interval over prompts; the straight line beside it",
    ),
    "8": PaperFigure(
        "Training tokens against coupling",
        comparisons.over_tokens,
        ("miscoupling", "score", "tokens_seen"),
        results=4,
        differs=f"{COUPLING}, after the last step; with straight lines, p corrected (Holm)",
    ),
    "9": PaperFigure(
        "Coupling of each prompt against its difficulty and its length",
        lambda results, k: plots.prompts(results, NORMALISED, PAIRS, k),
        (NORMALISED, "norm_raw"),
        differs=(
            f"{COUPLING}, after the last step; difficulty where the prompts have one: --prompts easy2hard (GSM8K's part of "
            "it), or a file of one's own; with straight lines, p corrected (Holm)"
        ),
    ),
    "12": PaperFigure(
        "Token trajectories on a principal plane",
        lambda results, _: plots.principal_planes(results),
        ("pca",),
        "pca",
        differs=(
            "the first prompt of the results; all layers in one plot, after the first and the last step; the last state with "
            "the final norm where the results include it"
        ),
    ),
    "15": PaperFigure(
        "Coupling by layer: plain prompts and others",
        lambda results, k: plots.coupling_by_layer(results, NORMALISED, k),
        (NORMALISED,),
        results=2,
        may_differ=("inputs_sha256",),
        differs=(
            "mean and 95 % interval over prompts, after the last step, of each block as the one described, over l' ≠ l; "
            f"{K_AND_NORM}"
        ),
    ),
    "18": PaperFigure(
        "Coupling matrices across tokens, fixed input",
        _matrices("fixed_input_matrix"),
        ("fixed_input_matrix",),
        "tokenwise,matrices",
        differs=f"{MATRICES}; {LAYERS}; the input is the first token",
    ),
    "19": PaperFigure(
        "Coupling matrices across tokens, fixed output",
        _matrices("fixed_output_matrix"),
        ("fixed_output_matrix",),
        "tokenwise,matrices",
        differs=f"{MATRICES}; {LAYERS}; the output is the last token compared",
    ),
    "25": PaperFigure(
        "Variation of step lengths at initialisation",
        lambda results, _: plots.of_models(
            results, {"equidistance_raw": "variation of step lengths, before final norm"}, trained=False
        ),
        ("equidistance_raw",),
        untrained=True,
        differs=(
            f"{MEDIANS}, before the final norm; at step 0 (--untrained where none is published); the caption says "
            "expodistance, section 5.5 lengths of steps: these are drawn"
        ),
    ),
    "26": PaperFigure(
        "Norm, line-shape score, variation of step lengths and entropy by depth",
        lambda results, _: plots.by_depth(
            results,
            {
                "norm_raw": "norm, before final norm",
                "lss_window": "LSS in windows",
                "equidistance_raw_window": "variation of step lengths\nin windows, before final norm",
                "entropy": "logit entropy, nats",
            },
            log=("norm_raw",),
        ),
        ("norm_raw", "lss_window", "equidistance_raw_window", "entropy"),
        "entropy",
        differs=(
            f"{MEDIANS} (the paper says mean of the step lengths); norm and step lengths before the final norm, LSS with it "
            "where the results include it, entropy of all states through it; step lengths in windows; at most four of the "
            f"steps, evenly spaced; {WINDOWS}"
        ),
    ),
    "27": PaperFigure(
        "Line-shape score over training",
        lambda results, _: plots.over_training(results, "lss", "line-shape score"),
        ("lss",),
        steps=2,
        differs=(
            f"{MEDIANS}, with the final norm where the results include it; the right half is Fig. 26's second panel, with "
            "medians for means"
        ),
    ),
    "28": PaperFigure(
        "Linearity at fixed layers over training",
        lambda results, _: plots.at_depths(results, "lss_window", "−LSS in windows", sign=-1),
        ("lss_window",),
        steps=2,
        differs=(
            f"{MEDIANS} (the paper: averages), with the final norm where the results include it; an early, a middle and a late"
            f" layer, where the paper has 5, 15 and 30; {WINDOWS}"
        ),
    ),
    "29": PaperFigure(
        "Expodistance at fixed layers over training",
        lambda results, _: plots.at_depths(results, "expodistance_raw_window", "expodistance in windows", log=True),
        ("expodistance_raw_window",),
        steps=2,
        differs=f"{MEDIANS} (the paper: means), before the final norm; an early, a middle and a late layer; {WINDOWS}",
    ),
    "30": PaperFigure(
        "Norm and expodistance by depth during training",
        lambda results, _: plots.by_depth(
            results,
            {"norm_raw": "norm, before final norm", "expodistance_raw_window": "expodistance in windows"},
            log=("norm_raw", "expodistance_raw_window"),
        ),
        ("norm_raw", "expodistance_raw_window"),
        steps=2,
        differs=f"{MEDIANS}, before the final norm; at most four of the steps, evenly spaced; {WINDOWS}",
    ),
    "31": PaperFigure(
        "The score on GSM8K against the mean score",
        lambda results, _: comparisons.against_the_mean(results),
        ("score",),
        results=4,
        differs=(
            "the mean is over the benchmarks that all results have, GSM8K among them, after the last step; with a straight "
            "line"
        ),
        may_differ=CONVENTIONS,
    ),
    "32": PaperFigure(
        "Response to noise on the embeddings",
        lambda results, _: plots.noise_response(results),
        ("noise_similarity",),
        "noise",
        differs=(
            "mean over tokens, then over prompts, after the last step, with its interval over prompts; one draw of noise for "
            "each prompt; the last block's output with the final norm where the results include it"
        ),
    ),
    "33": PaperFigure(
        "Singular values by depth, untrained",
        lambda results, _: plots.singular_values(results, "first"),
        ("singular_value",),
        untrained=True,
        differs=f"{SINGULAR}; untrained is step 0 (--untrained where none is published)",
    ),
    "34": PaperFigure(
        "Singular values by depth, trained",
        lambda results, _: plots.singular_values(results, "last"),
        ("singular_value",),
        steps=2,
        differs=f"{SINGULAR}; trained is the last step",
    ),
    "35": PaperFigure(
        "Depth, width, parameters and coupling against score",
        comparisons.sizes,
        ("miscoupling", "score"),
        results=4,
        differs=(
            f"{COUPLING}, after the last step; sizes against the score alone (the page has them against coupling too); also "
            "coupling against score with the sizes held fixed; p corrected (Holm)"
        ),
    ),
    "36": PaperFigure(
        "Coupling against score for every K",
        comparisons.every_k,
        ("miscoupling", "score"),
        results=4,
        differs=(
            f"{NORMALISED}, mean over l ≠ l' (the paper: all pairs), prompts and tokens, after the last step; every K that all"
            " results have; p corrected (Holm)"
        ),
    ),
    "table1": PaperFigure(
        "The models",
        lambda results, _: leaderboard.table_of_models(results),
        differs=(
            "with architecture and number of blocks; score: mean over the benchmarks that all scored results have, after the "
            "last step"
        ),
        may_differ=CONVENTIONS,
    ),
    "table4": PaperFigure(
        "R² of coupling and score for subsets of models",
        comparisons.subsets,
        ("miscoupling", "score"),
        results=4,
        differs=(
            "our subsets: each architecture of four models or more, all but it, the halves by parameters; with intervals; "
            f"{COUPLING}, after the last step"
        ),
    ),
    "definitions": PaperFigure(
        "Which mis-coupling, K and layer pairs follow the score (not in the paper)",
        comparisons.definitions,
        ("miscoupling", "score"),
        results=4,
        differs=(
            "all that may be tried at once, p corrected for trying (Holm); after the last step, means over prompts and tokens"
        ),
    ),
}
SAME = {"20": "3", "17": "4", "21": "4", "22": "18", "23": "19", "13": "12"}  # more of the same in the paper's appendix
ELSEWHERE = {"6": "python -m vit.analysis GRID", "10": "python -m vit.analysis GRID"}


def lacks(figure: PaperFigure, results: "plots.Results") -> str:
    """What keeps these results from this figure, and what to run; "" where nothing does."""
    for name, ds in results.items():
        missing = [variable for variable in figure.needs if variable not in ds]
        if "score" in missing:
            return f"{name} has no scores; it takes {SCORED}"
        if missing == ["tokens_seen"]:
            return f"{name} does not say how many tokens were seen: checkpoints' names have to, --revisions '...(?P<tokens>...)'"
        if missing:
            asked = f" --measures coupling,trajectory,{figure.measures}" if figure.measures else ""
            return f"{name} lacks {', '.join(missing)}; walk again: python -m tracker.pythia --model ...{asked} --out OTHER"
        if figure.untrained and int(ds["step"][0]) != 0:
            begins = int(ds["step"][0])
            return f"{name} begins at step {begins}; the untrained model is wanted: walk with --steps 0,... or --untrained SEED"
        if ds.sizes["step"] < figure.steps:
            return f"{name} has {ds.sizes['step']} step(s), it takes {figure.steps}; walk more: --steps ..."
    if len(results) < figure.results:
        return f"it compares at least {figure.results} results; {len(results)} given"
    for key in CONVENTIONS:
        held = {name: ds.attrs.get(key) for name, ds in results.items()}
        if key not in figure.may_differ and len(set(held.values())) > 1:
            said = ", ".join(f"{name}: {value}" for name, value in held.items())
            return f"the results differ in {key} ({said}); one figure shows one convention"
    return ""
