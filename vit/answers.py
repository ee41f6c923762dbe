"""The results of the analysis in words: which questions the trainings answer, and which measures are reliable."""

from typing import TYPE_CHECKING, Any

from tracker.common.text import capitalised
from vit.statistics import RELIABLE

if TYPE_CHECKING:
    import pandas as pd

LABELS = {"drop_path": "stochastic depth", "accuracy": "test accuracy", "loss": "test loss"}


def answers(tests: "pd.DataFrame") -> list[str]:
    """State the result of each test at the primary position.

    Args:
        tests: the rows of `vit.statistics.named_tests`.
    """
    position = tests.loc[tests["role"] == "primary", "token"].iloc[0]
    rows = tests.loc[(tests["token"] == position) & tests["p"].notna()]
    return [_answer(row) for row in rows.to_dict("records")] or ["Too few settings to answer."]


def _answer(row: dict[str, Any]) -> str:
    p_value = row["p"] if row["role"] == "primary" else row["p_holm"]
    p = "p < 0.0001" if p_value < 0.0001 else f"p = {p_value:.2g}"
    corrected = "primary test" if row["role"] == "primary" else "corrected"
    if p_value < 0.05:
        answer = "yes" if (row["r"] > 0) == (row["expected"] == "+") else "the opposite"
    elif (
        row["attainable"] < row["detectable"]
    ):  # stochastic depth is set: without an effect of it, coupling is all noise
        answer = "not above the noise of seeds" if row["x"] == "drop_path" else "could not be tested"
    else:
        answer = "not significantly"
    return f"{capitalised(row['question'])}: {answer}, r = {interval(row, 'r')}, {p} ({corrected}, {row['token']}). {_power(row)}"


def _power(row: dict[str, Any]) -> str:
    detectable, true = row["detectable"], row["detectable_true"]
    if detectable != detectable:
        power = f"{row['n']} settings are too few for 80 % power, whatever r is"
    else:
        power = f"{row['n']} settings find a measured |r| ≥ {detectable:.2f} with 80 % power"
    of = {LABELS.get(row[axis], row[axis]): interval(row, f"reliability_{axis}") for axis in ("x", "y")}
    if not all(of.values()):
        return f"Reliability is unknown, because no setting has several seeds. {power}."
    reliable = ", ".join(f"{name} {text}" for name, text in of.items() if name != LABELS["drop_path"])
    if detectable == detectable:
        of_true = f"a true |r| ≥ {true:.2f}" if true <= 1 else "not even a true |r| of 1"
        power += f", and at these reliabilities {of_true}"
    return f"Reliability: {reliable}. {power}."


def reliable_measures(table: "pd.DataFrame") -> list[str]:
    """State which variables are reliable, and what follows for the primary measure of the next study.

    Args:
        table: the rows of `vit.statistics.reliabilities`.
    """
    rows = table.to_dict("records")
    if not any(interval(row, "reliability") for row in rows):
        return [
            "No setting has several seeds, so that no reliability is known; a pilot of several seeds would show it."
        ]
    outcomes = [row for row in rows if row["variable"] != "coupling"]
    lines = [
        f"{LABELS[row['variable']]}: {'' if row['reliable'] else 'not '}reliable, {interval(row, 'reliability')}"
        for row in outcomes
    ]
    by_measure: dict[str, dict[str, list[bool]]] = {}
    for row in rows[len(outcomes) :]:
        by_measure.setdefault(row["token"], {}).setdefault(row["measure"], []).append(row["reliable"])
    for token, measures in by_measure.items():
        names = [f"{name} ({sum(of)} of {len(of)})" for name, of in measures.items() if any(of)]
        lines.append(f"coupling of the {token}: {', '.join(names) or 'none'} reliable")
    lines.append(
        f"Reliable means that the interval is above {RELIABLE}; brackets: for how many choices of K and layer pairs."
    )
    if all(any(row["reliable"] for row in part) for part in (outcomes, rows[len(outcomes) :])):
        lines.append(
            "The primary measure of a next study, on new seeds, should be a reliable coupling and a reliable outcome."
        )
    else:
        lines.append(
            "No coupling with an outcome is reliable: a next study needs more seeds, or settings that differ more."
        )
    return lines


def exploratory(table: "pd.DataFrame") -> str:
    """State how many of the rows of `vit.statistics.correlations` are significant."""
    tested = table["p"].notna()
    return (
        f"{tested.sum():,} fits of accuracy and test loss on coupling, not named beforehand; {(table['p_holm'] < 0.05).sum():,} "
        f"have p below 0.05 after correction for all of them."
    )


def interval(row: dict[str, Any], name: str) -> str:
    """Return a value and its interval as text; "" where it is undefined."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if value == value else ""


def with_intervals(table: "pd.DataFrame", before: list[str], after: list[str]) -> "pd.DataFrame":
    """Return some columns of tests or correlations, and r and the reliabilities as text between them."""
    rows = table.to_dict("records")
    texts = {name: [interval(row, name) for row in rows] for name in ("r", "reliability_x", "reliability_y")}
    return table[before].assign(**texts).join(table[after])
