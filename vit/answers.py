"""The results of the analysis in words: which questions the trainings answer, and which measures are reliable."""

from typing import TYPE_CHECKING, Any

from tracker.common.text import capitalised, counted
from tracker.figures.drawing import definition
from vit.statistics import COUPLING, FEWEST_SEEDS, QUESTIONS, RELIABLE, at_chance, too_few

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

LABELS = {"drop_path": "stochastic depth", "accuracy": "test accuracy", "loss": "test loss"}


def cautions(grid: "xr.Dataset") -> list[str]:
    """State what keeps the accuracies from saying anything: that they are at chance, or equal."""
    accuracy, chance = grid["accuracy"].values, int(at_chance(grid).sum())
    lines = []
    if chance:
        rest = (
            "No question on accuracy or test loss is answered."
            if chance == len(accuracy)
            else "They count as others."
        )
        lines.append(
            f"Accuracy is not above chance in {chance} of {counted(len(accuracy), 'model')}. {rest}"
        )
    if len(accuracy) > 1 and accuracy.min() == accuracy.max():
        lines.append(f"Accuracy is {accuracy[0]:.4f} in all {len(accuracy)} models.")
    return lines


def unanswerable(decays: int, rates: int, seeds: int) -> list[str]:
    """State which questions a grid of this size can't answer, whatever the trainings give."""
    by_reason: dict[str, list[str]] = {}
    for question in QUESTIONS:
        if why := too_few(question.within, decays, rates, seeds):
            by_reason.setdefault(why, []).append(question.name.format(coupling=COUPLING))
    lines = [
        f"{capitalised('; '.join(names))}: not answered, because {why}."
        for why, names in by_reason.items()
    ]
    if seeds < FEWEST_SEEDS:
        lines.append("Reliability: unknown with one seed, so that a small r may be one of noise.")
    return lines


def more_seeds(seed: int) -> str:
    """Return the seeds of a grid of one seed and of two more, as an option.

    >>> more_seeds(0)
    '0,1,2'
    """
    return f"{seed},{seed + 1},{seed + 2}"


def answers(tests: "pd.DataFrame") -> list[str]:
    """State the result of each test.

    Args:
        tests: the rows of `vit.statistics.named_tests`.
    """
    return [_answer(row) for row in tests.to_dict("records")]


def _answer(row: dict[str, Any]) -> str:
    primary = row["role"] == "primary"
    question = capitalised(row["question"])
    test = f"{'primary test, ' if primary else ''}{row['token']}"
    if row["why"]:
        return f"{question}: not answered, because {row['why']} ({test})."
    p_value = row["p"] if primary else row["p_holm"]
    p = "p < 0.0001" if p_value < 0.0001 else f"p = {p_value:.2g}"
    if p_value < 0.05:
        answer = "yes" if (row["r"] > 0) == (row["expected"] == "+") else "the opposite"
    else:
        answer = (
            "could not be tested" if row["attainable"] < row["detectable"] else "not significantly"
        )
    corrected = "" if primary else ", corrected"
    return f"{question}: {answer}, r = {interval(row, 'r')}, {p}{corrected} ({test}). {_power(row)}"


def _power(row: dict[str, Any]) -> str:
    power = f"{counted(row['n'], row['unit'])} find a measured |r| ≥ {row['detectable']:.2f} with 80 % power"
    if row["x"] == "drop_path":
        return f"{power}."
    of = {
        LABELS.get(row[axis], row[axis]): interval(row, f"reliability_{axis}")
        for axis in ("x", "y")
    }
    if not all(of.values()):
        return f"Reliability is unknown: it takes several seeds, and weight decays that differ. {power}."
    reliable = ", ".join(f"{name} {text}" for name, text in of.items())
    true = row["detectable_true"]
    of_true = f"a true |r| ≥ {true:.2f}" if true == true else "not even a true |r| of 1"
    return f"Reliability: {reliable}. {power}, and at these reliabilities {of_true}."


def reliable_measures(table: "pd.DataFrame") -> list[str]:
    """State which variables are reliable, and what follows for the primary measure of the next study.

    Args:
        table: the rows of `vit.statistics.reliabilities`.
    """
    rows = table.to_dict("records")
    if not any(interval(row, "reliability") for row in rows):
        return ["Unknown: that takes several weight decays with several seeds."]
    outcomes = [row for row in rows if row["variable"] in LABELS]
    # Definitions may differ in whether their null level is known
    word = " or ".join(sorted({row["variable"] for row in rows} - LABELS.keys()))
    lines = [
        f"{LABELS[row['variable']]}: {'' if row['reliable'] else 'not '}reliable, {interval(row, 'reliability')}"
        for row in outcomes
    ]
    by_measure: dict[str, dict[str, list[bool]]] = {}
    for row in rows[len(outcomes) :]:
        by_measure.setdefault(row["token"], {}).setdefault(row["measure"], []).append(
            row["reliable"]
        )
    for token, measures in by_measure.items():
        names = [
            f"{definition(name)} ({sum(of)} of {len(of)})"
            for name, of in measures.items()
            if any(of)
        ]
        lines.append(f"{word} of the {token}: {'; '.join(names) or 'none'} reliable")
    lines.append(
        f"Reliable means that the interval is above {RELIABLE}; brackets: for how many choices of K and layer pairs."
    )
    if all(any(row["reliable"] for row in part) for part in (outcomes, rows[len(outcomes) :])):
        lines.append(
            f"The primary measure of a next study, on new seeds, should be a reliable {word} and a reliable outcome."
        )
    else:
        lines.append(
            f"No {word} with an outcome is reliable: a next study needs more seeds, or weight decays that differ more."
        )
    return lines


def interval(row: dict[str, Any], name: str) -> str:
    """Return a value and its interval as text; "" where it is undefined."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value != value:
        return ""
    return f"{value:z.2f} [{low:z.2f}, {high:z.2f}]".replace("-", "−")  # z: no −0.00
