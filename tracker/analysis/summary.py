"""A table of results: how far blocks are coupled and how straight and exponential paths are, with intervals.

    coupling     null level minus mis-coupling, of the blocks alone: 0 for unrelated blocks
    all pairs    mean over pairs of different blocks
    neighbours   mean over pairs of blocks that follow each other

A store is summarised at its first and last step: a step that is chosen for its coupling has no interval, so the highest value of
all steps is stated without one. Several results stand side by side, with the difference of each from the first. Intervals of
results are over their prompts, which share the weights. Where a recipe has several runs, intervals are over runs: that of its
mean, and Welch's of the difference of two means.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import chain

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.curves import curves, sources
from tracker.analysis.doubts import OF_RECIPE, describe_differences, doubts
from tracker.analysis.null_levels import READ
from tracker.analysis.onset import FEWEST_PAIRS, coupled
from tracker.analysis.pairs import (
    describe_blocks,
    has_alike_weights,
    has_one_module,
    independent_pairs,
    is_one_module,
    is_post_norm,
)
from tracker.analysis.reduction import COORDINATES, IN_SUMMARY, PERCENTILES, reduced
from tracker.analysis.regression import clustered_mean, error_of_sum, t_margin
from tracker.analysis.selections import opened, with_steps
from tracker.common.errors import UsageError
from tracker.common.text import at_tokens, capitalised, counted, escaped, find_repeats, join_names
from tracker.measures.declaration import POSITION
from tracker.measures.registry import BY_NAME
from tracker.store import (
    Result,
    Store,
    attribute_values,
    require_steps,
    runs_of_recipes,
    short_name,
)

SHOWN = ("miscoupling", "offdiag_normalized")
BY_DEFINITION = {"miscoupling": "coupling", "offdiag_normalized": "coupling by eq. 14"}
PAIRS = {"mean_offdiag": "all pairs", "mean_adjacent": "neighbours"}
COLUMNS = ("value", "null_level", "coupling", "low", "high", "over", "answer")
ABOVE, UNDEFINED_VALUE = "above 0", "undefined"
NO_LEVEL = "no test: post-norm"
OF_WEIGHTS = 'Two runs of one recipe differ as well: tracker.summary({"a": [run, run], "b": [run, run]}) compares recipes.'


class Summary(pd.DataFrame):
    """A table that prints with a title above it and what to know about it below.

    Columns: `value`, a mean over prompts, or the median over the tokens of all, and of several runs the mean of their values;
    `null_level` and `coupling`, where a measure has a null level; `low` and `high`, the 95 % interval of `coupling`, or of
    `value` where there is no null level, and `over`, what it is over; `answer`, whether the coupling of all pairs of one result
    is above 0, in a test over pairs of blocks and prompts, or why that is not tested. Numbers are NaN, and words "", where there
    is none. The title is `attrs["title"]`, and the sentences below are `attrs["notes"]`.
    """

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame  # a part of the table is a plain DataFrame

    def __repr__(self) -> str:
        """Return the title, the table without columns that are empty, and the notes."""
        table = self._shown().to_string(float_format=lambda value: f"{value:z.3f}", na_rep="")
        lines = [self.attrs["title"], "", table, "", *self.attrs["notes"], self.attrs["finding"]]
        return escaped("\n".join(lines).rstrip("\n"))

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.attrs["notes"])
        said = f"{self.attrs['title']}. {self.attrs['finding']}"
        return f"<p>{escape(said)}</p>{self.html_table()}<ul>{notes}</ul>"

    def html_table(self) -> str:
        """Return the table as HTML, without title and notes."""
        return self._shown().to_html(
            float_format=lambda value: f"{value:z.3f}", na_rep="", border=0
        )

    def _shown(self) -> pd.DataFrame:
        return self.loc[:, ((self != "") & self.notna()).any()]


def summary(
    results: Result | Mapping[str, Result | Sequence[Result]] | Sequence[Result],
    k: int | None = None,
    step: int | None = None,
) -> Summary:
    """Return how far blocks are coupled beyond chance, how straight paths are and how evenly norms grow, as a table.

    Args:
        results: a Dataset of `measure` or `open_results`, or a part of one; a store or its directory; or several of these, by
            name or as a list, of which the last steps are compared. In a mapping, a list or a mapping holds the runs of a recipe.
        k: number of singular vectors; the smallest measured by default.
        step: the step to take in place of the last, as if nothing had been measured after it.

    Returns:
        A DataFrame with a row for each measure, choice of pairs, and step or result; `Summary` describes its columns. Where
        results have the same prompts, the interval of their difference is over the differences of the prompts. If a recipe has
        several runs, all intervals are over runs, and a recipe of one run has none.

    Raises:
        FileNotFoundError: if a directory holds no results.
        UsageError: for a K or a step that was not measured, for results without mis-couplings and without paths, for a part of
            results without what the table needs, and for runs of a recipe that were not measured alike, or have the same numbers.
    """
    recipes = {
        recipe: {run: _until(_result(of), step, run) for run, of in runs.items()}
        for recipe, runs in runs_of_recipes(results).items()
    }
    return _of_recipes(recipes, k)


def summary_of_reduced(results: Mapping[str, xr.Dataset]) -> Summary:
    """Return the summary of one result or several along `step`, each as `reduction.reduced` returns it."""
    return _of_recipes({name: {name: _of_curve(curve)} for name, curve in results.items()}, None)


@dataclass(frozen=True)
class _Result:
    """A result, of which no more is read than is needed.

    Attributes:
        steps: ascending.
        curve: returns some steps, `reduced`.
        couplings: returns the `curves` of the measures of `SHOWN` at some steps.
        skipped: the steps without results, and why.
    """

    steps: list[int]
    curve: Callable[[list[int]], xr.Dataset]
    couplings: Callable[[list[int]], xr.Dataset]
    skipped: Mapping[int, str] = field(default_factory=dict)


Recipes = Mapping[str, Mapping[str, _Result]]  # the runs of each, by name


def _of_curve(curve: xr.Dataset) -> _Result:
    def at(steps: list[int]) -> xr.Dataset:
        return curve.sel(step=steps)

    return _Result(curve["step"].values.tolist(), at, at)


def _result(result: Result) -> _Result:
    if isinstance(result, xr.Dataset):
        ds = _naming_its_tokens(with_steps(opened(result), 0).sortby("step"))
        return _Result(
            ds["step"].values.tolist(),
            lambda steps: reduced(ds.sel(step=steps)),
            lambda steps: curves(ds.sel(step=steps), SHOWN),
        )
    store = Store(result)
    return _Result(
        require_steps(store),
        lambda steps: reduced(store.curve(steps)),
        partial(_read_couplings, store),
        store.skipped(),
    )


def _read_couplings(store: Store, steps: list[int]) -> xr.Dataset:
    """Return the curves of the mis-couplings of a store."""
    needed = {*SHOWN, *READ, *COORDINATES, "prompt_text"}
    return curves(store.curve(steps, needed), SHOWN)


def _until(result: _Result, step: int | None, name: str) -> _Result:
    """Return a result as if `step` was its last.

    Raises:
        UsageError: if it was not measured.
    """
    if step is None:
        return result
    if step not in result.steps:
        raise UsageError(
            f"step {step!r} of {name} was not measured; choose from {join_names(result.steps)}"
        )
    return replace(result, steps=result.steps[: result.steps.index(step) + 1])


def _naming_its_tokens(ds: xr.Dataset) -> xr.Dataset:
    """Return results whose attribute `tokens` names those that were selected of several indices.

    >>> part = xr.Dataset(coords={"token": [1]}, attrs={"tokens": "0, -1"})
    >>> _naming_its_tokens(part).attrs["tokens"]
    '-1'
    """
    named = ds.attrs["tokens"].split(", ")
    selected = ds["token"].values.tolist() if "token" in ds.coords else []
    if len(named) == 1 or not {*selected} <= {*range(len(named))}:
        return ds
    return ds.assign_attrs(tokens=", ".join(named[i] for i in selected) or ds.attrs["tokens"])


def _chosen(ds: xr.Dataset, k: int | None) -> int | None:
    """Return K; None without mis-couplings.

    Raises:
        UsageError: if that K was not measured, or there is nothing to summarise.
    """
    if not any(f"{name}_matrix" in ds for name in SHOWN):
        if not any(path in ds for path in IN_SUMMARY):
            raise UsageError(
                "the results hold no mis-couplings and no paths; measure 'coupling' or 'trajectory'"
            )
        return None
    known = [int(other) for other in np.atleast_1d(ds["k"].values)]
    if k is not None and k not in known:
        raise UsageError(f"K = {k} was not measured; choose from {', '.join(map(str, known))}")
    return k or min(known)


Row = list[float | str]


def _row(value: float, null_level: float, ends: list[float], over: str, answer: str) -> Row:
    """Return a row of the table: without an interval, not what it is over; without a value, no answer."""
    over = "" if np.isnan(ends).any() else over
    answer = UNDEFINED_VALUE if np.isnan(value) else answer
    return [value, null_level, null_level - value, *ends, over, answer]


@dataclass(frozen=True)
class Cell:
    """A value, its null level, and what its interval and its answer are of.

    Attributes:
        by_prompt: a number of each prompt, in clusters, or of each run; NaN where there is no interval. They are those of which
            `middle` is the mean, or `_below` of `reduced`, for a median.
        percentiles: of the values of which it is the median; None: it is a mean.
        answer: whether the coupling is above 0.
    """

    value: float
    null_level: float
    by_prompt: np.ndarray
    clusters: np.ndarray | None
    kind: str
    percentiles: np.ndarray | None = None
    answer: str = ""

    @property
    def middle(self) -> float:
        """What an interval is of: the coupling, or the value where there is no null level."""
        return self.value if np.isnan(self.null_level) else self.null_level - self.value

    def row(self) -> Row:
        """Return the row of the table."""
        _, error, df = clustered_mean(self.by_prompt, self.clusters)
        margin = float(t_margin(error, df))
        if self.percentiles is None:
            ends = [self.middle - margin, self.middle + margin]
        # Woodruff (1952): the share of values below the median has an error, and these are the quantiles of its ends
        else:
            ends = [self.quantile(0.5 - margin), self.quantile(0.5 + margin)]
        return _row(self.value, self.null_level, ends, self.over, self.answer)

    @property
    def over(self) -> str:
        """What an interval is over, where there is one."""
        return (
            f"{self.kind}s"
            if self.clusters is None
            else f"{len(set(self.clusters))} clusters of {self.kind}s"
        )

    def quantile(self, share: float) -> float:
        """Return a quantile of the values; the least or the largest beyond their ends."""
        assert self.percentiles is not None
        return (
            float(np.interp(share, PERCENTILES, self.percentiles)) if np.isfinite(share) else np.nan
        )

    def linear(self) -> np.ndarray:
        """Return a number of each prompt, whose mean has the error of the value: to first order for a median."""
        if self.percentiles is None:
            return self.by_prompt
        # `by_prompt` are shares of values below the median: the more are below, the lower is the median, by the slope of the
        # quantiles there. The slope is taken over the share's own error, as its interval is, and over a percentile at least.
        _, error, _ = clustered_mean(self.by_prompt, self.clusters)
        half = min(max(float(error), 0.01), 0.5)
        rise = self.quantile(0.5 + half) - self.quantile(0.5 - half)
        return -self.by_prompt * rise / (2 * half)

    def row_of_difference(self, other: "Cell", paired: bool) -> Row:
        """Return the row of this value minus another; of differences of prompts if `paired`, else with Welch's interval."""
        if paired:
            _, error, df = clustered_mean(self.linear() - other.linear(), self.clusters)
        else:
            means = [clustered_mean(of.linear(), of.clusters) for of in (self, other)]
            _, errors, dfs = np.transpose(means)
            error, df = error_of_sum(errors, dfs)
        value, null_level = self.value - other.value, self.null_level - other.null_level
        middle, margin = self.middle - other.middle, float(t_margin(error, df))
        ends = [middle - margin, middle + margin]
        over = " and ".join(dict.fromkeys([self.over] if paired else [self.over, other.over]))
        return _row(value, null_level, ends, over, "")


Cells = dict[tuple[str, str], Cell]  # by measure and of what


def _cells(unit: xr.Dataset, k: int | None) -> Cells:
    """Return the values of a unit."""
    clusters, kind, cells = sources(unit), kind_of_inputs(unit), {}
    # A block alone has matrices of one entry, which is no pair.
    with_pairs = [name for name in SHOWN if f"{name}_matrix" in unit and unit.sizes["layer"] > 1]
    for name in with_pairs:
        at = unit.sel(k=k)
        for pairs, words in PAIRS.items():
            value, null = (float(at[part].sel(pairs=pairs)) for part in (name, f"{name}_null"))
            answer = _answer(unit, k, name) if pairs == "mean_offdiag" else ""
            by_prompt = at[f"{name}_coupling_by_prompt"].sel(pairs=pairs).values
            cells[name, words] = Cell(value, null, by_prompt, clusters, kind, answer=answer)
    for name in (name for name in IN_SUMMARY if f"{name}_below" in unit):
        value, below = float(unit[name].sel(statistic="median")), unit[f"{name}_below"].values
        percentiles = unit[f"{name}_percentiles"].values
        of = "tokens" if BY_NAME[name].dims == POSITION else "tokens and blocks"
        cells[name, f"median of {of}"] = Cell(value, np.nan, below, clusters, kind, percentiles)
    return cells


def _answer(unit: xr.Dataset, k: int | None, name: str) -> str:
    """Say whether the coupling is above 0, or why that is not tested."""
    # Whatever their weights are, one module is coupled with itself.
    if is_one_module(unit):
        return "no test: the blocks are one module"
    if is_post_norm(unit):
        return NO_LEVEL
    pairs = independent_pairs(_departure(unit, k, name), unit)
    if not np.isfinite(pairs).any():
        return f"no test: {UNDEFINED_VALUE}"
    if (count := np.isfinite(pairs).sum()) < FEWEST_PAIRS:
        return f"no test: {counted(int(count), 'pair')} of blocks"
    prompts = unit[f"{name}_coupling_by_prompt"].sel(k=k, pairs="mean_offdiag").values
    above = coupled(pairs[None], prompts[None], sources(unit))
    return ABOVE if above[0] else f"not {ABOVE}"


def _departure(unit: xr.Dataset, k: int | None, name: str) -> xr.DataArray:
    """Return null level minus mis-coupling, (layer, layer_other)."""
    return (unit[f"{name}_level"] - unit[f"{name}_matrix"]).sel(k=k)


def _of_recipes(recipes: Recipes, k: int | None) -> Summary:
    runs = [run for of_recipe in recipes.values() for run in of_recipe.values()]
    return _side_by_side(recipes, runs, k) if len(runs) > 1 else _of_steps(runs[0], k)


def _of_steps(result: _Result, k: int | None) -> Summary:
    steps = result.steps
    several = len(steps) > 1
    curve = result.curve([steps[0], steps[-1]] if several else steps)
    units = [curve.isel(step=i) for i in range(curve.sizes["step"])]
    k = _chosen(units[-1], k)
    cells = [_cells(unit, k) for unit in units]
    columns = {
        f"{unit['step'].item():,}" if several else "": of
        for unit, of in zip(units, cells, strict=True)
    }
    rows = _rows(columns)
    title = _title(units[-1], k)
    if several:
        title += f"; the first and the last of {counted(len(steps), 'step')}"
    notes = [*_of_rows(units, rows, k), *doubts(curve, result.skipped)]
    finding = _of_change(units, cells, k) if several else ""
    highest, unknown = _highest({"": {"": result}}, k)
    if finding and (peak := highest.get("")) and peak.earlier and peak.step != steps[0]:
        finding += f" At step {peak.step:,} it was highest, by the first definition, with {peak.value:z.3f}."
    notes += unknown
    return _table(rows, "step" if several else "", title, notes, finding)


@dataclass(frozen=True)
class Peak:
    """The highest coupling of a recipe, a mean over its runs, its step, and whether a later step was measured in all runs."""

    value: float
    step: float
    earlier: bool


def _highest(recipes: Recipes, k: int | None) -> tuple[dict[str, Peak], list[str]]:
    """Return the highest coupling of each recipe whose runs have several steps, and why that of others is not known."""
    found, unknown = {}, []
    for name, runs in recipes.items():
        if k is None or any(len(run.steps) < 2 for run in runs.values()):
            continue
        try:
            coupling = _mean_coupling([*runs.values()], k)
        except (KeyError, ValueError) as error:  # of units that are damaged, or make no curve
            unknown.append(f"At which step coupling is highest is not known: {error}.")
            continue
        if coupling.size:
            at = int(coupling.values.argmax())
            value, step = coupling.values[at].item(), coupling["step"].values[at].item()
            found[name] = Peak(value, step, at < coupling.size - 1)
    return found, unknown


def _mean_coupling(runs: Sequence[_Result], k: int) -> xr.DataArray:
    """Return the coupling by the first definition at the steps that all runs have, (step,), a mean over runs."""
    first, *others = (run.couplings(run.steps) for run in runs)
    mean = sum(others, first) / len(runs)
    names = [f"{name}_coupling" for name in SHOWN]
    name = names[0] if names[0] in mean else names[1]
    return mean[name].sel(k=k, pairs="mean_offdiag").dropna("step")


def _of_change(units: Sequence[xr.Dataset], cells: Sequence[Cells], k: int | None) -> str:
    """Say by each definition whether coupling rises from one step to another, in a t test over pairs of blocks and prompts."""
    said, verbs = [], set()
    for name in (name for name in SHOWN if (name, "all pairs") in cells[1]):
        before, after = (of[name, "all pairs"] for of in cells)
        _, _, change, low, high, over, answer = after.row_of_difference(before, paired=True)
        if answer == UNDEFINED_VALUE:
            continue
        pairs = [independent_pairs(_departure(unit, k, name), unit) for unit in units]
        by_pair, by_prompt = pairs[1] - pairs[0], after.by_prompt - before.by_prompt
        rises, falls = (
            coupled(sign * by_pair[None], sign * by_prompt[None], after.clusters)[0]
            for sign in (1, -1)
        )
        verb = "rises" if rises else "falls" if falls else "goes"
        why = "; no change beyond chance over pairs of blocks" if verb == "goes" else ""
        # A change needs no level.
        if after.answer.startswith("no test") and after.answer != NO_LEVEL:
            verb, why = "goes", f", {after.answer}"
        verbs.add(verb)
        interval = f" [{low:z.3f}, {high:z.3f}] over {over}, these weights alone" if over else ""
        said.append(
            f"{BY_DEFINITION[name]} {verb} from {before.middle:z.3f} to {after.middle:z.3f} "
            f"(by {change:z.3f}{interval}{why})"
        )
    sentence = f"{'; '.join(said)}."
    if {"rises", "falls"} <= verbs:
        sentence += " The definitions disagree: report both, and look at the pairs of blocks."
    return capitalised(sentence) if said else ""


def _over_runs(recipe: str, units: Mapping[str, xr.Dataset], k: int | None) -> Cells:
    """Return the means of the values of runs, with what their intervals over runs need.

    Raises:
        UsageError: if the runs were not measured alike, or two have the same numbers, which would make intervals too narrow.
    """
    if differences := describe_differences(units, OF_RECIPE):
        raise UsageError(
            f"the runs of {recipe} differ in {'; '.join(differences)}; give runs of one recipe, measured alike"
        )
    runs = {run: _cells(unit, k) for run, unit in units.items()}
    numbers = {run: str([cell.value for cell in cells.values()]) for run, cells in runs.items()}
    for run, same in find_repeats(numbers).items():
        raise UsageError(
            f"the runs {same} and {run} of {recipe} have the same numbers; give each once, and train from different seeds"
        )
    means = {}
    for at in dict.fromkeys(chain(*runs.values())):
        of_runs = [cells[at] for cells in runs.values() if at in cells]
        value, null_level = np.mean([[cell.value, cell.null_level] for cell in of_runs], 0)
        middles = np.array([cell.middle for cell in of_runs])
        means[at] = Cell(value, null_level, middles, None, f"{len(of_runs)} run")
    return means


def _side_by_side(recipes: Recipes, runs: Sequence[_Result], k: int | None) -> Summary:
    """Return the last steps of several results, or means over the runs of recipes, and the differences of each from the first."""
    over_runs = len(runs) > len(recipes)
    units = {
        name: {run: of.curve(of.steps[-1:]).isel(step=0) for run, of in of_recipe.items()}
        for name, of_recipe in recipes.items()
    }
    every = [unit for of_recipe in units.values() for unit in of_recipe.values()]
    ks = list(dict.fromkeys(_chosen(unit, k) for unit in every))
    if len(ks) > 1:
        listed = ", ".join(map(str, ks))
        raise UsageError(
            f"the smallest K of the results differ ({listed}); choose one that all have: summary(..., k=10)"
        )
    (k,) = ks
    # Notes are of one run of each recipe, since its runs have the same blocks and conventions.
    of_each = {name: next(iter(of_recipe.values())) for name, of_recipe in units.items()}
    columns = {
        name: _over_runs(name, units[name], k) if over_runs else _cells(unit, k)
        for name, unit in of_each.items()
    }
    rows = _rows(columns)
    first, *others = of_each
    for name in others:
        # Parts of one result have its hash, and other prompts.
        prompts, of_first = (
            (attribute_values(of, "inputs_sha256"), of.sizes["prompt"])
            for of in (of_each[name], of_each[first])
        )
        paired = not over_runs and prompts == of_first
        rows[f"{name} − {first}"] = {
            at: cell.row_of_difference(columns[first][at], paired)
            for at, cell in columns[name].items()
            if at in columns[first]
        }
    last = dict.fromkeys(f"{run.steps[-1]:,}" for run in runs)
    # 0 is also the step of a result that states none.
    if len(last) == 1 and runs[0].steps[-1]:
        title = f"{', '.join(units)}, at step {', '.join(last)}"
    else:
        title = f"{', '.join(units)}, the last step of each"
        title += f" ({', '.join(last)})" if "0" not in last else ""
    title += "" if k is None else f"; K = {k}"
    notes = [*_of_rows(every, rows, k), *[OF_WEIGHTS] * (not over_runs)]
    equal = {name: describe_blocks(unit) for name, unit in of_each.items() if k is not None}
    notes += [f"{name}: {sentence}" for name, sentences in equal.items() for sentence in sentences]
    notes += [
        f"The results differ in {difference}." for difference in describe_differences(of_each)
    ]
    highest, unknown = _highest(recipes, k)
    notes += unknown
    finding = ""
    if earlier := [peak.step for peak in highest.values() if peak.earlier]:
        listed = [
            f"{name} {peak.value:z.3f} at step {peak.step:,}" for name, peak in highest.items()
        ]
        finding = f"The highest coupling: {join_names(listed)}."
        if shared := [step for step in earlier if all(step in run.steps for run in runs)]:
            finding += f" tracker.summary(..., step={shared[0]}) compares there."
    return _table(rows, "result", title, notes, finding)


Rows = dict[str, dict[tuple[str, str], Row]]


def _rows(columns: Mapping[str, Cells]) -> Rows:
    return {
        label: {at: cell.row() for at, cell in cells.items()} for label, cells in columns.items()
    }


def _table(rows: Rows, label: str, title: str, notes: list[str], finding: str = "") -> Summary:
    """Return the table: what is measured, then where; one row of each without a label."""
    order = list(dict.fromkeys(at for cells in rows.values() for at in cells))
    # Of each measure the steps or results stand below each other, to be compared.
    index, values = [], []
    for at in order:
        for name, cells in rows.items():
            if at in cells:
                index.append((*at, name) if label else at)
                values.append(cells[at])
    names = ["measure", "of", *([label] if label else [])]
    # Categories in their order of appearance make it a sorted index, of which a part can be selected.
    levels = [
        pd.Categorical(level, categories=list(dict.fromkeys(level)))
        for level in zip(*index, strict=True)
    ]
    table = Summary(
        values, index=pd.MultiIndex.from_arrays(levels, names=names), columns=list(COLUMNS)
    )
    table.attrs |= {"title": title, "notes": notes, "finding": finding}
    return table


def kind_of_inputs(unit: xr.Dataset) -> str:
    """Return what a result's inputs are called: "prompt" if they are texts, else "sample"."""
    return "prompt" if any(map(str, unit["prompt_text"].values)) else "sample"


def _title(unit: xr.Dataset, k: int | None) -> str:
    inputs = counted(unit.sizes["prompt"], kind_of_inputs(unit))
    tokens = at_tokens(unit.attrs["tokens"])
    mean = "mean over " * tokens.startswith(("tokens", "all"))
    of_coupling = "" if k is None else f", K = {k}, {mean}{tokens}"
    return f"{short_name(unit)}: {inputs}{of_coupling}"


def _of_rows(units: Sequence[xr.Dataset], rows: Rows, k: int | None) -> Iterator[str]:
    """Say what intervals and answers are of, and where untrained blocks are not at the null level."""
    listed = [row for cells in rows.values() for row in cells.values()]
    overs, kind = {str(over) for *_, over, _ in listed} - {""}, kind_of_inputs(units[0])
    quantity = "of the coupling, or of the value where there is no null level"
    if not overs:
        yield f"There are no intervals, since they are over independent {kind}s with values: measure several."
    elif any(over.endswith(" runs") for over in overs):
        yield (
            f"low and high: 95 % interval {quantity}, over runs: of their mean, and Welch's of the difference of two means. It "
            f"holds for these {kind}s alone. A recipe of one run has none, and of two a wide one: train three or more."
        )
    else:
        in_clusters = any("clusters" in over for over in overs)
        clusters = f" Equal {kind}s, and those of one source, are a cluster." if in_clusters else ""
        yield (
            f"low and high: 95 % interval {quantity}, over what is named. It holds for these weights alone.{clusters}"
        )
    if k is None:
        return
    if all(unit.sizes["layer"] == 1 for unit in units):
        yield "One block makes no pairs, so there is no coupling of blocks."
        return
    if any(str(answer).endswith(ABOVE) for *_, answer in listed):
        rest = ""
        if any(map(has_alike_weights, units)):
            rest = " Blocks with alike weights pass it untrained."
        elif any(map(has_one_module, units)):
            rest = " All pairs of the same two modules are one pair of it."
        else:
            rest = " One in 40 untrained models whose blocks have independent weights passes it by chance."
        prompts = f" and the {kind}s" if overs else ""
        yield f"answer: a t test over the pairs of blocks{prompts}.{rest}"
        # Both are printed, and a reader would take them for a contradiction.
        if any(answer == f"not {ABOVE}" and float(low) > 0 for *_, low, _, _, answer in listed):
            yield (
                "Where low is above 0 and the answer is not, pairs of blocks differ too much for their number: the interval is "
                "of these blocks, and the answer of any blocks like them."
            )
