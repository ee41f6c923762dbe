"""Benchmark scores that belong to a checkpoint: joined exactly on model and step, never interpolated.

`data/pythia_evals.csv`: the Pythia suite's own results over training (EleutherAI/pythia, evals/pythia-v1, commit
a19eecb, Apache-2.0). Of it the zero-shot accuracies are used. Checkpoints that bring a `scores.json` (nano) use that.
"""

import csv
import json
from functools import cache
from pathlib import Path

from checkpoints.hub import CheckpointError

PYTHIA = Path(__file__).parent / "data" / "pythia_evals.csv"
SPELLED = {"pythia-1b": "pythia-1b-bf16"}
MEAN = "mean zero-shot accuracy"


def published(suite: str) -> dict[int, dict[str, float]]:
    """Zero-shot accuracy by step and task of a Pythia model, with the mean where all tasks are there; else nothing."""
    scores: dict[int, dict[str, float]] = {}
    for model, step, task, accuracy in _table():
        if model == SPELLED.get(suite, suite):
            scores.setdefault(step, {})[task] = accuracy
    tasks = set().union(*scores.values()) if scores else set()
    for of_step in scores.values():
        if of_step.keys() == tasks:
            of_step[MEAN] = sum(of_step.values()) / len(tasks)
    return scores


def brought(directory: Path) -> dict[str, float]:
    """The scores that a checkpoint's own directory holds."""
    file = directory / "scores.json"
    if not file.is_file():
        return {}
    try:
        return {str(task): float(score) for task, score in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a table of scores ({error}); mend or remove it") from error


@cache
def _table() -> list[tuple[str, int, str, float]]:
    with open(PYTHIA, newline="") as file:
        return [
            (row["model"], int(row["step"]), row["task"], float(row["value"]))
            for row in csv.DictReader(file)
            if row["setting"] == "zero-shot" and row["metric"] == "acc"
        ]
