"""The results of the analysis in words: which questions the trainings answer."""

import math
from typing import TYPE_CHECKING, Any

from tracker.common.text import capitalised, counted
from vit.statistics import COUPLING, QUESTIONS, at_chance, too_few

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def cautions(grid: "xr.Dataset") -> list[str]:
    """State in how many models accuracy is not above chance, if in any."""
    models, chance = grid.sizes["cell"], int(at_chance(grid).sum())
    if not chance:
        return []
    rest = (
        "No question on accuracy or test loss is answered."
        if chance == models
        else "They count as others."
    )
    return [f"Accuracy is not above chance in {chance} of {counted(models, 'model')}. {rest}"]


def unanswerable(decays: int, rates: int, seeds: int) -> list[str]:
    """State which questions a grid of this size can't answer, whatever the trainings give."""
    by_reason: dict[str, list[str]] = {}
    for question in QUESTIONS:
        if why := too_few(question.within, decays, rates, seeds):
            by_reason.setdefault(why, []).append(question.name.format(coupling=COUPLING))
    return [
        f"{capitalised('; '.join(names))}: not answered, because {why}."
        for why, names in by_reason.items()
    ]


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
        answer = "not significantly"
    corrected = "" if primary else ", corrected"
    power = f"{counted(row['n'], row['unit'])} find a measured |r| ≥ {row['detectable']:.2f} with 80 % power"
    said = f"{question}: {answer}, {correlation(row)}, {p}{corrected} ({test}). {power}."
    if not math.isfinite(row["r_given_decay"]):
        return said
    return (
        f"{said} By itself, {row['y']} has r = {row['r_decay']:z.2f} with the logarithm of the weight decay; given a quadratic "
        f"function of that, r = {row['r_given_decay']:z.2f} remains (p = {row['p_given_decay']:.2g}). Where little remains, the "
        f"grid can't tell whether {row['y']} follows {row['x']} or both follow the weight decay."
    ).replace("r = -", "r = −")


def correlation(fit: dict[str, Any]) -> str:
    """Return the r of a fit and its interval as text."""
    # z: no −0.00
    return "r = {r:z.2f} [{r_low:z.2f}, {r_high:z.2f}]".format(**fit).replace("-", "−")
