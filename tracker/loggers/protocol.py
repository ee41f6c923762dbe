"""The protocol of experiment loggers: one `Row` per step, reduced from a measured Dataset.

The walker, the replay command and the training callback call `images(row)`, then `log(row)`, for each measured step. A function
of the caller is a logger too (`FunctionLogger`). `select_metrics` reduces a row to the `log` of a run.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from functools import cache
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import xarray as xr

from tracker.analysis.curves import SAMPLES, headlines, scalars_by_step
from tracker.analysis.variables import in_float64, labelled, mean
from tracker.common.errors import UsageError
from tracker.common.values import LOG
from tracker.measures.registry import BY_NAME, MEASURES, UNDEFINED_COUNT
from tracker.store import Store

SOMETIMES = (UNDEFINED_COUNT, "score/")  # begin the names of metrics that some steps lack
# Which metrics are logged: the headline numbers; also the curves of the main measures; all; or those named.
LogChoice = Literal["headline", "main", "all"]
Log = LogChoice | Sequence[str]


@dataclass(frozen=True)
class Row:
    """The content of one step in a log: a few kilobytes, whatever the number of prompts."""

    step: int
    scalars: Mapping[str, float]  # curve points by metric name
    # Whether it is suspect, tokens seen
    checkpoint: Mapping[str, int] = field(default_factory=dict)
    # (k, layer, layer_other), the mean over prompts and tokens
    miscoupling: xr.DataArray | None = None
    headline: tuple[str, ...] = ()  # the names of the scalars that are shown by default

    @classmethod
    def from_unit(cls, unit: xr.Dataset) -> "Row":
        """Reduce a unit to the content of a log."""
        return cls.from_curve(unit.expand_dims("step"))[0]

    @classmethod
    def from_curve(cls, curve: xr.Dataset) -> "list[Row]":
        """Reduce units along `step`, each as `from_unit`, in a fraction of the time."""
        # Without the variables, of which each selection of a step would take time
        coordinates = curve.coords.to_dataset()
        means = None
        if "miscoupling" in curve:
            of_pairs = mean(in_float64(curve, "miscoupling"), SAMPLES)
            means = labelled(of_pairs, curve).rename("miscoupling")
        rows = []
        for i, values in enumerate(scalars_by_step(curve)):
            unit, checkpoint = coordinates.isel(step=i), {}
            if "suspect" in unit.coords:
                checkpoint["training/suspect"] = int(unit["suspect"].item() != "")
            if "tokens_seen" in unit.coords and np.isfinite(unit["tokens_seen"]):
                checkpoint["training/tokens"] = int(unit["tokens_seen"])
            miscoupling = None if means is None else means.isel(step=i)
            shown = (*headlines(unit), *(name for name in values if name.startswith("score/")))
            headline = tuple(name for name in shown if name in values)
            rows.append(cls(int(unit["step"]), values, checkpoint, miscoupling, headline))
        return rows

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Return all that is logged as numbers, each name after a prefix."""
        return {prefix + name: value for name, value in {**self.scalars, **self.checkpoint}.items()}

    def heatmaps(self) -> dict[str, np.ndarray]:
        """Draw the mis-coupling matrix of each K: metric names and pictures (height, width, 4)."""
        from tracker.figures.matrices import coupling_pictures

        means, measure = self.miscoupling, BY_NAME["miscoupling"]
        if means is None:
            return {}
        nulls = {
            k: self.scalars[measure.point("_null", k=k, pairs="mean_offdiag")]
            for k in means["k"].values.tolist()
        }
        return {
            f"miscoupling/heatmap/k{k}": picture
            for k, picture in coupling_pictures(means, nulls).items()
        }


class Logger(Protocol):
    """A place where the curves and pictures of a run are shown.

    A run that is resumed may send a step again; a logger that still has the step ignores it.
    """

    def images(self, row: Row) -> None:
        """Add the pictures of a step, before `log` completes the step. A logger without pictures does nothing."""

    def log(self, row: Row) -> None:
        """Log the scalars of a step."""

    def finish(self) -> str:
        """Close the log; return a line that states where it is, or "". What the caller has opened stays open."""
        return ""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is opened for.

    Args:
        store: the units that are logged.
        project, name: of the run in the logger.
        config: settings shown with the run, in addition to the store's.
        new: start a new run; otherwise continue the store's own run where the logger can.
        log: which metrics are logged.
    """

    store: Store
    project: str
    name: str
    config: Mapping[str, Any]
    new: bool = False
    log: Log = LOG


@dataclass(frozen=True)
class Opener:
    """A logger that can be used.

    Attributes:
        open: opens it for a run.
        where: says in a line where a run will be, and how to switch the logger off; "" for no line.
    """

    open: Callable[[LoggedRun], Logger]
    where: Callable[[LoggedRun], str]


LogTo = Callable[[dict[str, float], int], object]


@dataclass
class FunctionLogger(Logger):
    """Passes the scalars of each step to a function, `function(metrics, step)`.

    Args:
        prefix: put before the name of each metric, such as "val/".
    """

    function: LogTo
    prefix: str

    def log(self, row: Row) -> None:
        """Pass the scalars on."""
        self.function(row.numbers(self.prefix), row.step)


def check_log(log: Log) -> Log:
    """Return the choice of metrics to log.

    Raises:
        UsageError: if it is none of `LogChoice`, and no names.
    """
    if isinstance(log, str) and log in get_args(LogChoice):
        return cast(LogChoice, log)
    named = isinstance(log, Sequence) and not isinstance(log, str)
    if not named or not log or not all(isinstance(name, str) for name in log):
        raise UsageError(
            f"log={log!r}; choose 'headline' (about a dozen numbers), 'main' (also every K with its null level, and "
            "quartiles), 'all', or a list of metrics such as ['miscoupling/mean_offdiag', 'trajectory/*']"
        )
    return tuple(log)


def parse_log(text: str) -> Log:
    """Return the choice that a command line states, names with commas between them.

    Raises:
        UsageError: for a word that is neither a choice nor the name of a metric.
    """
    if text in get_args(LogChoice):
        return cast(LogChoice, text)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if "/" not in name and "*" not in name]:
        raise UsageError(
            f"--log {unknown[0] or text!r}; choose from {', '.join(get_args(LogChoice))}, or give names of metrics with commas "
            "between them, such as miscoupling/mean_offdiag,trajectory/*"
        )
    return check_log(names)


def select_metrics(row: Row, log: Log, others: Sequence[str] = ()) -> Row:
    """Return a row with the metrics to log; what is named is shown.

    Args:
        others: names of metrics that are logged apart from rows.

    Raises:
        UsageError: if a name in `log` is no metric.
    """
    if log == "all":
        return row
    if isinstance(log, str):
        names = row.headline
        if log == "main":
            rest = sorted(row.scalars.keys() - {*row.headline})
            names += tuple(name for name in rest if _of_main_measures().match(name))
        return replace(row, scalars={name: row.scalars[name] for name in names})
    for pattern in log:
        known = any(fnmatchcase(name, pattern) for name in (*row.scalars, *others))
        # What only some steps have is no mistake of a name.
        if not known and not pattern.startswith(SOMETIMES):
            candidates = [*row.scalars, *others, UNDEFINED_COUNT]
            similar = get_close_matches(pattern, candidates, n=3, cutoff=0)
            raise UsageError(
                f"log={list(log)!r}: no metric is named {pattern!r}; similar names are {', '.join(similar)}; log='all' logs all, "
                "and tracker.scalars(unit) returns them"
            )
    names = tuple(
        name for name in row.scalars if any(fnmatchcase(name, pattern) for pattern in log)
    )
    return replace(row, scalars={name: row.scalars[name] for name in names}, headline=names)


@cache
def _of_main_measures() -> re.Pattern[str]:
    """Return what matches the names of metrics of the main measures: for each K with null levels, else quartiles or levels."""
    patterns = []
    for measure in MEASURES:
        if measure.main and measure.null:
            labels = {"k": "*"} | ({"pairs": "mean_offdiag"} if measure.curve == "pairs" else {})
            patterns += [measure.point(part, **labels) for part in ("", "_null")]
        elif measure.main:
            patterns.append(f"{measure.metric}/*")
    return re.compile("|".join(map(translate, patterns)))
