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

from tracker.common.command_line import OK, reports_errors
from tracker.common.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

TEMPLATE = Path(__file__).parent / "page.html"
SHOWN = {"token": str, "measure": str, "k": int, "pairs": str}  # of the mis-coupling in the figures
POINTS = (
    "Each panel is a stochastic depth rate, each large point a setting (the mean over its seeds), each small point a cell; "
    "colours show the weight decay."
)
CAPTIONS = {
    "accuracy": f"Test accuracy against coupling (paper, Fig. 6a). {POINTS} r with its 95 % interval (Fisher's z); below it the "
    "reliabilities of coupling and of accuracy. Grey bars are one standard error of an accuracy on so many test images.",
    "loss": f"Test loss against coupling. {POINTS}",
    "rates": "Coupling against stochastic depth for every weight decay (paper, Figs. 6b and 10). Points are seeds, the line is "
    "their mean.",
    "training": "Coupling over training for each stochastic depth rate, over steps and, where it was recorded, over the loss on "
    "plain training images. Lines are means over weight decays and seeds, bands their range. A dotted line is the null level, "
    "the value for unrelated blocks; grids that hold none have no line.",
    "reliability": "Reliability within stochastic depth rates, with 95 % interval, at one K: the share of the variance of the "
    "settings' means that is not noise of their seeds. Beyond the line at 0.5 settings vary more than that noise.",
    "which": "Correlation of accuracy with coupling by mis-coupling, K and layer pairs, within stochastic depth rates. A star "
    "marks p below 0.05 after Holm's correction for all definitions.",
}


def write_analysis(grid: "xr.Dataset", at: dict[str, Any], out: Path) -> Path:
    """Write grid.nc, cells.csv, tests.csv, reliability.csv, correlations.csv, the figures and report.html.

    Args:
        at: the token, measure, k and pairs that the figures show.

    Returns:
        The path of the page.
    """
    import numpy as np
    from matplotlib import rc_context

    from tracker.figures.drawing import STYLE, css_variables
    from vit import figures
    from vit.answers import answers, exploratory, reliable_measures, with_intervals
    from vit.results import GRID_FILE, write_grid
    from vit.statistics import cell_table, correlations, named_tests, reliabilities

    cells, tests, reliable = cell_table(grid), named_tests(grid), reliabilities(grid)
    table = correlations(grid)
    with rc_context(STYLE):
        drawings = {
            "accuracy": figures.outcome_against_coupling(grid, at, "accuracy"),
            "loss": figures.outcome_against_coupling(grid, at, "loss"),
            "rates": figures.coupling_against_rate(grid, at),
            "training": figures.coupling_over_training(grid, at),
            "which": figures.correlations_with_accuracy(table, at["token"]),
        }
        if np.isfinite(reliable["reliability"].to_numpy()).any():
            drawings["reliability"] = figures.reliability_of_measures(reliable, at["k"])
    out.mkdir(parents=True, exist_ok=True)
    write_grid(grid, out / GRID_FILE)
    for file, content in (("cells", cells), ("tests", tests), ("reliability", reliable), ("correlations", table)):
        write_atomic(out / f"{file}.csv", content.to_csv(index=False).encode())
    pictures = {}
    for key, figure in drawings.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=200, format="png")
        write_atomic(out / f"{key}.png", buffer.getvalue())
        pictures[key] = _figure(key, buffer.getvalue())
    of_figures = (table[list(at)] == list(at.values())).all(axis=1)
    columns = ["weight_decay", "drop_path", "seed", "accuracy", "loss", "training_loss"]
    columns.append("/".join([at["token"], at["measure"], f"k{at['k']}", at["pairs"]]))
    fits = with_intervals(table.loc[of_figures], ["outcome", "drop_path", "n"], ["slope", "p", "p_holm"])
    answered = with_intervals(
        tests, ["question", "token", "role", "n"], ["p", "p_holm", "attainable", "detectable", "detectable_true"]
    )
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        colours=css_variables("light"),
        title=html.escape(f"Coupling and accuracy: {grid.attrs['data']}"),
        grid=html.escape(_grid(grid, at)),
        answers=_items(answers(tests)),
        tests=_table(answered, 2),
        outcomes=pictures["accuracy"] + pictures["loss"],
        rates=pictures["rates"],
        training=pictures["training"],
        reliable=_items(reliable_measures(reliable)),
        reliability=pictures.get("reliability", ""),
        exploratory=html.escape(exploratory(table)),
        which=pictures["which"],
        correlations=_table(fits, 3),
        cells=_table(cells.filter(columns), 4),
        unfinished=_items(grid.attrs["unfinished"] or ["none"]),
    )
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _grid(grid: "xr.Dataset", at: dict[str, Any]) -> str:
    from tracker.common.text import counted
    from vit.figures import coupling_label

    decays, rates, seeds = (len(set(grid[name].values)) for name in ("weight_decay", "drop_path", "seed"))
    accuracy = grid["accuracy"]
    return (
        f"{counted(grid.sizes['cell'], 'vision transformer')} on {grid.attrs['data']}: {counted(decays, 'weight decay')}, "
        f"{counted(rates, 'stochastic depth rate')}, {counted(seeds, 'seed')}. Accuracy on {grid.attrs['images']:,} test images "
        f"from {float(accuracy.min()):.4f} to {float(accuracy.max()):.4f}. Figures show {' '.join(coupling_label(at).split())}."
    )


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _table(table: "pd.DataFrame", digits: int) -> str:
    return table.to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.{digits}g}")


def _figure(key: str, picture: bytes) -> str:
    caption, data = html.escape(CAPTIONS[key]), base64.b64encode(picture).decode()
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import Parser

    parser = Parser(
        prog="python -m vit.analysis",
        description="Write tables, figures and a page on the relation of accuracy and coupling in a grid.",
    )
    parser.add_argument(
        "grid",
        type=Path,
        nargs="+",
        help="directory written by vit.grid (--out), or grid.nc of an earlier analysis; several are analysed as one grid",
    )
    parser.add_argument(
        "--out", type=Path, help="directory for tables, figures and page; default: analysis, in the first directory"
    )
    for name, kind in SHOWN.items():
        parser.add_argument(f"--{name}", type=kind, help="shown in figures; default: that of the primary test")
    parsed = parser.parse_args(arguments)
    from tracker.common.errors import UsageError
    from vit.results import read_grid
    from vit.statistics import primary

    first = parsed.grid[0]
    grid = read_grid(*parsed.grid)
    at = primary(grid) | {name: parsed[name] for name in SHOWN if parsed[name] is not None}
    for name, value in at.items():
        if value not in grid[name].values:
            raise UsageError(f"--{name} {value} was not measured; choose from {', '.join(map(str, grid[name].values))}")
    out = parsed.out or (first.parent if first.is_file() else first) / "analysis"
    print(write_analysis(grid, at, out))
    return OK


if __name__ == "__main__":
    sys.exit(main())
