"""The texts of the page; JSON-able.

- `texts`: what the page's scripts need of the registry of measures, and colours;
- `picture`: the picture at the top: two coupling matrices A = U'ᵀ J V', of a block in the basis of an unrelated block and of a
  coupled one, and a mis-coupling that falls below its null level. The numbers are made up;
- `provenance`, `lacking`: how the numbers were measured, as a table, and what the stores lack;
- `onset_sentence`: when coupling begins in one store.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from tracker.analysis.curves import layers_in_words
from tracker.analysis.regression import FEWEST_POINTS
from tracker.common.text import capitalised
from tracker.figures.coupling import MEASURE
from tracker.figures.drawing import DIVERGING, SEQUENTIAL, SERIES, definition
from tracker.measures.registry import (
    BY_NAME,
    KINDS,
    MEASURES,
    MISCOUPLINGS,
    UNDEFINED,
    VARIANTS,
    Measure,
)
from tracker.measures.settings import CHOICES, USUAL
from tracker.report.contents import carried
from tracker.store import Store, by_step

PAIRS = {
    "mean": "all pairs with the diagonal",
    "mean_offdiag": "pairs of different blocks",
    "mean_adjacent": "adjacent blocks",
}
LAST_BLOCK = {"alone": "of the blocks alone", "normed": "with the final norm"}
CHECKED = {
    "residual": "residual of a triplet / s₁",
    "value_error": "error of a value check",
    "derivative_error": "error of a derivative check",
}
AT_BLOCKS = "The same at an early, a middle and a late block."


def texts() -> dict[str, Any]:
    """Return what the page's scripts need to know of the measures.

    Returns:
        measures: by name of each measure of layer pairs its label, its definition, the measure that it is a variant of,
        whether it includes the final norm, and whether it is 0 on the diagonal by definition; paper: the measure of Fig. 1b;
        kinds, pairs, last: labels of choices; charts: the charts drawn from one variable each; columns: the measures of the
        table of blocks, which is in the order of the first, with their labels; fewest: points of a fit that is stated;
        colours: of lines by theme,
        from -1 to 1, and of matrices.
    """
    return {
        "measures": {name: _measure(BY_NAME[name]) for name in VARIANTS},
        "paper": MEASURE,
        "kinds": KINDS,
        "pairs": PAIRS,
        "last": LAST_BLOCK,
        "charts": [
            _chart(measure, i)
            for measure in MEASURES
            for i, of in enumerate(measure.charts)
            if of != "table"
        ],
        "columns": [
            [measure.name, measure.label] for measure in MEASURES if "table" in measure.charts
        ],
        "fewest": FEWEST_POINTS,
        "colours": {**SERIES, "diverging": DIVERGING, "sequential": SEQUENTIAL},
    }


def _measure(measure: Measure) -> dict[str, Any]:
    base = measure.base or measure.name
    return {
        "label": measure.label,
        "definition": definition(measure.name),
        "text": measure.text,
        "base": base,
        "normed": measure.variant == "normed",
        "trivial": measure.variant != "vju",
    }


def _chart(measure: Measure, i: int) -> dict[str, Any]:
    """Return a chart's specification: the first has its variable's name as its id, others have the chart's name added."""
    chart = measure.charts[i]
    normed = next(
        (m.name for m in MEASURES if m.base == measure.name and m.variant == "normed"), None
    )
    return {
        "id": measure.name if i == 0 else f"{measure.name}_{chart}",
        "chart": chart,
        "title": capitalised(measure.label),
        "caption": AT_BLOCKS if chart == "blocks" else measure.text,
        "unit": "" if measure.unit == "1" else measure.unit,
        "axis": measure.axis,
        "windowed": measure.windowed,
        "variants": {"alone": measure.name, "normed": normed or measure.name},
        "both": normed is not None,
    }


K, CELL = 6, 14  # rows of a matrix, pixels of an entry
SIDE = K * CELL
# Of the sketched curve
NULL, FALLING = 14, ((4, 14), (24, 14), (36, 20), (48, 44), (60, 58), (80, 62), (116, 58))
WIDTH = 120


def picture() -> str:
    """Return the three drawings as HTML, in the colours of the page."""
    random = np.random.default_rng(1)
    values = np.diag(np.linspace(1, 0.4, K))
    unrelated = abs(random.normal(0, 0.33, (K, K)))
    curve = " ".join(f"{x},{y}" for x, y in FALLING)
    sketch = (
        f'<line x1="4" y1="{NULL}" x2="{WIDTH - 4}" y2="{NULL}" class="null"/><polyline points="{curve}"/>'
        f'<path d="M4 2V{SIDE - 2}H{WIDTH - 4}" class="axes"/>'
    )
    return "".join(
        f'<div><svg viewBox="0 0 {width} {SIDE}" width="{width}" height="{SIDE}" aria-hidden="true">{drawing}</svg>'
        f"<p>{words}</p></div>"
        for width, drawing, words in (
            (
                SIDE,
                _matrix(unrelated),
                "<b>Unrelated blocks:</b> A is spread out, mis-coupling is at its null level.",
            ),
            (
                SIDE,
                _matrix(values + abs(random.normal(0, 0.05, (K, K)))),
                "<b>Coupled blocks:</b> A is close to S, mis-coupling is near 0.",
            ),
            (
                WIDTH,
                sketch,
                "<b>In the charts:</b> mis-coupling (line) falls below its null level (dotted) when coupling sets in.",
            ),
        )
    )


def _matrix(values: np.ndarray) -> str:
    return "".join(
        f'<rect x="{CELL * j}" y="{CELL * i}" width="{CELL - 1}" height="{CELL - 1}" fill-opacity="{min(1, value):.2f}"/>'
        for (i, j), value in np.ndenumerate(values)
    )


def lacking(ds: xr.Dataset) -> list[str]:
    """List what these results lack, and the command that adds it."""
    again = "measure with --measures {} and another --out, in Python measures= and save_dir="
    usual = ",".join(USUAL)
    missing = [option for option in CHOICES if not _has(ds, option.name)]
    lines = [
        f"{option.text}: {again.format(usual if option.default else f'{usual},{option.name}')}"
        for option in sorted(missing, key=lambda option: option.default)
    ]
    if ds.sizes.get("layer") == 1:
        lines.append("pairs of layers: one block was measured")
    return lines + (
        ["benchmark scores: a walk's --scores FILE joins them"] if "score" not in ds else []
    )


def _has(ds: xr.Dataset, option: str) -> bool:
    """Whether a summary has something that this choice of `measures=` adds."""
    names = tuple(measure.name for measure in MEASURES if measure.option == option)
    return any(
        str(name) in names or str(name).startswith(tuple(f"{n}_" for n in names))
        for name in ds.data_vars
    )


def provenance(ds: xr.Dataset, store: Store) -> list[tuple[str, str]]:
    """Return the rows of the table: settings, attributes, certificates, counts of undefined values, commits."""
    rows = [("results", store.path.resolve().name)]
    if store.settings.is_file():
        rows += [
            (f"asked for: {name.replace('_', ' ')}", worded(value))
            for name, value in store.read_settings().items()
            if value not in (None, {}, [])
        ]
    # Sorted, as files give attributes back in an order of their own.
    rows += [
        (name.replace("_", " "), worded(value))
        for name, value in sorted(ds.attrs.items())
        if name != "blocks"
    ]
    if "pair_position" in ds:
        rows.append(("layers compared across tokens", layers_in_words(ds)))
    if "jacobians_count" in ds:
        count, sliced, complete = (
            int(ds[f"{name}_count"].sum()) for name in ("jacobians", "sliced", "complete")
        )
        rows += [
            (
                "block Jacobians",
                f"{count:,}, of which {sliced:,} from single rows, the rest over the full sequence",
            ),
            ("complete top-K sets", f"{complete:,} of {count:,}, certified by Cholesky"),
        ]
        largest = {words: float(ds[f"{error}_max"].max()) for error, words in CHECKED.items()}
        # Without blocks that are compared with their own derivative there is no error of it.
        rows += [
            (f"largest {words}", f"{value:.1e}")
            for words, value in largest.items()
            if value == value
        ]
    totals = {str(q): int(ds[UNDEFINED].sel(quantity=q).sum()) for q in ds["quantity"].values}
    rows.append(
        ("undefined values", ", ".join(f"{q}: {n:,}" for q, n in totals.items() if n) or "none")
    )
    if "commit" in ds.coords:
        commits = zip(ds["step"].values, by_step(ds, "commit"), strict=True)
        rows.append(
            (
                "commits",
                ", ".join(f"step {step}: {str(commit)[:8]}" for step, commit in commits if commit),
            )
        )
    return rows


def precision_of_arrays(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the precision of the page's arrays, and the steps that it leaves out for its size."""
    arrays = list(carried(models))
    errors = [array["error"] for array in arrays if array["bits"] == 16]
    text = "Curves are the store's own numbers in float64; values by depth and prompt are float32."
    if errors:
        text += (
            " Matrices are whole numbers of 16 bits over each step's range: the largest relative error on this page is "
            f"{max(errors):.1e}."
        )
    if any(array["bits"] == 8 for array in arrays):
        text += " |A| is 8 bits over each matrix's own range: at most 0.2 % of that range off."
    for name, data in models.items():
        fewest = min((len(array["steps"]) for array in carried(data)), default=len(data["steps"]))
        if fewest < len(data["steps"]):
            text += (
                f" To keep the page small, it carries the largest arrays of {name} at {fewest} or more of {len(data['steps'])} "
                "steps, evenly spaced; a chart says where it shows an earlier step than the one chosen."
            )
    return text


def worded(value: Any) -> str:
    """Return a setting or an attribute as a reader expects it: lists without brackets, what is empty as "none"."""
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if text in ("", "{}") else text


def onset_sentence(contents: Mapping[str, Any]) -> str:
    """Say when the curve that the page shows first departs: the first measure, the smallest K, pairs of different blocks.

    Args:
        contents: what `tracker.report.contents.contents` returns.

    Returns:
        A sentence, "" without a curve of couplings.
    """
    name = next((name for name in MISCOUPLINGS if name in contents["curves"]), None)
    if name is None or contents["layers"] < 2 or len(contents["steps"]) < 2:
        return ""
    k = min(contents["ks"])
    of = f"{BY_NAME[name].label}, K = {k}, mean over pairs of different blocks"
    return f"Onset of coupling ({of}): {contents['onset'][name][k]['words']}."
