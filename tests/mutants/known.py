# ruff: noqa: E501, because a mutant is named in one line
"""What `tests.mutants` mutates, what it leaves alone, and mutants that no test can kill, each with the reason."""

from pathlib import Path

PRODUCT = ("tracker", "vit", "checkpoints")
LEFT_OUT = {
    **dict.fromkeys(
        (
            f"tracker/figures/{name}.py"
            for name in "drawing coupling jacobians matrices model_comparisons states".split()
        ),
        "what a figure looks like: of what it shows, `tests.golden` compares the table",
    ),
    "vit/figures.py": "what figures look like",
    "tracker/report/texts.py": "words of the page",
    "tracker/version.py": "one text",
}
FILES = tuple(
    file
    for package in PRODUCT
    for file in sorted(map(str, Path(package).rglob("*.py")))
    if file not in LEFT_OUT
)
# Keywords whose values decide no number.
KEYWORDS = {
    "strict": "zip raises where lengths differ, which they never do",
    "stacklevel": "the line that a warning names",
    "repr": "what is shown of an object",
}
# Definitions that are left as they are.
NAMES = {
    "_declared": "labels, and where a variable is shown: tests/measures/test_registry.py",
    "declared_level": "the same",
    "_of_states": "the same",
    "DECLARED": "the same",
    "DECLARED_USE": "the same",
    **dict.fromkeys(
        "TOLERANCE COMPLETENESS_MARGIN FAST FLOOR ROUNDED ROUNDINGS BOUNDS CLOSER KINK".split(),
        "a margin: between rounding and the faults that tests plant",
    ),
    "STEPS": "steps of differences, within some orders of magnitude",
    "PROBES": "how many vectors are drawn",
    "MOVES": "the same",
    "ROWS": "how many are tried, or drawn from",
    "SMALLEST": "any weight leaves the mean as it is",
    "SLOPE": "the same",
    "PERCENTILES": "of what the page draws",
    "PATHS": "how many paths it draws",
}
# Definitions that decide how fast, and the operations of which they are an operand.
SPEED = {
    "AT_ONCE": "items at once",
    "BLOCK": "columns of the iteration",
    "COLUMNS": "of random frames at once",
    "FEW": "threads",
    "OF_FULL": "when the iteration stops",
    "PANEL": "rows at once",
    "PANELS": "rows at once",
    "POWERS": "steps of an estimate that chooses the method",
    "SMALL": "width up to which one core is used",
    "SQUARABLE": "which of two methods is used",
    "_rows_at_once": "rows at once",
    "expected_columns": "an estimate, which chooses a method and says when the iteration gives up",
}
# By file: mutants that survive, and why.
KNOWN = {
    "tracker/measures/coupling.py": {
        "Entries.__init__: max(1, (d - 1) * (d + 2)) -> max(2, (d - 1) * (d + 2))": "at d = 1 it divides 0, and at d = 2 the other is 4",
        "moments: torch.where(scale > 0, scale, 1.0) -> torch.where(scale > 0, scale, 2.0)": "of a matrix of zeros",
    },
    "tracker/measures/trajectory.py": {
        "_squared_variation: mean.abs() > zero -> mean.abs() >= zero": "a mean of 0 gives 0 / 0, which is NaN, too",
        "default_width: L >= 20 -> L > 20": "the other formula gives 11 for 20 as well",
        "default_width: L >= 20 -> L >= 21": "the other formula gives 11 for 20 as well",
    },
    "tracker/measures/block_products.py": {
        "depths: max(1, count - 1) -> max(2, count - 1)": "at count = 2 there are two blocks, and 1.5 is rounded to 2",
        ": WIDE_DEPTHS, DEPTHS = (4, 8) -> WIDE_DEPTHS, DEPTHS = (5, 8)": "the doctest of `depths` fails",
    },
    "tracker/measures/single_blocks.py": {
        "departure: torch.where(zero[..., None, None], 0, wide / frobenius(wide)[..., None, None]) -> torch.where(zero[..., None, None], 1, wide / frobenius(wide)[..., None, None])": "of a matrix of zeros, where nothing is defined",
    },
    "tracker/measures/tokenwise.py": {
        "_measuring_order: basis > l -> basis >= l": "no block is its own basis",
        "_measuring_order: any((basis > l for l, basis in basis_layers.items())) -> all((basis > l for l, basis in basis_layers.items()))": "all are on the same side",
        "_layers: (link[0] == link[1]) == same -> (link[0] == link[1]) != same": "the other kind of links first",
    },
    "tracker/measures/depthwise.py": {
        "_measures: max(1, AT_ONCE // A[0].numel()) -> max(2, AT_ONCE // A[0].numel())": "rows at once, which change no number",
    },
    "tracker/measures/rotations.py": {
        "mean_levels: max(ks) ** 2 -> max(ks) * 2": "rows at once, which change no number",
        "_controlled_sums: SMALLEST ** 2 -> SMALLEST ** 3": "any weight leaves the mean as it is",
        "_coordinates: ROUNDINGS * k -> ROUNDINGS / k": "a margin above rounding",
    },
    "tracker/analysis/onset.py": {
        "coupled: [1] -> [2]": "degrees of freedom of no error",
        "pairs_of_blocks: matrices.shape[-1] -> matrices.shape[-2]": "as many blocks along both axes",
    },
    "tracker/analysis/reduction.py": {
        "_states: results.variables['norm'].isel(depth=0) -> results.variables['norm'].isel(depth=1)": "the same positions have values at all depths",
        "_of_median: prompts > 0 -> prompts >= 0": "0 / 0 is undefined, too",
    },
    "tracker/analysis/regression.py": {
        "error_of_sum: np.where(parts > 0, parts, 1) -> np.where(parts > 0, parts, 2)": "where it is not used",
        "_fit_centred: x @ y -> y @ x": "a product of two vectors",
        "exponential_fit: y[0] -> y[1]": "signs differ from that of either value, or none does",
    },
    "tracker/analysis/summary.py": {
        "_result: with_steps(opened(result), 0) -> with_steps(opened(result), 1)": "a single step is not named",
    },
    "tracker/jacobians/checks.py": {
        "require_reproduction: relative_error(f, reference, recorded, torch.float32) <= TOLERANCE[torch.float32] -> relative_error(f, reference, recorded, torch.float32) < TOLERANCE[torch.float32]": "the same",
    },
    "tracker/linalg/svd.py": {
        "by_squares: products_of(A)[0] -> products_of(A)[1]": "A is symmetric",
        "by_squares: torch.where(enough[..., None], S, 1) -> torch.where(enough[..., None], S, 2)": "of matrices whose certificate is not used",
        "by_eigenvectors: S[..., -1] > SQUARABLE * S[..., 0] -> S[..., -1] >= SQUARABLE * S[..., 0]": "real numbers, equal never",
        "by_eigenvectors: error <= OF_FULL * TOLERANCE[J.dtype] -> error < OF_FULL * TOLERANCE[J.dtype]": "the same",
        "by_golub_kahan: error > tolerance -> error >= tolerance": "the same",
        "by_golub_kahan: tolerance / 2 -> tolerance * 2": "what does not converge is decomposed in full",
        "_orthogonal_columns: squares.flip(-1).clamp_min(0) -> squares.flip(-1).clamp_min(1)": "of accelerators, for widths at which squares of the scaled J are above 1",
        "_with_signs: t.V * sign -> t.V / sign": "a sign is its own inverse",
    },
    "tracker/jacobians/independent.py": {
        "_refusal: float(error.max()) > 1e-09 -> float(error.max()) >= 1e-09": "the same",
        "differ_from_values: f: RowFunction, x: Float[Tensor, 'R d'], J: Float[Tensor, 'R d d'], residual: bool, step: float, y: Float[Tensor, 'R d'] | None=None, allowed: float=0.0 -> f: RowFunction, x: Float[Tensor, 'R d'], J: Float[Tensor, 'R d d'], residual: bool, step: float, y: Float[Tensor, 'R d'] | None=None, allowed: float=1.0": "it is read where y is given, and then it is given, too",
        "differ_from_values.error: residual * v -> residual / v": "signs, which are their own inverses",
    },
    "tracker/jacobians/questions.py": {
        "ask_backward: torch.empty(0) -> torch.empty(1)": "a place for the first state",
    },
    "tracker/jacobians/row_attention.py": {
        "_FirstOrder.backward.summed: of_heads.unflatten(1, (ctx.groups, -1)).sum(2) -> of_heads.unflatten(1, (ctx.groups, -1)).sum(3)": "autograd adds up a gradient that has more rows than its tensor",
    },
    "tracker/jacobians/slicing.py": {
        "Rows: field(default_factory=dict, init=False, repr=False, compare=False) -> field(default_factory=dict, init=False, repr=False, compare=True)": "no rows are compared",
    },
    "tracker/linalg/precision.py": {
        "frobenius: torch.linalg.vector_norm(A, dim=-1) -> torch.linalg.vector_norm(A, dim=-2)": "the sum over a column is as short",
        "Roundings.__torch_function__: max(_sizes((*arguments, keywords)), default=0) -> max(_sizes((*arguments, keywords)), default=1)": "no number has less than one byte",
    },
    "tracker/linalg/krylov.py": {
        "block_lanczos.reached: residual <= tolerance * S[..., :1] * S -> residual < tolerance * S[..., :1] * S": "a zero matrix takes all steps then, and gives the same",
        "block_golub_kahan.reached: residual <= tolerance * S[..., :1] -> residual < tolerance * S[..., :1]": "the same",
        "basis_fits: basis_size(d, K) >= K + 2 * BLOCK -> basis_size(d, K) > K + 2 * BLOCK": "which of two methods is used",
        "restarted: slice(0, 0) -> slice(1, 0)": "both are empty, and of the start nothing else is read",
    },
    "tracker/measures/states.py": {
        "measure_states: together // n -> together % n": "samples at once, which change no number",
        "measure_states: settings.memory(16) -> settings.memory(17)": "the same",
        "measure_states: settings.memory(16) // (per_token * settings.torch_dtype.itemsize) -> settings.memory(16) % (per_token * settings.torch_dtype.itemsize)": "the same",
        "measure_states: max(1, settings.memory(16) // (per_token * settings.torch_dtype.itemsize)) -> max(2, settings.memory(16) // (per_token * settings.torch_dtype.itemsize))": "the same",
        "measure_states: max(1, together // n) -> max(2, together // n)": "the same",
    },
    "vit/answers.py": {
        "_answer: p_value < 0.0001 -> p_value <= 0.0001": "real numbers, equal never",
        "_answer: p_value < 0.05 -> p_value <= 0.05": "the same",
        "_answer: row['r'] > 0 -> row['r'] >= 0": "r = 0 is never significant",
    },
}
