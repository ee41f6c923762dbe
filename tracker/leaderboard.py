"""The models themselves, without their couplings: what they are (Table 1), and one benchmark against the mean of all (Fig. 31).

Each gives the figure and the numbers in it, as `plots` does. Scores and tokens are those after the last step.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tracker.across import SIZES, TOKENS, Results, family, mean_score, tokens_seen
from tracker.drawing import BLUE, fitted_line, panels
from tracker.regression import FEWEST, linear_fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tracker.plots import Plotted

BENCHMARK = "gsm8k"


def table_of_models(results: Results) -> "Plotted":
    """Architecture, parameters, blocks, width, training tokens and mean score of each result; NaN where it is not known.

    The mean is over the benchmarks that all results with scores have.
    """
    scored = {name: ds for name, ds in results.items() if "score" in ds and ds["score"].isel(step=-1).notnull().any()}
    benchmarks, score = mean_score(scored) if scored else ([], lambda _: float("nan"))
    table = pd.DataFrame(
        [
            {
                "result": name,
                "architecture": family(ds),
                **{size: int(take(ds)) for size, take in SIZES.items()},
                TOKENS: tokens_seen(ds),
                "score": score(ds) if name in scored else float("nan"),
            }
            for name, ds in results.items()
        ]
    )
    return _as_figure(table, benchmarks), table


def against_the_mean(results: Results) -> "Plotted":
    """The score on GSM8K against the mean score over the benchmarks that all results have, GSM8K among them.

    Raises:
        ValueError: if not all results have GSM8K, or too few are left.
    """
    benchmarks, score = mean_score(results)
    named = [task for task in benchmarks if BENCHMARK in task.lower()]
    if not named:
        raise ValueError(
            f"the results have {', '.join(benchmarks)} in common, but not {BENCHMARK}; join its scores: --scores FILE"
        )
    one = min(named, key=len)  # the plain task, where a variant of it is there too
    table = pd.DataFrame(
        [
            {
                "result": name,
                "mean score": score(ds),
                one: float(ds["score"].isel(step=-1).sel(task=one)),
            }
            for name, ds in results.items()
        ]
    )
    if len(table) < FEWEST:
        raise ValueError(f"{len(table)} results; it takes {FEWEST}")
    figure, (axes,) = panels(1)
    x, y = table["mean score"].to_numpy(), table[one].to_numpy()
    axes.scatter(x, y, s=16, color=BLUE, zorder=3)
    axes.set_title(fitted_line(axes, x, y, linear_fit(x, y)), fontsize=8)
    axes.set_xlabel(f"mean of {len(benchmarks)} benchmarks", fontsize=8)
    axes.set_ylabel(one, fontsize=8)
    return figure, table


def _as_figure(table: pd.DataFrame, benchmarks: list[str]) -> "Figure":
    """The table drawn as one; a dash where a number is not known."""
    from matplotlib.figure import Figure

    def said(column: str, value: Any) -> str:
        if isinstance(value, float) and np.isnan(value):
            return "—"
        if column == "score":
            return f"{value:.4f}"
        return f"{value:.4g}" if column == TOKENS else f"{value:,}" if isinstance(value, int) else str(value)

    cells = [[said(column, value) for column, value in row.items()] for row in table.to_dict("records")]
    widths = [max(map(len, (column, *of))) for column, of in zip(table, zip(*cells, strict=True), strict=True)]
    figure = Figure(figsize=(1 + 0.1 * sum(widths), 1.2 + 0.25 * len(cells)), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    shares = [width / sum(widths) for width in widths]
    drawn = axes.table(cells, colLabels=[str(column) for column in table], colWidths=shares, loc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    lacking = [] if benchmarks else ["scores: --scores FILE"]
    if np.isnan(table[TOKENS].to_numpy(float)).any():
        lacking.append("training tokens: names of checkpoints that say them, --revisions")
    of = [f"score: mean of {', '.join(benchmarks)}"] if benchmarks else []
    figure.supxlabel("; ".join(of + [f"to add {what}" for what in lacking]), fontsize=7)
    return figure
