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
        "depth_means: m.shape[-1] -> m.shape[-2]": "as many layers along both axes",
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
    "tracker/analysis/null_levels.py": {},
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
# By file: mutants that the tests named after the file let through; where no tests are, none was run. Each waits for all other tests,
# a row in one of them, or its reason above.
SURVIVORS = {
    "checkpoints/configuration.py": (
        "Shape.file_bytes: 2 * self.parameters -> 3 * self.parameters",
        "check_index: not isinstance(file, str) or Path(file).name != file -> not isinstance(file, str) and Path(file).name != file",
    ),
    "checkpoints/disk.py": (
        "DiskBudget._evict: repository / 'snapshots' -> repository * 'snapshots' (2)",
        "DiskBudget._free_space: used + needed -> used - needed",
        "missing_files: not path.is_file() or path.stat().st_size != file.size -> path.is_file() or path.stat().st_size != file.size",
    ),
    "checkpoints/hub.py": (
        "_listing_file: cache_root() / 'listings' / repo.replace('/', '--') -> cache_root() / 'listings' * repo.replace('/', '--')",
        "_request_listing.ask: HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT) -> HfApi().model_info(repo, revision=commit, files_metadata=False, timeout=TIMEOUT)",
        "_request_listing: if not _is(COMMIT, commit): -> if _is(COMMIT, commit):",
    ),
    "checkpoints/integrity.py": (
        "_without_owner: len(steps) > 1 -> len(steps) > 2",
        "weight_files: not file.name.startswith(STATE) and file.suffix not in LOGS -> not file.name.startswith(STATE) or file.suffix not in LOGS",
    ),
    "checkpoints/load.py": (
        "_tokenizer: source / file -> source * file",
        "load: if not any((file.name.startswith(TOKENIZER_FILES) for file in directory.iterdir())): -> if any((file.name.startswith(TOKENIZER_FILES) for file in directory.iterdir())):",
        "readable: 'trust_remote_code' in str(error) -> 'trust_remote_code' not in str(error)",
    ),
    "checkpoints/nano.py": (
        "_module.Nano.on_train_batch_end: self.trainer.global_step in recipe.steps -> self.trainer.global_step not in recipe.steps",
        "_texts:  for i, t in enumerate(kept) if not i % 20 ->  for i, t in enumerate(kept) if i % 20",
        "train: recipe or NanoRecipe() -> recipe and NanoRecipe()",
    ),
    "checkpoints/retries.py": (
        ": BUSY = (408, 429, 500, 502, 503, 504) -> BUSY = (408, 429, 500, 502, 503, 505)",
        "Attempts.wait_or_raise: self.failed >= attempts -> self.failed < attempts",
        "_requested_pause: limit.remaining == 0 -> limit.remaining == 1",
    ),
    "checkpoints/scores.py": (
        "_check_name: '\\x00' in task or (not task.isascii() and task.encode(errors='ignore').decode() != task) -> '\\x00' in task and (not task.isascii() and task.encode(errors='ignore').decode() != task)",
        "_from_json: task not in parts -> task in parts",
        "read_user_scores: file.suffix == '.json' -> file.suffix != '.json'",
    ),
    "checkpoints/suites.py": (
        "_doubling: step > 0 -> step <= 0",
        "find_files: suite.checkpoints[0] -> suite.checkpoints[1]",
    ),
    "tracker/__init__.py": ("__getattr__: module is None -> module is not None",),
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
        "is_one_module: results.sizes['layer'] > 1 and len(set(_modules(results))) == 1 -> results.sizes['layer'] > 1 or len(set(_modules(results))) == 1",
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
    "tracker/blocks/class_token.py": ("_why_no_class_token: other is None -> other is not None",),
    "tracker/blocks/find.py": (
        "_named: all((isinstance(block, (str, nn.Module)) for block in listed)) -> any((isinstance(block, (str, nn.Module)) for block in listed))",
        "find_blocks: _name(model, unembedding) or result.unembedding -> _name(model, unembedding) and result.unembedding",
    ),
    "tracker/blocks/prepare.py": ("_find: blocks is None -> blocks is not None",),
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
        ": _of_variables('28', 'Linearity at fixed blocks over training', partial(_at_blocks, sign=-1), 'lss_window', steps=2, takes=('axis', 'layers')) -> _of_variables('28', 'Linearity at fixed blocks over training', partial(_at_blocks, sign=-1), 'lss_window', steps=3, takes=('axis', 'layers'))",
        "FigureSpec: steps: int = 1 -> steps: int = 2",
    ),
    "tracker/jacobians/kept.py": (
        "JacobianFile.keep: self._file.seek(0, os.SEEK_END) -> self._file.seek(1, os.SEEK_END)",
        "on_host: partial(to_host(J).to, J.device, non_blocking=True) -> partial(to_host(J).to, J.device, non_blocking=False)",
    ),
    "tracker/jacobians/restriction.py": (
        "restrict.f.handler: key.dim() == 4 -> key.dim() == 5",
        "restrict.f.handler: past.key.shape[-2] -> past.key.shape[-3]",
        "restrict: len(divided) > 1 -> len(divided) >= 1",
    ),
    "tracker/linalg/cores.py": (
        "map_on_cores: cores == 1 -> cores != 1",
        "map_on_cores: cores == 1 -> cores == 2",
    ),
    "tracker/linalg/costs.py": (
        "_eigenvectors_suit: d // 4 -> d % 4",
        "krylov_is_cheaper: _iteration(d, K, dtype, device) + cost.square * d ** 3 -> _iteration(d, K, dtype, device) - cost.square * d ** 3",
        "krylov_is_cheaper: d ** 3 -> d ** 4 (2)",
    ),
    "tracker/linalg/jacobian.py": (
        "GradientsStayOn.__torch_function__: keywords or {} -> keywords and {}",
        "_gradients.gradient: torch.autograd.grad(y, x, u, retain_graph=True, allow_unused=True, materialize_grads=True) -> torch.autograd.grad(y, x, u, retain_graph=True, allow_unused=False, materialize_grads=True)",
        "linearize: v is None -> v is not None (2)",
    ),
    "tracker/linalg/linear.py": (
        "_ContiguousRows.of: self.uses >= COPY_AFTER -> self.uses < COPY_AFTER",
        "multiply: weight.numel() >= LARGE and x.numel() // x.shape[-1] in FEW -> weight.numel() >= LARGE or x.numel() // x.shape[-1] in FEW",
    ),
    "tracker/linalg/orthonormal.py": (
        "Orthonormaliser._test_at_once: 100 * basis.shape[-2] + 1 -> 100 * basis.shape[-2] - 1",
        "Orthonormaliser._test_at_once: 100 * basis.shape[-2] -> 101 * basis.shape[-2]",
        "_orthonormal_rows: W.shape[-1] -> W.shape[-2]",
    ),
    "tracker/linalg/products.py": (
        "Chain._orthogonalize: of_each == 0 -> of_each != 0",
        "Chain._orthogonalize: spread < float('inf') -> spread <= float('inf')",
    ),
    "tracker/linalg/transfer.py": (
        "standard_normal: shape: Sequence[int], like: Tensor, seed: int=0 -> shape: Sequence[int], like: Tensor, seed: int=1",
        "to_arrays: all((value.device.type == 'cpu' for value in values.values())) -> any((value.device.type == 'cpu' for value in values.values()))",
        "to_arrays: lambda name: -values[name].itemsize -> lambda name: values[name].itemsize",
    ),
    "tracker/loggers/__init__.py": (
        "announce: print(line, flush=True) -> print(line, flush=False)",
        "opened.attempt: print(f'{type(logger).__name__} failed and gets no more steps ({reason})', file=sys.stderr, flush=True) -> print(f'{type(logger).__name__} failed and gets no more steps ({reason})', file=sys.stderr, flush=False)",
        "opened.send: row is not None and loggers -> row is not None or loggers",
    ),
    "tracker/loggers/protocol.py": (
        "parse_log: '*' not in name -> '*' in name",
        "select_metrics: any((fnmatchcase(name, pattern) for name in (*row.scalars, *others))) -> all((fnmatchcase(name, pattern) for name in (*row.scalars, *others)))",
        "select_metrics: get_close_matches(pattern, candidates, n=3, cutoff=0) -> get_close_matches(pattern, candidates, n=4, cutoff=0)",
    ),
    "tracker/loggers/wandb.py": (
        "_summary: MEAN_OFFDIAG in last -> MEAN_OFFDIAG not in last",
        "_summary: min(over_steps, default=math.nan) -> max(over_steps, default=math.nan)",
        "run_settings: wandb.Settings(x_transaction_log_flush_interval=0.5, console='off', silent=True, finish_timeout=FINISH, finish_timeout_raises=True) -> wandb.Settings(x_transaction_log_flush_interval=0.5, console='off', silent=True, finish_timeout=FINISH, finish_timeout_raises=False)",
    ),
    "tracker/measurement.py": (
        "_tried: pending += [other.argument for other in closer] -> pending -= [other.argument for other in closer]",
        "_why_not_measurable: settings.memory_budget // 4 -> settings.memory_budget // 5",
    ),
    "tracker/measures/calls.py": (
        "_are_enough: pending[0][2] -> pending[0][3]",
        "warn_of_missing_norm: blocks.include_final_norm is None -> blocks.include_final_norm is not None",
    ),
    "tracker/measures/dataset.py": (
        ": range(5) -> range(6)",
        "_pad: if not any((after for _, after in missing)): -> if any((after for _, after in missing)):",
        "assemble: samples[0] -> samples[1]",
    ),
    "tracker/measures/declaration.py": (
        "Measure.by_depth: self.dims in (('layer', 'position'), ('depth', 'position')) -> self.dims not in (('layer', 'position'), ('depth', 'position'))",
        "Measure.point: part == '_coupling' -> part != '_coupling'",
        "of_each_block: more |= {'counted': True, 'curve': 'quartiles', 'metric': f'jacobian/{name}', 'logged': ('',), 'main': True} -> more &= {'counted': True, 'curve': 'quartiles', 'metric': f'jacobian/{name}', 'logged': ('',), 'main': True}",
    ),
    "tracker/measures/cost.py": (
        "_peak: if not settings.forms_jacobians: -> if settings.forms_jacobians:",
        "_peak: max(256, rows) -> max(257, rows)",
        "_peak: min(kept, torch.get_num_threads()) -> max(kept, torch.get_num_threads())",
    ),
    "tracker/measures/layers.py": (
        "kept_bytes: max(settings.ks(d)) -> min(settings.ks(d))",
        "layers_of: plan.kept == 'device' -> plan.kept != 'device'",
    ),
    "tracker/measures/options.py": (
        "_canonical: option.default is None or name == 'measures' -> option.default is None and name == 'measures'",
        "_measures: isinstance(value, Iterable) and (not isinstance(value, bytes)) -> isinstance(value, Iterable) or not isinstance(value, bytes)",
    ),
    "tracker/measures/plan.py": (
        "Plan.blocks_together: self.kept == 'device' -> self.kept != 'device'",
        "make_plan: max(1, plan.memory // (forming + beside)) -> min(1, plan.memory // (forming + beside))",
    ),
    "tracker/measures/settings.py": (
        "Settings.basis_layers: if not chosen: -> if chosen:",
        "Settings.ks: 1 <= K <= d -> 1 <= K > d",
    ),
    "tracker/model/attention.py": (
        "_sdpa_arguments: query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False -> query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True",
        "intercept_attention: _contexts += 1 -> _contexts -= 1",
        "intercept_attention: _contexts == 0 -> _contexts == 1",
    ),
    "tracker/model/boundaries.py": (
        "read_spans: len(blocks) < 2 -> len(blocks) <= 2",
        "read_spans: len(entry) == 2 -> len(entry) == 3",
    ),
    "tracker/model/description.py": (
        ": str | nn.Module | tuple[str, str] -> (str | nn.Module) & tuple[str, str]",
        "Blocks.__str__: self.class_token is None -> self.class_token is not None",
        "Blocks.__str__: self.unembedding or 'none' -> self.unembedding and 'none'",
    ),
    "tracker/model/functions.py": (
        "_held: value.__kwdefaults__ or {} -> value.__kwdefaults__ and {}",
    ),
    "tracker/model/global_state.py": (
        "_inference_mode_as_no_grad.enter_no_grad: get_ident() != thread -> get_ident() == thread",
        "_inference_mode_as_no_grad.enter_no_grad: torch.set_grad_enabled(not self.mode) -> torch.set_grad_enabled(self.mode)",
        "preserve_global_state: 'torch._dynamo' in sys.modules -> 'torch._dynamo' not in sys.modules",
    ),
    "tracker/model/guard.py": ("is_data: value: Any, depth: int=3 -> value: Any, depth: int=4",),
    "tracker/model/hidden_state.py": (
        "_is_record: is_dataclass(output) and (not isinstance(output, (type, Mapping))) -> is_dataclass(output) or not isinstance(output, (type, Mapping))",
        "check_finite: if not torch.isfinite(values).all(): -> if torch.isfinite(values).all():",
        "floating_tensors: found or (floating_tensors(vars(output)) if hasattr(output, '__dict__') else []) -> found and (floating_tensors(vars(output)) if hasattr(output, '__dict__') else [])",
    ),
    "tracker/model/huggingface.py": (
        "_owners: name == '' -> name != ''",
        "_text_towers: if not any((module is part for tower in towers for part in tower.modules())): -> if any((module is part for tower in towers for part in tower.modules())):",
        "in_text_tower: towers and (not any((inner is tower for inner in owners for tower in towers))) -> towers or not any((inner is tower for inner in owners for tower in towers))",
    ),
    "tracker/model/inputs.py": (
        "_batch: owner is None or main.is_floating_point() or main.dim() > 2 -> owner is None and main.is_floating_point() and (main.dim() > 2)",
        "_prompt: 'input_ids' in keywords -> 'input_ids' not in keywords",
        "batches: name != 'attention_mask' -> name == 'attention_mask'",
    ),
    "tracker/model/kernels.py": (
        "_registered: registry is None -> registry is not None",
        "is_experts_kernel: return False -> return True",
        "is_kernel: return False -> return True",
    ),
    "tracker/model/random_numbers.py": (
        "noise_like: 1 + values.square().mean().sqrt() -> 1 - values.square().mean().sqrt()",
    ),
    "tracker/model/recorder.py": (
        "_Recorder.leave_block: self.replica.generators.states() != self.random_before -> self.replica.generators.states() == self.random_before",
        "_Recorder.leave_block: y.shape != call.x.shape -> y.shape == call.x.shape",
        "record: 1 << 30 -> 1 << 31",
    ),
    "tracker/model/recording.py": (
        "BlockCall.to.convert: if not isinstance(value, Tensor): -> if isinstance(value, Tensor):",
        "BlockCall.to.convert: value.dtype == self.replica.dtype -> value.dtype != self.replica.dtype",
        "host_memory: os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') -> os.sysconf('SC_PAGE_SIZE') / os.sysconf('SC_PHYS_PAGES')",
    ),
    "tracker/model/records.py": (
        "is_texts: all((isinstance(entry, str) for entry in value)) -> any((isinstance(entry, str) for entry in value))",
        "is_texts: not isinstance(value, (list, tuple)) or hasattr(value, '_fields') -> isinstance(value, (list, tuple)) or hasattr(value, '_fields')",
        "is_texts: return False -> return True",
    ),
    "tracker/model/replica.py": (
        "Replica.fresh_weights: id(block) in self._writers -> id(block) not in self._writers",
        "modules_outside: held not in inside -> held in inside",
        "modules_outside: part not in left_out -> part in left_out",
    ),
    "tracker/model/state_maps.py": (
        "adds: diagonal > LEAST -> diagonal <= LEAST",
        "has_matrices: sum((p is not None and p.dim() > 1 for part in parts for p in part._parameters.values())) > 1 -> sum((p is not None and p.dim() > 1 for part in parts for p in part._parameters.values())) <= 1",
        "may_be_block: parameter.dim() > 1 -> parameter.dim() <= 1",
    ),
    "tracker/model/weights.py": (
        "_Ranks._agree: [outcome, number, -number] -> [outcome, number, number]",
        "noting_forward: not isinstance(error, UsageError) and (not of_machine) -> not isinstance(error, UsageError) and of_machine",
        "weights_memory: max(of_blocks, default=0) -> min(of_blocks, default=0)",
    ),
    "tracker/model/wrappers.py": (
        "_held: 'TransformerBridge' in {c.__name__ for c in type(module).__mro__} -> 'TransformerBridge' not in {c.__name__ for c in type(module).__mro__}",
        "_held: held is None -> held is not None",
        "names_by_id.visit: id(module) in names -> id(module) not in names",
    ),
    "tracker/provenance.py": (
        "describe: getattr(config, '_attn_implementation', '') or '' -> getattr(config, '_attn_implementation', '') and ''",
        "usable_device: torch.zeros(1, device=device) -> torch.zeros(2, device=device)",
    ),
    "tracker/pythia.py": (
        "_measure_missing.measured_elsewhere: step not in units.known -> step in units.known",
        "_stops: signal.getsignal(signal.SIGHUP) == signal.SIG_IGN -> signal.getsignal(signal.SIGHUP) != signal.SIG_IGN",
    ),
    "tracker/replay.py": (
        ": __name__ == '__main__' -> __name__ != '__main__'",
        "main: parsed.name or parsed.results.resolve().name -> parsed.name and parsed.results.resolve().name",
        "replay: steps[-1] -> steps[-2]",
    ),
    "tracker/report/__main__.py": (": __name__ == '__main__' -> __name__ != '__main__'",),
    "tracker/report/contents.py": (
        "_error: abs(again - flat)[compared] / abs(flat[compared]) -> abs(again - flat)[compared] * abs(flat[compared])",
        "_positions: values[0] -> values[1]",
        "contents: 'k' in ds.coords -> 'k' not in ds.coords",
    ),
    "tracker/report/write.py": (
        "_json: json.dumps(value, allow_nan=False, separators=(',', ':')) -> json.dumps(value, allow_nan=True, separators=(',', ':'))",
        "main: len(parsed.results) > 1 -> len(parsed.results) > 2",
    ),
    "tracker/skipped.py": (
        "Skipped.alike: len(self._first) == 1 -> len(self._first) != 1",
        "Skipped.alike: len(self._first) == 1 and len(self.reasons) >= count -> len(self._first) == 1 or len(self.reasons) >= count",
    ),
    "tracker/spans/calls.py": (
        "SpanCall.__call__: self.final_norm is None -> self.final_norm is not None",
        "SpanCall: field(kw_only=True) -> field(kw_only=False) (2)",
        "_TensorReplacement.current: self.replaced[id(value)][1] -> self.replaced[id(value)][2]",
    ),
    "tracker/spans/checks.py": ("check_stateless: calls[0].span[0] -> calls[0].span[1]",),
    "tracker/spans/recording.py": (
        "_Recorder.calls: calls[-1] -> calls[-2] (3)",
        "_Recorder.calls: order != sorted(order) or any((start == end for start, end in self.spans)) -> order != sorted(order) and any((start == end for start, end in self.spans))",
        "_Recorder.calls: self.random[span[0]] != self.random[span[1]] -> self.random[span[0]] == self.random[span[1]]",
    ),
    "tracker/store.py": (
        "Store.continued: settings.final_norm == 'auto' -> settings.final_norm != 'auto'",
        "_with_attributes: curve.assign_coords(along).drop_attrs(deep=False) -> curve.assign_coords(along).drop_attrs(deep=True)",
        "distinct_names: max(map(len, parts), default=1) + 1 -> max(map(len, parts), default=1) + 2",
    ),
    "tracker/training/callback.py": (
        "CouplingCallback.setup: trainer.global_step < self.run.last_checked -> trainer.global_step <= self.run.last_checked",
    ),
    "tracker/training/options.py": (
        "RunOptions: class RunOptions(Options, total=False): -> class RunOptions(Options, total=True):",
    ),
    "tracker/training/probe.py": (
        "forward_calls: name in known and (shifted or not name.startswith('label')) -> name in known or (shifted or not name.startswith('label'))",
    ),
    "tracker/training/ranks.py": (
        "Ranks._worst: self.group is None -> self.group is not None",
        "_report: message += f' ({Path(line.filename).name}, line {line.lineno})' -> message -= f' ({Path(line.filename).name}, line {line.lineno})'",
    ),
    "tracker/training/run.py": (
        "TrainingRun.__init__: 0 < self.max_overhead < 1 -> 0 < self.max_overhead < 2",
        "TrainingRun._store: self.open_store is not None and self.ranks.rank == 0 -> self.open_store is not None or self.ranks.rank == 0",
        "TrainingRun.finish: self.ranks.rank == 0 -> self.ranks.rank == 1",
    ),
    "tracker/training/schedule.py": (
        "choose: steps is not None -> steps is None",
        "positive: value < 1 -> value < 2",
    ),
    "tracker/training/transformers.py": (
        "TransformersCallback.__getstate__: vars(self) | {'trainer': None} -> vars(self) & {'trainer': None}",
        "TransformersCallback.on_epoch_end: self._reach(args, state, context['model'], force=True) -> self._reach(args, state, context['model'], force=False)",
        "TransformersCallback.on_epoch_end: state.epoch or 0 -> state.epoch or 1",
    ),
    "tracker/walk/command.py": (
        "Walk.__post_init__: self.load and (not self.files) -> self.load and self.files",
    ),
    "tracker/walk/display.py": (
        "WalkProgress.downloading.count: now - reported > INTERVAL -> now - reported >= INTERVAL",
        "_measured_at: stated or (isinstance(measurement.inputs, list) and (not measurement.own_code)) -> stated and (isinstance(measurement.inputs, list) and (not measurement.own_code))",
        "reason: f'{type(error).__name__}: {error}' + ('' if debug else '; --debug prints the traceback') -> f'{type(error).__name__}: {error}' - ('' if debug else '; --debug prints the traceback')",
    ),
    "tracker/walk/dry_run.py": (
        "_download_lines: max(largest, shape.file_bytes) -> min(largest, shape.file_bytes)",
        "_download_lines: sources[computed] += 1 -> sources[computed] += 2",
    ),
    "tracker/walk/plan.py": (
        '_output: walk.scores or "the suite\'s own, zero-shot" -> walk.scores and "the suite\'s own, zero-shot"',
        "default_budget: total * 9 // 10 -> total * 9 // 11",
        "store_of: Path('results') / suite.name -> Path('results') * suite.name",
    ),
    "tracker/walk/prompts.py": (
        ": PromptSource('Rowan/hellaswag', None, 'validation', _activity, 200) -> PromptSource('Rowan/hellaswag', None, 'validation', _activity, 201)",
    ),
    "vit/analysis.py": (": __name__ == '__main__' -> __name__ != '__main__'",),
    "vit/augment.py": ("_grey: red + green + blue + 2 ** 15 -> red + green + blue - 2 ** 15",),
    "vit/cells.py": (
        ": PATIENCE = 10.0 -> PATIENCE = 20.0",
        "finished_epochs: read(directory, 'history') or () -> read(directory, 'history') and ()",
        "record_failure: print(f'{recipe.cell}: {reason} ({failure})', file=sys.stderr, flush=True) -> print(f'{recipe.cell}: {reason} ({failure})', file=sys.stderr, flush=False)",
    ),
    "vit/data.py": (
        "_cifar10: torch.from_numpy(split.data).permute(0, 3, 1, 2) -> torch.from_numpy(split.data).permute(0, 3, 2, 2)",
    ),
    "vit/grid.py": (
        "_training: grid.jobs == 1 or grid.dry_run or (not missing) -> grid.jobs == 1 or grid.dry_run or missing",
        "cells: grid.out or Path('results') / 'vit' / recipe.data_name -> grid.out and Path('results') / 'vit' / recipe.data_name",
    ),
    "vit/loaders.py": (
        "Batches.__init__: Mixup(recipe.mixup, recipe.cutmix, label_smoothing=0.0, num_classes=len(data.classes)) -> Mixup(recipe.mixup, recipe.cutmix, label_smoothing=1.0, num_classes=len(data.classes))",
        "Order.__init__: images // world -> images % world",
    ),
    "vit/model.py": (
        "build: trunc_normal_(model.cls_token, std=0.02) -> trunc_normal_(model.cls_token, std=0.04)",
    ),
    "vit/module.py": (
        "Classifier.configure_optimizers: recipe.lr * recipe.batch_size / 512 -> recipe.lr * recipe.batch_size / 513",
        "Classifier.on_train_epoch_end: self.recipe.epochs - epoch -> self.recipe.epochs + epoch",
        "Classifier.on_train_epoch_end: self.trainer.optimizers[0].param_groups[0] -> self.trainer.optimizers[0].param_groups[1]",
    ),
    "vit/overview.py": (
        ": SECONDS = 2.0 -> SECONDS = 4.0",
        "shown.count_epochs: not left or trained == before -> left or trained == before",
        "shown: threading.Thread(target=watch, daemon=True) -> threading.Thread(target=watch, daemon=False)",
    ),
    "vit/recipe.py": (
        "Recipe: test_unused: bool = False -> test_unused: bool = True",
        "Recipe: warmup_epochs: int = 5 -> warmup_epochs: int = 6",
        "check: recipe.batch_size // devices -> recipe.batch_size % devices",
    ),
    "vit/results.py": (
        "_read_cell: json.dumps(recipe, sort_keys=True) -> json.dumps(recipe, sort_keys=False)",
        "_read_cell: result['status'] != 'finished' -> result['status'] == 'finished'",
    ),
    "vit/training.py": (
        "train_cell: recipe.directory.mkdir(parents=True, exist_ok=True) -> recipe.directory.mkdir(parents=False, exist_ok=True)",
    ),
}
