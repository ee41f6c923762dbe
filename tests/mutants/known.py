# ruff: noqa: E501, because a mutant is named in one line
"""What `tests.mutants` mutates, what it leaves alone, and mutants that no test can kill, each with the reason."""

from pathlib import Path

PRODUCT = ("tracker", "vit", "checkpoints")
LEFT_OUT = {
    **dict.fromkeys(
        (
            f"tracker/figures/{name}.py"
            for name in "drawing coupling jacobians model_comparisons states".split()
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
        (
            "TOLERANCE COMPLETENESS_MARGIN ALLOWED ALLOWED_IN_ROWS FAST FLOOR MIXES ROUNDED ROUNDINGS VALUES DERIVATIVE DIFFERENCES "
            "CONVERGED CLOSER"
        ).split(),
        "a margin: between rounding and the faults that tests plant",
    ),
    "STEPS": "steps of differences, within some orders of magnitude",
    "STEP_IN_ROWS": "the same",
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
KNOWN: dict[str, dict[str, str]] = {
    "tracker/measures/coupling.py": {
        "depth_means: m.shape[-1] -> m.shape[-2]": "as many layers along both axes",
        "Entries.__init__: max(1, (d - 1) * (d + 2)) -> max(2, (d - 1) * (d + 2))": "at d = 1 it divides 0, and at d = 2 the other is 4",
        "moments: torch.where(scale > 0, scale, 1.0) -> torch.where(scale > 0, scale, 2.0)": "of a matrix of zeros",
        "null_levels: {'miscoupling_release', OF_TRACE} & {*definitions} -> {'miscoupling_release', OF_TRACE} | {*definitions}": "what was not asked for is computed, too",
    },
    "tracker/measures/trajectory.py": {
        "_squared_variation: mean.abs() > zero -> mean.abs() >= zero": "a mean of 0 gives 0 / 0, which is NaN, too",
        "default_width: L >= 20 -> L > 20": "the other formula gives 11 for 20 as well",
        "default_width: L >= 20 -> L >= 21": "the other formula gives 11 for 20 as well",
    },
    "tracker/linalg/eigenvectors.py": {
        "_decompose:  for value in (d, d - count + 1, 0, 0) ->  for value in (d, d - count + 1, 0, 1)": "LAPACK overwrites it",
        "_decompose:  for value in (d, d - count + 1, 0, 0) ->  for value in (d, d - count + 1, 1, 0)": "the same",
        "_decompose: ctypes.c_int(0) -> ctypes.c_int(1)": "the same",
        "_decompose: scalar(0) -> scalar(1) (2)": "the same",
        "_decompose: ctypes.c_int(-1) -> ctypes.c_int(-2)": "one -1 of two asks for the sizes",
        "_decompose: ctypes.c_int(-1) -> ctypes.c_int(-2) (2)": "the same",
        "_decompose: 2 * count -> 3 * count": "a larger workspace",
    },
    "tracker/measures/block_products.py": {
        "depths: max(1, count - 1) -> max(2, count - 1)": "at count = 2 there are two blocks, and 1.5 is rounded to 2",
        ": WIDE_DEPTHS, DEPTHS = (4, 8) -> WIDE_DEPTHS, DEPTHS = (5, 8)": "the doctest of `depths` fails",
    },
    "tracker/measures/single_blocks.py": {
        "departure: torch.where(zero[..., None, None], 0, _unit(J.double())) -> torch.where(zero[..., None, None], 1, _unit(J.double()))": "of a matrix of zeros, where nothing is defined",
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
        "_Controls.__init__: SMALLEST ** 2 -> SMALLEST ** 3": "any weight leaves the mean as it is",
        "_coordinates: ROUNDINGS * k -> ROUNDINGS / k": "a margin above rounding",
    },
    "tracker/analysis/null_levels.py": {
        "_spread.read: values.values.reshape(-1, *values.shape[len(sample):]) -> values.values.reshape(-2, *values.shape[len(sample):])": "NumPy takes any negative length as the missing one",
        "_spread: max(1, AT_ONCE // (s[0].numel() * bases)) -> max(2, AT_ONCE // (s[0].numel() * bases))": "samples at once, which change no number",
    },
    "tracker/analysis/onset.py": {
        "coupled: np.where(several, parts, 1) -> np.where(several, parts, 2)": "where it is not used",
        "coupled: of_prompts > 0 -> of_prompts >= 0": "an error of 0 adds nothing",
        "pairs_of_blocks: matrices.shape[-1] -> matrices.shape[-2]": "as many blocks along both axes",
    },
    "tracker/analysis/reduction.py": {
        "_states: results.variables['norm'].isel(depth=0) -> results.variables['norm'].isel(depth=1)": "the same positions have values at all depths",
        "_of_median: prompts > 0 -> prompts >= 0": "0 / 0 is undefined, too",
    },
    "tracker/analysis/regression.py": {
        "_fit_centred: x @ y -> y @ x": "a product of two vectors",
        "exponential_fit: y[0] -> y[1]": "signs differ from that of either value, or none does",
    },
    "tracker/analysis/summary.py": {
        "_of_dataset: with_steps(result, 0) -> with_steps(result, 1)": "a single step is not named",
    },
    "tracker/jacobians/checks.py": {
        "_largest_error: in_windows[0] <= tolerance(call.x.dtype, in_windows[1]) -> in_windows[0] < tolerance(call.x.dtype, in_windows[1])": "real numbers, equal never",
        "require_reproduction: relative_error(f, reference, recorded, torch.float32) <= TOLERANCE[torch.float32] -> relative_error(f, reference, recorded, torch.float32) < TOLERANCE[torch.float32]": "the same",
        "_mixing_by_value: size > tolerance(x.dtype, roundings.seen) -> size >= tolerance(x.dtype, roundings.seen)": "the same",
        "_error_beside_at: x + step.to(x.dtype) * standard_normal(x.shape, x) -> x - step.to(x.dtype) * standard_normal(x.shape, x)": "normal numbers are symmetric",
        "_mixing_by_derivative: max(1, AT_ONCE // (shape[0] * shape[1])) -> max(2, AT_ONCE // (shape[0] * shape[1]))": "rows at once, which change no number",
        "_mixing_by_value: torch.arange(len(x)) < len(x) // 2 -> torch.arange(len(x)) <= len(x) // 2": "another division into two parts",
        "way_of_calling: a.mask is None -> a.mask is not None": "part of a key, which is as good",
        ": NARROWEST = 2 -> NARROWEST = 3": "a longer window, in which samples mix as well",
        "derivative_error: call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool=False -> call: BlockCall, rows: Rows, row_attention: RowAttention, attached: bool=True": "the product always gives it",
        "find_mixing: max(NARROWEST, 2 * WINDOW // B) -> min(NARROWEST, 2 * WINDOW // B)": "a shorter window, in which samples mix as well",
        "_mixing_by_value.error: torch.where(K, change, 0.0) -> torch.where(K, change, 1.0)": "a margin: the error is relative to a size that is some times larger",
    },
    "tracker/linalg/svd.py": {
        "_by_squares: _products(A)[0] -> _products(A)[1]": "A is symmetric",
        "_by_squares: torch.where(enough[..., None], S, 1) -> torch.where(enough[..., None], S, 2)": "of matrices whose certificate is not used",
        "_by_eigenvectors: S[..., -1] > SQUARABLE * S[..., 0] -> S[..., -1] >= SQUARABLE * S[..., 0]": "real numbers, equal never",
        "_by_eigenvectors: error <= OF_FULL * TOLERANCE[J.dtype] -> error < OF_FULL * TOLERANCE[J.dtype]": "the same",
        "_by_golub_kahan: error > tolerance -> error >= tolerance": "the same",
        "_by_golub_kahan: tolerance / 2 -> tolerance * 2": "what does not converge is decomposed in full",
        "_orthogonal_columns: squares.flip(-1).clamp_min(0) -> squares.flip(-1).clamp_min(1)": "of accelerators, for widths at which squares of the scaled J are above 1",
        "_with_signs: t.V * sign -> t.V / sign": "a sign is its own inverse",
    },
    "tracker/jacobians/independent.py": {
        "_judge: explained <= ALLOWED[precision] -> explained < ALLOWED[precision]": "real numbers, equal never",
        "_refusal: float(error.max()) > 1e-09 -> float(error.max()) >= 1e-09": "the same",
        "differ_from_values: f: RowFunction, x: Float[Tensor, 'R d'], J: Float[Tensor, 'R d d'], residual: bool, step: float, y: Float[Tensor, 'R d'] | None=None, allowed: float=0.0 -> f: RowFunction, x: Float[Tensor, 'R d'], J: Float[Tensor, 'R d d'], residual: bool, step: float, y: Float[Tensor, 'R d'] | None=None, allowed: float=1.0": "it is read where y is given, and then it is given, too",
        "differ_from_values.error: residual * v -> residual / v": "signs, which are their own inverses",
        "_amplified_rounding: 1 + torch.finfo(x.dtype).eps * standard_normal(x.shape, x, seed=2) -> 1 - torch.finfo(x.dtype).eps * standard_normal(x.shape, x, seed=2)": "normal numbers are symmetric",
    },
    "tracker/jacobians/witness.py": {
        "Witness._rounding_of_gradient: _ratio(again - answer.gradient, JTu) > DERIVATIVE[answer.bytes] -> _ratio(again - answer.gradient, JTu) >= DERIVATIVE[answer.bytes]": "real numbers, equal never",
        "Witness._judge_differences: apart <= CONVERGED * error_of_both -> apart < CONVERGED * error_of_both": "real numbers, equal never",
        "Witness._require_no_way_beside: answer.beside > most -> answer.beside >= most": "the same",
        "Witness._judge_differences: agrees(behind, step, 1) -> agrees(behind, step, 2)": "a margin: how many roundings of y a difference has",
        "Witness._pass_backward: torch.empty(0) -> torch.empty(1)": "a place for the first state",
        "Witness._ask: min(len(tokens), ROWS) - 1 -> min(len(tokens), ROWS) + 1": "how many more rows are tried",
        "Witness.__init__: int(digest([recording.calls[-1].y[:1, :1].cpu()])[:8], 16) -> int(digest([recording.calls[-1].y[:1, :1].cpu()])[:8], 17)": "another seed",
        "Witness.__init__: digest([recording.calls[-1].y[:1, :1].cpu()])[:8] -> digest([recording.calls[-1].y[:1, :1].cpu()])[:9]": "another seed",
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
        "_restarted: slice(0, 0) -> slice(1, 0)": "both are empty, and of the start nothing else is read",
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
        "_answer: row['attainable'] < row['detectable'] -> row['attainable'] <= row['detectable']": "the same",
        "_answer: row['r'] > 0 -> row['r'] >= 0": "r = 0 is never significant",
    },
    "vit/statistics.py": {
        "reliabilities: table['reliability_low'] > RELIABLE -> table['reliability_low'] >= RELIABLE": "real numbers, equal never",
        "_additive: 1e-20 * (values ** 2).sum(0) -> 1e-20 / (values ** 2).sum(0)": "a margin above rounding",
        "_additive: (values ** 2).sum -> (values ** 2).mean": "the same",
        "_additive: ((values - design @ effects) ** 2).sum -> ((values - design @ effects) ** 2).mean": "only ratios of them are used",
    },
}
# By file: mutants that the tests named after the file let through, or of its package where none is. The other tests have not
# been run for them. Each waits for a row in a test, or for its reason above.
SURVIVORS: dict[str, tuple[str, ...]] = {
    "checkpoints/integrity.py": (
        "_without_owner: len(steps) > 1 -> len(steps) > 2",
        "weight_files: not file.name.startswith(STATE) and file.suffix not in LOGS -> not file.name.startswith(STATE) or file.suffix not in LOGS",
    ),
    "checkpoints/suites.py": (
        "_doubling: step > 0 -> step <= 0",
        "find_files: suite.checkpoints[0] -> suite.checkpoints[1]",
    ),
    "tracker/__init__.py": (
        "__getattr__: _MODULES.get(name) or _SUBMODULES.get(name) -> _MODULES.get(name) and _SUBMODULES.get(name)",
        "__getattr__: module is None -> module is not None",
        "__getattr__: name in _MODULES -> name not in _MODULES",
    ),
    "tracker/analysis/across_models.py": (
        "_intervals: ds[f'{measure}_coupling_by_prompt'].sel(k=k, pairs='mean_offdiag').isel(step=-1) -> ds[f'{measure}_coupling_by_prompt'].sel(k=k, pairs='mean_offdiag').isel(step=-2)",
        "final_couplings: not ks or not names -> not ks and (not names)",
        "subset_fits: table['parameters'] <= middle -> table['parameters'] > middle",
    ),
    "tracker/analysis/curves.py": (
        "inverse_fit: s > 0 -> s <= 0 (4)",
        "scalars: results.sizes['step'] > 1 -> results.sizes['step'] <= 1",
        "sources: of_source is not None and len(set(of_source)) == 1 and (of_source[0] >= 0) -> of_source is not None or len(set(of_source)) == 1 or of_source[0] >= 0",
    ),
    "tracker/analysis/doubts.py": (
        "doubts: lines += [f'Step {step:,} is no published checkpoint but a random initialisation ({revision}).' for step, revision in zip(steps, revisions, strict=True) if revision.startswith(UNTRAINED)] -> lines -= [f'Step {step:,} is no published checkpoint but a random initialisation ({revision}).' for step, revision in zip(steps, revisions, strict=True) if revision.startswith(UNTRAINED)]",
        "doubts: n > 0 -> n <= 0",
        "other_tokens: usual[0] -> usual[1]",
    ),
    "tracker/analysis/pairs.py": (
        "independent_pairs: (both == pair[:, None]).all -> (both == pair[:, None]).any",
        "is_one_module: results.sizes['layer'] > 1 and len(set(_modules(results, 'layer').values)) == 1 -> results.sizes['layer'] > 1 or len(set(_modules(results, 'layer').values)) == 1",
        "where_counted: counted_pairs(results) > 0 -> counted_pairs(results) > 1",
    ),
    "tracker/analysis/selections.py": (
        "_dims: dim not in held and (not selected) -> dim not in held and selected",
        "_dims: dim not in result.dims or name in result.coords -> dim not in result.dims and name in result.coords",
        "opened: 'step' in result.coords and result['step'].dtype.kind not in 'iuf' -> 'step' in result.coords or result['step'].dtype.kind not in 'iuf'",
    ),
    "tracker/analysis/variables.py": (
        "_ordered: dim not in over -> dim in over",
        "median: middle.clip(0) -> middle.clip(1)",
        "quantiles: low + between * share -> low - between * share",
    ),
    "tracker/blocks/behaviour.py": (
        "_Observer.leave: not isinstance(y, Tensor) or y.shape != x.shape -> not isinstance(y, Tensor) and y.shape != x.shape",
        "confirm_list: all((TOKENS in axes for axes in seen.mixed.values())) -> any((TOKENS in axes for axes in seen.mixed.values()))",
        "mixed_axes: for index in (0, n - 1): -> for index in (1, n - 1):",
    ),
    "tracker/blocks/class_token.py": (
        "_why_no_class_token: batch.valid is not None -> batch.valid is None",
        "_why_no_class_token: batch.valid is not None and (not batch.valid[:, 0].all()) -> batch.valid is not None or not batch.valid[:, 0].all()",
        "_why_no_class_token: other is None -> other is not None",
    ),
    "tracker/blocks/find.py": (
        "_named: all((isinstance(block, (str, nn.Module)) for block in listed)) -> any((isinstance(block, (str, nn.Module)) for block in listed))",
        "find_blocks: _name(model, unembedding) or result.unembedding -> _name(model, unembedding) and result.unembedding",
        "find_blocks: assumed == MIXED -> assumed != MIXED (2)",
    ),
    "tracker/blocks/lists.py": (
        "_follows: b[2] -> b[3]",
        "_mixed_runs: counts[type(child)] > 1 or holds_attention(child) -> counts[type(child)] > 1 and holds_attention(child)",
        "_proposal: len(norms) > 1 -> len(norms) >= 1",
    ),
    "tracker/blocks/prepare.py": (
        "_find: blocks is None -> blocks is not None",
        "_find: found is None -> found is not None",
        "_find: recognised_blocks(tree, mixed_lists=False) -> recognised_blocks(tree, mixed_lists=True)",
    ),
    "tracker/blocks/reachability.py": (
        "_check_class_token_position: (before != after).any -> (before != after).all",
        "check_reachability: 'blocks' in blocks.assumed -> 'blocks' not in blocks.assumed",
        "run_with_noise: noisy_parameter is not None -> noisy_parameter is None",
    ),
    "tracker/blocks/tokens.py": (
        "positions: -n <= t < n -> -n <= t <= n",
        "positions: name == 'all' -> name != 'all'",
        "positions: name == 'last' -> name != 'last'",
    ),
    "tracker/blocks/towers.py": (
        "norms_around: i > at -> i >= at",
        "norms_around: min((i for i in rivals if i > at), default=len(children)) -> max((i for i in rivals if i > at), default=len(children))",
        "proposals: len({run.container for run in runs}) > 1 -> len({run.container for run in runs}) >= 1",
    ),
    "tracker/commands.py": ("main: sys.argv[1:] -> sys.argv[2:]",),
    "tracker/common/command_line.py": (
        ": OK, FAILED, USAGE, INTERRUPTED = (0, 1, 2, 130) -> OK, FAILED, USAGE, INTERRUPTED = (0, 1, 3, 130)",
        "_brief_warnings.show: category not in (UserWarning, Note) or not filename.startswith(OWN) -> category not in (UserWarning, Note) and (not filename.startswith(OWN))",
        "_brief_warnings.show: category not in (UserWarning, Note) or not filename.startswith(OWN) -> category not in (UserWarning, Note) or filename.startswith(OWN)",
    ),
    "tracker/common/errors.py": (
        "missing_extra: (error.name or '').partition('.')[0] -> (error.name or '').partition('.')[1]",
        "require_own: file != str(ROOT / package / '__init__.py') -> file == str(ROOT / package / '__init__.py')",
        "warn_caller: frame.f_back is not None and _is_internal(frame.f_code.co_filename, frame.f_globals.get('__name__', '')) -> frame.f_back is not None or _is_internal(frame.f_code.co_filename, frame.f_globals.get('__name__', ''))",
    ),
    "tracker/common/files.py": (
        "cache_root: Path(root) / 'block-coupling-tracker' -> Path(root) * 'block-coupling-tracker'",
    ),
    "tracker/common/parser.py": (
        "Parser.add_argument: options.get('type') is bool -> options.get('type') is not bool",
        "Parser.parse_args: args is None -> args is not None",
        "_with_underscores: m[0] -> m[1]",
    ),
    "tracker/common/progress.py": (
        "Progress.advance: min(1.0, self.done / self.expected) -> min(2.0, self.done / self.expected)",
        "progress_bar: tqdm(desc='measuring', total=1.0, **options) -> tqdm(desc='measuring', total=2.0, **options)",
    ),
    "tracker/common/text.py": (
        ": LABEL = 12 -> LABEL = 13",
        "first_line: str(error).strip().splitlines() or [type(error).__name__] -> str(error).strip().splitlines() and [type(error).__name__]",
        "join_names: len(shown) <= 16 -> len(shown) < 16",
    ),
    "tracker/common/values.py": (
        "_count_or_integers: len(numbers) > 1 -> len(numbers) >= 1",
        "_numbers: if not isinstance(value, str): -> if isinstance(value, str):",
        "whole_numbers: isinstance(value, Iterable) and (not isinstance(value, str)) -> isinstance(value, Iterable) or not isinstance(value, str)",
    ),
    "tracker/dashboards.py": (
        "dumped: workspace._model.model_dump_json(by_alias=True, exclude_none=True, indent=2) -> workspace._model.model_dump_json(by_alias=True, exclude_none=True, indent=3)",
    ),
    "tracker/devices.py": (
        "_is_candidate: isinstance(error, RuntimeError) and (not isinstance(error, numerical)) -> isinstance(error, RuntimeError) or not isinstance(error, numerical)",
        "is_allocation_failure: return True -> return False",
    ),
    "tracker/figures/__main__.py": (
        ": __name__ == '__main__' -> __name__ != '__main__'",
        "_named: if not has_results: -> if has_results:",
        "_save: out.mkdir(parents=True, exist_ok=True) -> out.mkdir(parents=False, exist_ok=True)",
    ),
    "tracker/figures/choices.py": (
        "Choices.paper: self.convention == 'paper' -> self.convention != 'paper'",
        "Choices.variable: f'{name}{NORMED}' in BY_NAME -> f'{name}{NORMED}' not in BY_NAME",
        "Choices: k: int = 0 -> k: int = 1",
    ),
    "tracker/figures/registry.py": (
        ": FigureSpec('28', 'Linearity at fixed blocks over training', partial(states.at_layers, variable='lss_window', sign=-1), ('lss_window',), steps=2, takes=('axis', 'layers'), paper_layers=(5, 15, 30)) -> FigureSpec('28', 'Linearity at fixed blocks over training', partial(states.at_layers, variable='lss_window', sign=-1), ('lss_window',), steps=2, takes=('axis', 'layers'), paper_layers=(5, 16, 30))",
        ": FigureSpec('28', 'Linearity at fixed blocks over training', partial(states.at_layers, variable='lss_window', sign=-1), ('lss_window',), steps=2, takes=('axis', 'layers'), paper_layers=(5, 15, 30)) -> FigureSpec('28', 'Linearity at fixed blocks over training', partial(states.at_layers, variable='lss_window', sign=-1), ('lss_window',), steps=3, takes=('axis', 'layers'), paper_layers=(5, 15, 30))",
        "FigureSpec: steps: int = 1 -> steps: int = 2",
    ),
    "tracker/jacobians/halves.py": (
        "_add_up: (torch.linalg.matrix_norm(left) <= allowed).all -> (torch.linalg.matrix_norm(left) <= allowed).any",
        "_add_up: torch.linalg.matrix_norm(left) <= allowed -> torch.linalg.matrix_norm(left) < allowed",
    ),
    "tracker/jacobians/rows.py": (
        ": 1 << 39 -> 2 << 39",
        "Jacobians._formed: not again and (not isinstance(why, NotSliceable)) -> again and (not isinstance(why, NotSliceable))",
        "full_sequence_jacobian: call: BlockCall, rows: Rows, recorded_dtype: torch.dtype, memory: int=1 << 30, attached: bool=False -> call: BlockCall, rows: Rows, recorded_dtype: torch.dtype, memory: int=1 << 30, attached: bool=True",
    ),
    "tracker/linalg/linear.py": (
        "_ContiguousRows.of: self.uses >= COPY_AFTER -> self.uses < COPY_AFTER",
        "multiply: weight.numel() >= LARGE and x.numel() // x.shape[-1] in FEW -> weight.numel() >= LARGE or x.numel() // x.shape[-1] in FEW",
    ),
    "tracker/linalg/products.py": (
        "Chain._orthogonalize: of_each == 0 -> of_each != 0",
        "Chain._orthogonalize: spread < float('inf') -> spread <= float('inf')",
    ),
    "tracker/measures/earlier.py": (
        "Earlier.add: 1 - TURNS -> 1 + TURNS",
        "Earlier.add: 1 - TURNS -> 2 - TURNS",
    ),
    "tracker/measures/equal_blocks.py": ("_first_numbers: p.dim() > 1 -> p.dim() >= 1",),
    "tracker/measures/settings.py": (
        "Settings.basis_layers: if not chosen: -> if chosen:",
        "Settings.ks: 1 <= K <= d -> 1 <= K > d",
    ),
    "tracker/model/boundaries.py": (
        "as_python: ends[0] -> ends[1]",
        "read_spans: len(blocks) < 2 -> len(blocks) <= 2",
        "read_spans: len(entry) == 2 -> len(entry) == 3",
    ),
    "tracker/model/guard.py": ("is_data: value: Any, depth: int=3 -> value: Any, depth: int=4",),
    "tracker/model/head.py": ("_have_one_length: rows.abs().max -> rows.abs().min",),
    "tracker/model/random_numbers.py": (
        "noise_like: 1 + values.square().mean().sqrt() -> 1 - values.square().mean().sqrt()",
    ),
    "tracker/netcdf.py": ("file_content: v.dtype.kind in 'biuf' -> v.dtype.kind not in 'biuf'",),
    "tracker/spans/checks.py": (
        "WholeStateCheck._error: recorded - x -> recorded + x",
        "WholeStateCheck.require_constant: call.span[0] -> call.span[1]",
        "check_stateless: calls[0].span[0] -> calls[0].span[1]",
    ),
    "tracker/training/options.py": (
        "RunOptions: class RunOptions(Options, total=False): -> class RunOptions(Options, total=True):",
    ),
    "tracker/walk/prompts.py": (
        ": PromptSource('Rowan/hellaswag', None, 'validation', _activity, 200) -> PromptSource('Rowan/hellaswag', None, 'validation', _activity, 201)",
    ),
}
