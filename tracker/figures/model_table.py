"""The table of models (Table 1). Scores and training tokens are those after the last step."""

from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tracker.analysis.across_models import SIZES, TRAINING_TOKENS, Results, architecture, mean_score, tokens_seen
from tracker.figures.drawing import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

LETTERS_PER_INCH = 16  # of a note


def table_of_models(results: Results, _: int, given: "Axes | None" = None) -> "Plotted":
    """Draw architecture, sizes, training tokens and mean score of each result; NaN where unknown.

    The mean is over the benchmarks that all results with scores have.
    """
    scored = {name: ds for name, ds in results.items() if "score" in ds and ds["score"].isel(step=-1).notnull().any()}
    benchmarks, score = mean_score(scored) if scored else ([], lambda _: float("nan"))
    table = pd.DataFrame(
        [
            {
                "result": name,
                "architecture": architecture(ds),
                **{size: int(take(ds)) for size, take in SIZES.items()},
                TRAINING_TOKENS: tokens_seen(ds),
                "score": score(ds) if name in scored else float("nan"),
            }
            for name, ds in results.items()
        ]
    )
    return _draw_table(table, benchmarks, given), table


def _draw_table(table: pd.DataFrame, benchmarks: list[str], given: "Axes | None") -> "Figure":
    from matplotlib.figure import Figure

    cells = [[_cell(str(column), value) for column, value in row.items()] for row in table.to_dict("records")]
    widths = [max(map(len, (column, *texts))) for column, texts in zip(table, zip(*cells, strict=True), strict=True)]
    width = 1 + 0.1 * sum(widths)
    if given is None:
        figure = Figure(figsize=(width, 1.2 + 0.25 * len(cells)), layout="constrained")
        axes = figure.subplots()
    else:
        figure, (axes,) = panels(1, given)
    axes.axis("off")
    shares = [width / sum(widths) for width in widths]
    drawn = axes.table(cells, colLabels=[str(column) for column in table], colWidths=shares, loc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    notes = (
        [f"score: mean of {', '.join(benchmarks)}"]
        if benchmarks
        else ["scores of benchmarks: joined by a walk, see docs/checkpoints.md"]
    )
    if np.isnan(table[TRAINING_TOKENS].to_numpy(float)).any():
        notes.append("training tokens: read by a walk from the names of checkpoints, see docs/checkpoints.md")
    if given is None:
        figure.supxlabel("\n".join(fill(note, int(LETTERS_PER_INCH * width)) for note in notes), fontsize=7)
    return figure


def _cell(column: str, value: Any) -> str:
    """Return the text of a cell; a dash where the value is unknown."""
    if isinstance(value, float) and np.isnan(value):
        return "—"
    if column == "score":
        return f"{value:.4f}"
    return f"{value:.4g}" if column == TRAINING_TOKENS else f"{value:,}" if isinstance(value, int) else str(value)
