"""The texts, charts and colours of the page, from the registry of measures and the palette; JSON-able."""

from typing import Any

from tracker.figures.coupling import MEASURE
from tracker.figures.palette import DIVERGING, SEQUENTIAL, SERIES
from tracker.measures.registry import BY_NAME, KINDS, MEASURES, VARIANTS, Measure

PAIRS = {"mean": "all pairs of blocks", "mean_offdiag": "pairs of different blocks", "mean_adjacent": "adjacent blocks"}
LAST_BLOCK = {"alone": "of the blocks alone", "normed": "with the final norm"}
AT_BLOCKS = "The same at an early, a middle and a late block."


def texts() -> dict[str, Any]:
    """Return what the page's scripts need to know of the measures.

    Returns:
        measures: by name of each measure of layer pairs its label, its definition, the measure that it is a variant of,
        whether it includes the final norm, and whether it is 0 on the diagonal by definition; paper: the measure of Fig. 1b;
        kinds, pairs, last: labels of choices; charts: the charts drawn from one variable each; columns: the measures of the
        table of blocks, which is in the order of the first, with their labels; colours: of lines by theme,
        from -1 to 1, and of matrices.
    """
    return {
        "measures": {name: _measure(BY_NAME[name]) for name in VARIANTS},
        "paper": MEASURE,
        "kinds": KINDS,
        "pairs": PAIRS,
        "last": LAST_BLOCK,
        "charts": [_chart(measure, i) for measure in MEASURES for i, of in enumerate(measure.charts) if of != "table"],
        "columns": [[measure.name, measure.label] for measure in MEASURES if "table" in measure.charts],
        "colours": {**SERIES, "diverging": DIVERGING, "sequential": SEQUENTIAL},
    }


def _measure(measure: Measure) -> dict[str, Any]:
    base = measure.base or measure.name
    return {
        "label": measure.label,
        "text": measure.text,
        "base": base,
        "normed": measure.variant == "normed",
        "trivial": measure.variant != "vju",
    }


def _chart(measure: Measure, i: int) -> dict[str, Any]:
    """Return a chart's specification: the first has its variable's name as its id, others have the chart's name added."""
    chart = measure.charts[i]
    normed = next((m.name for m in MEASURES if m.base == measure.name and m.variant == "normed"), None)
    return {
        "id": measure.name if i == 0 else f"{measure.name}_{chart}",
        "chart": chart,
        "title": measure.label[0].upper() + measure.label[1:],
        "caption": AT_BLOCKS if chart == "blocks" else measure.text,
        "unit": "" if measure.unit == "1" else measure.unit,
        "axis": measure.axis,
        "windowed": measure.windowed,
        "variants": {"alone": measure.name, "normed": normed or measure.name},
        "both": normed is not None,
    }
