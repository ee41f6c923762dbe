"""A table of results: how far blocks are coupled and how straight and exponential paths are, with intervals.

    coupling     null level minus mis-coupling, of the blocks alone: 0 for unrelated blocks
    all pairs    mean over pairs of different blocks
    neighbours   mean over pairs of blocks that follow each other

A store is summarised at its first and last step and at the one where the coupling of all pairs is largest; several results
stand side by side, with the difference of each from the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.curves import curves, sources
from tracker.analysis.doubts import describe_differences, differing_conventions, doubts
from tracker.analysis.null_levels import level_variable
from tracker.analysis.onset import FEWEST_PAIRS, coupled
from tracker.analysis.pairs import (
    describe_equal_blocks,
    has_alike_weights,
    has_one_module,
    independent_pairs,
    is_one_module,
)
from tracker.analysis.reduction import IN_SUMMARY, PERCENTILES, reduced
from tracker.analysis.regression import CONFIDENCE, clustered_mean, t_margin
from tracker.analysis.selections import LABELLED, opened, with_steps
from tracker.common.errors import UsageError
from tracker.common.text import at_tokens, capitalised, counted, escaped
from tracker.measures.declaration import POSITION
from tracker.measures.registry import BY_NAME
from tracker.store import Result, Store, by_name, require_steps, short_name

# The first that was measured chooses the most coupled step
SHOWN = ("miscoupling", "offdiag_normalized")
BY_DEFINITION = {"miscoupling": "coupling", "offdiag_normalized": "coupling by eq. 14"}
PAIRS = {"mean_offdiag": "all pairs", "mean_adjacent": "neighbours"}
COLUMNS = ("value", "null_level", "coupling", "low", "high", "over", "answer")
ABOVE, UNDEFINED_VALUE = "above 0", "undefined"


class Summary(pd.DataFrame):
    """A table that prints with a title above it and what to know about it below.

    Columns: `value`, a mean over prompts, or the median over the tokens of all; `null_level` and `coupling`, where a measure has
    a null level; `low` and `high`, the 95 % interval of `coupling`, or of `value` where there is no null level, and `over`,
    what it is over; `answer`, whether the coupling of all pairs is above 0, in a test over pairs of blocks and prompts, or
    why that is not tested. Numbers are NaN, and words "", where there is none. The title is `attrs["title"]`, and the
    sentences below are `attrs["notes"]`.
    """

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame  # a part of the table is a plain DataFrame

    def __repr__(self) -> str:
        """Return the title, the table and the notes."""
        table = self.to_string(float_format=lambda value: f"{value:z.3f}", na_rep="")
        lines = [self.attrs["title"], "", table, "", *self.attrs["notes"], self.attrs["finding"]]
        return escaped("\n".join(lines).rstrip("\n"))

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.attrs["notes"])
        said = f"{self.attrs['title']}. {self.attrs['finding']}"
        return f"<p>{escape(said)}</p>{self.html_table()}<ul>{notes}</ul>"

    def html_table(self) -> str:
        """Return the table as HTML, without title and notes."""
        return self.to_html(float_format=lambda value: f"{value:z.3f}", na_rep="", border=0)


def summary(
    results: Result | Mapping[str, Result] | Sequence[Result], k: int | None = None
) -> Summary:
    """Return how far blocks are coupled beyond chance, how straight paths are and how evenly norms grow, as a table.

    Args:
        results: a Dataset of `measure` or `open_results`, or a part of one; a store or its directory; or several of these, by
            name or as a list, of which the last steps are compared.
        k: number of singular vectors; the smallest measured by default.

    Returns:
        A DataFrame with a row for each measure, choice of pairs, and step or result; `Summary` describes its columns. Where
        results have the same prompts, the interval of their difference is over the differences of the prompts.

    Raises:
        FileNotFoundError: if a directory holds no results.
        UsageError: for a K that was not measured, for results without mis-couplings and without paths, and for a part of results
            without what the table needs.
    """
    return _of_results({name: _result(result, k) for name, result in by_name(results).items()})


def summary_of_reduced(results: Mapping[str, xr.Dataset]) -> Summary:
    """Return the summary of one result or several along `step`, each as `reduction.reduced` returns it."""
    return _of_results({name: _result_of_reduced(curve) for name, curve in results.items()})


@dataclass(frozen=True)
class _Result:
    """A result: its coupling of all pairs by step, ascending, the K of it, and what returns steps of it, `reduced`.

    The coupling is 0 without mis-couplings.
    """

    coupling: Mapping[int, float]
    k: int | None
    curve: Callable[[list[int]], xr.Dataset]
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The measured steps."""
        return list(self.coupling)

    @property
    def best(self) -> int:
        """The step of the largest coupling, which is not undefined."""
        return max(self.coupling, key=lambda step: np.nan_to_num(self.coupling[step], nan=-np.inf))


def _result_of_reduced(curve: xr.Dataset) -> _Result:
    k, name = _chosen(curve, None)
    return _Result(_coupling(curve, k, name), k, lambda steps: curve.sel(step=steps))


def _result(result: Result, k: int | None) -> _Result:
    """Read of each step what tells its coupling, and nothing more."""
    if isinstance(result, xr.Dataset):
        ds = with_steps(opened(result), 0)
        k, name = _chosen(ds, k)
        points = curves(ds, [name]) if name else ds
        return _Result(_coupling(points, k, name), k, lambda steps: reduced(ds.sel(step=steps)))
    store = Store(result)
    steps = require_steps(store)
    k, name = _chosen(store.read(steps[-1]), k)
    coupling = dict.fromkeys(steps, 0.0)
    if name:
        read = store.curve(steps, {name, level_variable(name), "prompt_text", *LABELLED})
        coupling = _coupling(curves(read, [name]), k, name)
    return _Result(coupling, k, lambda steps: reduced(store.curve(steps)), store.skipped())


def _coupling(points: xr.Dataset, k: int | None, name: str) -> dict[int, float]:
    """Return by step the coupling of all pairs, from the points of `curves`; 0 without mis-couplings."""
    steps = points["step"].values.tolist()
    if not name:
        return dict.fromkeys(steps, 0.0)
    values = points[f"{name}_coupling"].sel(k=k, pairs="mean_offdiag").values.tolist()
    return dict(zip(steps, values, strict=True))


def _chosen(ds: xr.Dataset, k: int | None) -> tuple[int | None, str]:
    """Return K and the first of `SHOWN` that was measured; None and "" without mis-couplings.

    Raises:
        UsageError: if that K was not measured, or there is nothing to summarise.
    """
    name = next((name for name in SHOWN if name in ds or f"{name}_matrix" in ds), "")
    if not name:
        if not any(path in ds for path in IN_SUMMARY):
            raise UsageError(
                "the results hold no mis-couplings and no paths; measure 'coupling' or 'trajectory'"
            )
        return None, ""
    known = [int(other) for other in np.atleast_1d(ds["k"].values)]
    if k is not None and k not in known:
        raise UsageError(f"K = {k} was not measured; choose from {', '.join(map(str, known))}")
    return k or min(known), name


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
        by_prompt: a number of each prompt, in clusters; NaN where there is no interval. They are couplings, of which the value is
            the mean, or `_below` of `reduced`, for a median.
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

    def row(self) -> Row:
        """Return the row of the table."""
        _, error, df = clustered_mean(self.by_prompt, self.clusters)
        margin = float(t_margin(error, df))
        if self.percentiles is None:
            coupling = self.null_level - self.value
            ends = [coupling - margin, coupling + margin]
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
            _, errors, dfs = np.array(
                [clustered_mean(of.linear(), of.clusters) for of in (self, other)]
            ).T
            variances = errors**2
            # Satterthwaite's degrees of freedom, of the sum of both variances
            parts = (errors**4 / dfs).sum()
            error, df = np.hypot(*errors), variances.sum() ** 2 / (parts if parts > 0 else 1)
        value, null_level = self.value - other.value, self.null_level - other.null_level
        coupling = null_level - value
        # Medians of paths have no null level.
        middle = value if np.isnan(coupling) else coupling
        margin = float(t_margin(error, df))
        ends = [middle - margin, middle + margin]
        over = " and ".join(dict.fromkeys([self.over] if paired else [self.over, other.over]))
        return _row(value, null_level, ends, over, "")


Cells = dict[tuple[str, str], Cell]  # by measure and of what


def _cells(unit: xr.Dataset, k: int | None, tests: int = 1) -> Cells:
    """Return the values of a unit.

    Args:
        tests: the number of steps of which this one was chosen for its coupling.
    """
    clusters, kind, cells = sources(unit), kind_of_inputs(unit), {}
    # A block alone has matrices of one entry, which is no pair.
    with_pairs = [name for name in SHOWN if f"{name}_matrix" in unit and unit.sizes["layer"] > 1]
    for name in with_pairs:
        at = unit.sel(k=k)
        for pairs, words in PAIRS.items():
            value, null = (float(at[part].sel(pairs=pairs)) for part in (name, f"{name}_null"))
            answer = _answer(unit, k, name, tests) if pairs == "mean_offdiag" else ""
            by_prompt = at[f"{name}_coupling_by_prompt"].sel(pairs=pairs).values
            cells[name, words] = Cell(value, null, by_prompt, clusters, kind, answer=answer)
    for name in (name for name in IN_SUMMARY if f"{name}_below" in unit):
        value, below = float(unit[name].sel(statistic="median")), unit[f"{name}_below"].values
        percentiles = unit[f"{name}_percentiles"].values
        of = "tokens" if BY_NAME[name].dims == POSITION else "tokens and blocks"
        cells[name, f"median of {of}"] = Cell(value, np.nan, below, clusters, kind, percentiles)
    return cells


def _answer(unit: xr.Dataset, k: int | None, name: str, tests: int) -> str:
    """Say whether the coupling is above 0, or why that is not tested."""
    # Whatever their weights are, one module is coupled with itself.
    if is_one_module(unit):
        return "no test: the blocks are one module"
    pairs = independent_pairs(_departure(unit, k, name), unit)
    if not np.isfinite(pairs).any():
        return f"no test: {UNDEFINED_VALUE}"
    if (count := np.isfinite(pairs).sum()) < FEWEST_PAIRS:
        return f"no test: {counted(int(count), 'pair')} of blocks"
    prompts = unit[f"{name}_coupling_by_prompt"].sel(k=k, pairs="mean_offdiag").values
    # One-sided, so half of what intervals leave out, and Bonferroni's share of it
    above = coupled(pairs[None], prompts[None], sources(unit), (1 - CONFIDENCE) / 2 / tests)
    return ABOVE if above[0] else f"not {ABOVE}"


def _departure(unit: xr.Dataset, k: int | None, name: str) -> xr.DataArray:
    """Return null level minus mis-coupling, (layer, layer_other)."""
    return (unit[f"{name}_level"] - unit[f"{name}_matrix"]).sel(k=k)


def _of_results(results: Mapping[str, _Result]) -> Summary:
    return _side_by_side(results) if len(results) > 1 else _of_steps(*results.values())


def _of_steps(result: _Result) -> Summary:
    steps, k = result.steps, result.k
    # One reading of a store for the three steps, of which some may be the same
    curve = result.curve(sorted({steps[0], result.best, steps[-1]}))
    units = {step: curve.sel(step=step) for step in curve["step"].values.tolist()}
    several = len(units) > 1
    # The largest of all steps passes a test by chance more often; both ends are shown whatever their coupling is.
    tests = {result.best: len(steps), steps[0]: 1, steps[-1]: 1}
    columns = {
        f"{step:,}" if several else "": _cells(unit, k, tests[step]) for step, unit in units.items()
    }
    rows = _rows(columns)
    title = _title(units[steps[-1]], k)
    if several:
        ends = ["the first", *["the most coupled"] * (len(units) > 2), "the last"]
        title += f"; {', '.join(ends[:-1])} and {ends[-1]} of {counted(len(steps), 'step')}"
    notes = [
        _of_intervals([units[steps[-1]]]),
        *_of_coupling(list(units.values()), columns, k),
        *doubts(curve, result.skipped),
    ]
    finding = ""
    if several:
        first_and_last = steps[0], steps[-1]
        cells = [columns[f"{step:,}"] for step in first_and_last]
        finding = _of_change([units[step] for step in first_and_last], cells, k)
    return _table(rows, "step" if several else "", title, notes, finding)


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
        verb = "rises" if rises else "falls" if falls else "does not change beyond chance,"
        why = f", {after.answer}" if after.answer.startswith("no test") else ""
        verbs.add(verb)
        ends = [cell.null_level - cell.value for cell in (before, after)]
        interval = f" [{low:z.3f}, {high:z.3f}] over {over}, these weights alone" if over else ""
        said.append(
            f"{BY_DEFINITION[name]} {'goes' if why else verb} from {ends[0]:z.3f} to {ends[1]:z.3f} "
            f"(by {change:z.3f}{interval}{why})"
        )
    sentence = f"{'; '.join(said)}."
    if {"rises", "falls"} <= verbs:
        sentence += " The definitions disagree: report both, and look at the pairs of blocks."
    return capitalised(sentence) if said else ""


def _side_by_side(results: Mapping[str, _Result]) -> Summary:
    """Return the last steps of several results, and the differences of each from the first."""
    ks = {name: result.k for name, result in results.items()}
    if len(set(ks.values())) > 1:
        listed = ", ".join(f"{name}: {k}" for name, k in ks.items())
        raise UsageError(
            f"the smallest K of the results differ ({listed}); choose one that all have: summary(..., k=10)"
        )
    k = next(iter(ks.values()))
    units = {name: result.curve(result.steps[-1:]).isel(step=0) for name, result in results.items()}
    first, *others = units
    columns = {name: _cells(unit, k) for name, unit in units.items()}
    rows = _rows(columns)
    differ = differing_conventions(units)
    for name in others:
        # Parts of one result have its hash, and other prompts.
        paired = (
            "inputs_sha256" not in differ
            and units[name].sizes["prompt"] == units[first].sizes["prompt"]
        )
        rows[f"{name} − {first}"] = {
            at: cell.row_of_difference(columns[first][at], paired)
            for at, cell in columns[name].items()
            if at in columns[first]
        }
    title = f"{', '.join(units)}, the last step of each"
    if all(len(result.steps) > 1 for result in results.values()):
        title += f" ({', '.join(f'{result.steps[-1]:,}' for result in results.values())})"
    title += "" if k is None else f"; K = {k}"
    notes = [
        _of_intervals(list(units.values())),
        *_of_coupling(list(units.values()), columns, k),
    ]
    equal = {name: describe_equal_blocks(unit) for name, unit in units.items() if k is not None}
    notes += [f"{name}: {sentence}" for name, sentences in equal.items() for sentence in sentences]
    notes += [f"The results differ in {difference}." for difference in describe_differences(units)]
    return _table(rows, "result", title, notes)


def _rows(columns: Mapping[str, Cells]) -> dict[str, dict[tuple[str, str], Row]]:
    return {
        label: {at: cell.row() for at, cell in cells.items()} for label, cells in columns.items()
    }


def _table(
    rows: Mapping[str, Mapping[tuple[str, str], Row]],
    label: str,
    title: str,
    notes: list[str],
    finding: str = "",
) -> Summary:
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
    of_coupling = "" if k is None else f", K = {k}, {at_tokens(unit.attrs['tokens'])}"
    return f"{short_name(unit)}: {inputs}{of_coupling}"


def _independent(unit: xr.Dataset) -> int:
    """Return the number of independent prompts."""
    clusters = sources(unit)
    return unit.sizes["prompt"] if clusters is None else len(set(clusters))


def _of_intervals(units: Sequence[xr.Dataset]) -> str:
    kind = kind_of_inputs(units[0])
    if not any(_independent(unit) > 1 for unit in units):
        return f"There are no intervals, since they are over independent {kind}s: measure several."
    in_clusters = any(sources(unit) is not None for unit in units)
    clusters = f" Equal {kind}s, and those of one source, are a cluster." if in_clusters else ""
    quantity = "of the coupling, or of the value where there is no null level"
    return f"low and high: 95 % interval {quantity}, over what is named. It holds for these weights alone.{clusters}"


def _of_coupling(
    units: Sequence[xr.Dataset], columns: Mapping[str, Cells], k: int | None
) -> Iterator[str]:
    """Say what the answers are of, and where untrained blocks are not at the null level."""
    if k is None:
        return
    if all(unit.sizes["layer"] == 1 for unit in units):
        yield "One block makes no pairs, so there is no coupling of blocks."
        return
    answers = [cell.answer for cells in columns.values() for cell in cells.values()]
    post_norm = any(unit.attrs.get("post_norm") for unit in units)
    if any(answer.endswith(ABOVE) for answer in answers):
        rest = ""
        if any(map(has_alike_weights, units)):
            rest = " Blocks with alike weights pass it untrained."
        elif any(map(has_one_module, units)):
            rest = " All pairs of the same two modules are one pair of it."
        elif not post_norm:
            rest = " One in 40 untrained models whose blocks have independent weights passes it by chance."
        prompts = (
            f" and the {kind_of_inputs(units[0])}s"
            if any(_independent(unit) > 1 for unit in units)
            else ""
        )
        yield f"answer: a t test over the pairs of blocks{prompts}.{rest}"
        # Both are printed, and a reader would take them for a contradiction.
        rows = [cell.row() for cells in columns.values() for cell in cells.values()]
        if any(answer == f"not {ABOVE}" and float(low) > 0 for *_, low, _, _, answer in rows):
            yield (
                "Where low is above 0 and the answer is not, pairs of blocks differ too much for their number: the interval is "
                "of these blocks, and the answer of any blocks like them."
            )
    if post_norm:
        yield (
            "The state enters the blocks through norms alone, so that untrained blocks of this model are not at the null level "
            "either."
        )
