"""Tables, figures and a self-contained page of a grid: `python -m vit.analysis results/vit/cifar10`.

Large packages are imported after the arguments are parsed, to keep `--help` fast.
"""

import base64
import html
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from checkpoints.cli import OK, reports_errors
from checkpoints.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

TEMPLATE = Path(__file__).parent / "page.html"
SHOWN_DECAY = 0.04  # of the paper's Fig. 6b
CAPTIONS = {
    "fig6a": "Test accuracy against coupling (paper, Fig. 6a). Each panel is a stochastic depth rate, each point a weight decay "
    "and seed; colours show the weight decay. Brackets give the 95 % interval of R² (Fisher's z), which treats cells as "
    "independent. Grey bars are one standard error of the accuracy, given the number of test images.",
    "fig6b": "Coupling against stochastic depth at one weight decay (paper, Fig. 6b). Points are seeds, the line is their mean.",
    "fig10": "Coupling against stochastic depth for every weight decay (paper, Fig. 10).",
    "training": "Coupling over training for each stochastic depth rate. Lines are means over weight decays and seeds, bands "
    "their range. The dotted line is the null level, the value for an unrelated basis.",
    "which": "Correlation of accuracy with coupling by mis-coupling, K and layer pairs, within stochastic depth rates (each "
    "rate's means subtracted). A star marks p below 0.05 after Holm's correction for all definitions.",
}


def write_analysis(grid: "xr.Dataset", table: "pd.DataFrame", at: dict[str, Any], out: Path, name: str) -> Path:
    """Write cells.csv, correlations.csv, the figures and report.html.

    Args:
        at: the measure, k and pairs that the figures show.

    Returns:
        The path of the page.
    """
    from tracker.figures.palette import css_variables
    from vit import figures
    from vit.statistics import cell_table

    decays = sorted(set(grid["weight_decay"].values))
    nearest = min(decays, key=lambda decay: abs(decay - SHOWN_DECAY))
    drawn = {
        "fig6a": figures.accuracy_against_coupling(grid, table, at),
        "fig6b": figures.coupling_against_rate(grid, at, [nearest]),
        "fig10": figures.coupling_against_rate(grid, at, decays),
        "training": figures.coupling_over_training(grid, at),
        "which": figures.correlations_with_accuracy(table),
    }
    cells = cell_table(grid)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "cells.csv", cells.to_csv(index=False).encode())
    write_atomic(out / "correlations.csv", table.to_csv(index=False).encode())
    pictures = {}
    for key, figure in drawn.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        pictures[key] = buffer.getvalue()
        write_atomic(out / f"{key}.png", pictures[key])
    shown = table[(table.measure == at["measure"]) & (table.k == at["k"]) & (table.pairs == at["pairs"])]
    columns = ["weight_decay", "drop_path", "seed", "accuracy", "loss", f"{at['measure']}/k{at['k']}/{at['pairs']}"]
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        colours=css_variables("light"),
        title=html.escape(f"Coupling and accuracy: {name}"),
        summary=html.escape(_summary(grid, table, at)),
        figures="".join(_figure(key, picture) for key, picture in pictures.items()),
        correlations=shown.to_html(index=False, border=0, float_format=lambda value: f"{value:.3g}"),
        cells=cells[columns].to_html(index=False, border=0, float_format=lambda value: f"{value:.4g}"),
        unfinished="".join(f"<li>{html.escape(line)}</li>" for line in grid.attrs["unfinished"]) or "<li>none</li>",
    )
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _summary(grid: "xr.Dataset", table: "pd.DataFrame", at: dict[str, Any]) -> str:
    from vit.figures import coupling_label

    decays, rates, seeds = (len(set(grid[name].values)) for name in ("weight_decay", "drop_path", "seed"))
    accuracy, last = grid["accuracy"], grid["miscoupling"].isel(step=-1)
    trends = f"{_trend('coupling', grid, -last.sel(at))}; {_trend('accuracy', grid, accuracy)}"
    return (
        f"{grid.sizes['cell']} vision transformers on {grid.attrs['data']}: {decays} weight decays, {rates} stochastic depth "
        f"rates, {seeds} seeds. Accuracy on {grid.attrs['images']:,} test images from {float(accuracy.min()):.4f} to "
        f"{float(accuracy.max()):.4f}. Figures show {coupling_label(at)}; the tables hold {len(table)} correlations. At fixed "
        f"weight decay, against stochastic depth: {trends}."
    )


def _trend(what: str, grid: "xr.Dataset", values: "xr.DataArray") -> str:
    from tracker.analysis.regression import group_means, linear_fit
    from vit.statistics import settings

    points = group_means(settings(grid), grid["drop_path"].values, values.values, grid["weight_decay"].values)
    fit = linear_fit(*points)  # with seeds averaged
    return (
        f"{what} has r = {fit['r']:.2f} (95 % interval {fit['r_low']:.2f} to {fit['r_high']:.2f}, p = {fit['p']:.2g})"
    )


def _figure(key: str, picture: bytes) -> str:
    caption, data = html.escape(CAPTIONS[key]), base64.b64encode(picture).decode()
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.cli import Parser

    parser = Parser(
        prog="python -m vit.analysis",
        description="Write tables, figures and a page on the relation of accuracy and coupling in a grid.",
    )
    parser.add_argument("grid", type=Path, help="directory written by vit.grid (--out)")
    parser.add_argument("--out", type=Path, help="directory for tables, figures and page; default: GRID/analysis")
    parser.add_argument("--measure", type=str, default="offdiag_normalized", help="mis-coupling shown in figures")
    parser.add_argument("--k", type=int, help="number of singular vectors K; default: the smallest measured")
    parser.add_argument(
        "--pairs",
        type=str,
        default="mean_offdiag",
        help="layer pairs: mean (all, as in the paper), mean_offdiag or mean_adjacent",
    )
    parsed = parser.parse_args(arguments)
    from tracker.errors import UsageError
    from vit.statistics import correlations, read_grid

    grid = read_grid(parsed.grid)
    at = {"measure": parsed.measure, "k": parsed.k or int(grid["k"].values[0]), "pairs": parsed.pairs}
    for name, value in at.items():
        if value not in grid[name].values:
            raise UsageError(f"--{name} {value} was not measured; choose from {', '.join(map(str, grid[name].values))}")
    print(write_analysis(grid, correlations(grid), at, parsed.out or parsed.grid / "analysis", parsed.grid.name))
    return OK


if __name__ == "__main__":
    sys.exit(main())
