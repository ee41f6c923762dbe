"""Which metrics of a row loggers receive: the `log` of a training run, a walk and a replay."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast, get_args

from tracker.analysis.statistics import noise_label
from tracker.common.errors import UsageError
from tracker.loggers.protocol import Choice, Log, Row
from tracker.measures.declaration import Measure
from tracker.measures.registry import MEASURES, UNDEFINED_COUNT
from tracker.measures.states import NOISE

SOMETIMES = (UNDEFINED_COUNT, "score/")  # begin the names of metrics that some steps lack


def checked(log: Log) -> Log:
    """Return the choice of metrics to log.

    Raises:
        UsageError: if it is none of `Choice`, and no names.
    """
    if isinstance(log, str) and log in get_args(Choice):
        return cast(Choice, log)
    if isinstance(log, str) or not log or not all(isinstance(name, str) for name in log):
        raise UsageError(
            f"log={log!r}; choose 'headline' (about a dozen numbers), 'workspace' (also what the saved workspace of W&B draws), "
            "'all', or a list of metrics such as ['coupling/mean_offdiag', 'trajectory/*']"
        )
    return tuple(log)


def parsed(text: str) -> Log:
    """Return the choice that a command line states, names with commas between them.

    Raises:
        UsageError: for a word that is neither a choice nor the name of a metric.
    """
    if text in get_args(Choice):
        return cast(Choice, text)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if "/" not in name and "*" not in name]:
        raise UsageError(
            f"--log {unknown[0] or text!r}; choose from {', '.join(get_args(Choice))}, or give names of metrics with commas "
            "between them, such as coupling/mean_offdiag,trajectory/*"
        )
    return checked(names)


def chosen(row: Row, log: Log, others: Sequence[str] = ()) -> Row:
    """Return a row with the metrics to log; what is named is shown.

    Args:
        others: names of metrics that are logged apart from rows.

    Raises:
        UsageError: if a name in `log` is no metric.
    """
    if log == "all":
        return row
    if isinstance(log, str):
        names = row.headline if log == "headline" else (*row.headline, *drawn(row.scalars.keys() - {*row.headline}))
        return replace(row, scalars={name: row.scalars[name] for name in names})
    for pattern in log:
        known = any(fnmatchcase(name, pattern) for name in (*row.scalars, *others))
        if not known and not pattern.startswith(SOMETIMES):
            raise UsageError(
                f"log={list(log)!r}: no metric is named {pattern!r}; log='all' logs all, and "
                "tracker.statistics.scalars(unit) returns them"
            )
    names = tuple(name for name in row.scalars if any(fnmatchcase(name, pattern) for pattern in log))
    return replace(row, scalars={name: row.scalars[name] for name in names}, headline=names)


def drawn(names: Iterable[str]) -> list[str]:
    """Return those of the names of metrics that the panels of measures in the saved workspace show, for any K."""
    names = sorted(names)
    ks = sorted({int(match[1]) for match in (re.search(r"/k(\d+)(?:/|$)", name) for name in names) if match})
    panels = {metric for measure in MEASURES if measure.dashboard for metric in _metrics(measure, ks)}
    return [name for name in names if name in panels]


def _metrics(measure: Measure, ks: Sequence[int]) -> list[str]:
    return [name for k in ks for name in metrics_for_k(measure, k)] if measure.null else metrics_over_positions(measure)


def metrics_for_k(measure: Measure, k: int) -> list[str]:
    """Return the metrics of the panel of a measure with a null level, for one K."""
    pairs = "/mean_offdiag" if measure.curve == "pairs" else ""
    return [f"{metric}/k{k}{pairs}" for metric in (measure.metric, f"{measure.metric}_null")]


def metrics_over_positions(measure: Measure) -> list[str]:
    """Return the metrics of the panel of a measure without a null level."""
    if measure.curve == "last mean":
        return [f"{measure.metric}/{noise_label(level)}" for level in NOISE]
    return [f"{measure.metric}/{statistic}" for statistic in ("median", "q25", "q75")]
