"""Benchmark scores of checkpoints, joined exactly on model and step, never interpolated.

Scores come from three sources. `data/pythia_evals.csv` contains the Pythia suite's published zero-shot accuracies over training,
a row for each model and step: the metric `acc` of the nine tasks in the results of EleutherAI/pythia, evals/pythia-v1, commit
a19eecb (Apache-2.0), where pythia-1b is called pythia-1b-bf16. A checkpoint may include a `scores.json` (nano does). Users give
a table or results of lm-evaluation-harness.
"""

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints.suites import Suite
from tracker.common.errors import CheckpointError
from tracker.common.text import join_names

PYTHIA = Path(__file__).parent / "data" / "pythia_evals.csv"
MEAN = "mean zero-shot accuracy"
LONGEST = 200  # characters of a task's name

Scores = dict[int, dict[str, float]]  # by step and task
Entry = tuple[str, int, str, float]  # where it was read, step, task and value


def load_published(suite: Suite) -> Scores:
    """Return a Pythia model's zero-shot accuracies by step and task, with their mean.

    They are of the revisions of EleutherAI's repository that are called by their step. Other weights have none, whatever their
    name: the result is empty.
    """
    own = {(c.source, c.revision) for c in suite.checkpoints}
    with open(PYTHIA, newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (f"EleutherAI/{row.pop('model')}", f"step{row['step']}") in own
        ]
    scores = {
        int(row.pop("step")): {task: float(value) for task, value in row.items()} for row in rows
    }
    return {
        step: {**of_step, MEAN: sum(of_step.values()) / len(of_step)}
        for step, of_step in scores.items()
    }


def read_from_checkpoint(directory: Path) -> dict[str, float]:
    """Read the scores that are included in a checkpoint's directory."""
    file = directory / "scores.json"
    if not file.is_file():
        return {}
    try:
        scores = {str(task): float(score) for task, score in json.loads(file.read_text()).items()}
        for task in scores:
            _check_name(task)
        return scores
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a table of scores ({error}); fix or remove it"
        ) from error


def read_user_scores(path: Path, suite: Suite) -> Scores:
    """Read a user's scores of a suite from a .csv file, an lm-evaluation-harness .json file, or a directory of these.

    A table has a column `step` and either columns `task` and `value` or one column per task. An optional column `model`
    selects the rows of this suite. A harness result names the repository and revision that it belongs to.

    Raises:
        ValueError: if the file does not exist, has neither format, or has no score of this suite.
    """
    files = sorted(path.rglob("*.csv")) + sorted(path.rglob("*.json")) if path.is_dir() else [path]
    scores: Scores = {}
    seen: set[str] = set()
    where: dict[tuple[int, str], str] = {}
    for file in files:
        try:
            entries = (
                _from_json(file, suite, seen)
                if file.suffix == ".json"
                else _from_csv(file, suite, seen)
            )
        except (
            OSError,
            UnicodeDecodeError,
            json.JSONDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise ValueError(
                f"--scores {file} is neither a table with the columns step, task, value nor a result of "
                f"lm-evaluation-harness ({type(error).__name__}: {error})"
            ) from error
        for place, step, task, value in entries:
            _check_name(task)
            first = where.setdefault((step, task), place)
            if (kept := scores.setdefault(step, {}).setdefault(task, value)) != value:
                raise ValueError(
                    f"--scores: {task} at step {step} is {kept} in {first} and {value} in {place}; keep one of them"
                )
    if not scores:
        about = f"it is about {join_names(sorted(seen))}" if seen else "it contains no scores"
        raise ValueError(f"--scores {path} has no scores of {suite.name} ({suite.source}): {about}")
    return scores


def _check_name(task: str) -> None:
    """Refuse the names that a file of results can't hold, or the page can't show.

    Raises:
        ValueError: for a name with NUL or half of a surrogate pair, or of more than `LONGEST` characters.
    """
    if len(task) > LONGEST:  # all names take as much memory as the longest, for each checkpoint
        raise ValueError(
            f"a task's name has {len(task):,} characters, more than {LONGEST}: {task[:20]!r}…"
        )
    if "\0" in task or not task.isascii() and task.encode(errors="ignore").decode() != task:
        raise ValueError(f"the task {task!r} has a character that can't be stored; rename it")


def _from_csv(file: Path, suite: Suite, seen: set[str]) -> list[Entry]:
    with open(file, newline="", encoding="utf-8-sig") as handle:
        rows = list(csv.DictReader(handle))
    entries: list[Entry] = []
    for line, row in enumerate(rows, 2):
        model = row.pop("model", None)
        seen.add(model or file.name)
        if model is not None and model not in (suite.name, suite.source):
            continue
        try:
            step = int(row.pop("step"))
            by_task = {row["task"]: row["value"]} if {"task", "value"} <= row.keys() else row
            of_step = {task: float(value) for task, value in by_task.items() if value}
        except ValueError as error:
            raise ValueError(f"--scores, line {line} of {file}: {error}") from error
        place = f"line {line} of {file}"
        entries += [
            (place, step, task, value) for task, value in of_step.items() if not math.isnan(value)
        ]
    return entries


def _from_json(file: Path, suite: Suite, seen: set[str]) -> list[Entry]:
    results = json.loads(file.read_text())
    arguments = results.get("config", {}).get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
    model = arguments.get("pretrained") or results["model_name"]
    revision = arguments.get("revision", "main")
    seen.add(f"{model} at {revision}")
    steps = [
        c.step for c in suite.checkpoints if (c.source, c.revision or "main") == (model, revision)
    ]
    if not steps:
        return []
    parts = {task for group in results.get("group_subtasks", {}).values() for task in group}
    of_step = {
        task: _metric(values) for task, values in results["results"].items() if task not in parts
    }
    return [
        (str(file), steps[0], task, value) for task, value in of_step.items() if value is not None
    ]


def _metric(values: dict[str, Any]) -> float | None:
    """Return a task's accuracy, or its first metric if it has no accuracy."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        and "stderr" not in name
        and "," in name
        and math.isfinite(value)
    }
    accuracies = [value for name, value in numbers.items() if name.startswith("acc,")]
    return next(iter([*accuracies, *numbers.values()]), None)


def describe_coverage(scores: Scores, steps: Iterable[int], where: str) -> str:
    """Describe in a sentence how many checkpoints have scores."""
    steps = list(steps)
    count = sum(step in scores for step in steps)
    return f"scores: {count} of {len(steps)} checkpoints have benchmark results ({where}); the others get none"
