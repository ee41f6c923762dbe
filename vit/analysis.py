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
from tracker.common.errors import UsageError
from tracker.common.files import write_atomic
from tracker.common.text import capitalised, counted

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

TEMPLATE = Path(__file__).parent / "page.html"
# Of the mis-coupling in the figures
SHOWN = {
    "token": "cls, last, or the name of another position that was measured, such as 'position 5'",
    "measure": "miscoupling, miscoupling_release, miscoupling_release_trace, offdiag or offdiag_normalized",
    "k": "number of top singular vectors, one of vit.grid's --k",
    "pairs": "mean_offdiag (all pairs of blocks) or mean_adjacent (neighbours)",
}
POINTS = (
    "Each panel is a stochastic depth rate, each large point a setting (the mean over its seeds), each small point a cell; "
    "colours show the weight decay."
)
CAPTIONS = {
    "accuracy": f"Test accuracy against {{coupling}} (paper, Fig. 6a). {POINTS} r with its 95 % interval (Fisher's z), over "
    "weight decays. Grey bars are one standard error of an accuracy on so many test images; the axis spans at least 16 of them.",
    "loss": f"Test loss against {{coupling}}. {POINTS} The axis spans at least a tenth of the largest loss.",
    "rates": "{coupling} against stochastic depth for every weight decay (paper, Figs. 6b and 10). Points are seeds, the line is "
    "their mean.",
}
COUPLING_IS = {
    "coupling": "Coupling is the null level, the mis-coupling of unrelated blocks, minus mis-coupling: 0 for unrelated "
    "blocks, and higher the more the blocks share one basis.",
    "minus mis-coupling": "This grid holds no exact null level of this definition, so that minus mis-coupling stands for "
    "coupling: it has no zero, and is higher the more the blocks share one basis.",
}
OF_CELLS = {
    "weight_decay": "weight decay",
    "drop_path": "stochastic depth",
    "seed": "seed",
    "accuracy": "test accuracy",
    "loss": "test loss",
    "training_loss": "training loss",
}


def write_analysis(grid: "xr.Dataset", at: dict[str, Any], out: Path) -> Path:
    """Write grid.nc, cells.csv, tests.csv, the figures and report.html.

    Args:
        at: the token, measure, k and pairs that the figures show.

    Returns:
        The path of the page.
    """
    from tracker.analysis.regression import FEWEST_POINTS
    from tracker.figures.drawing import css_variables
    from vit.answers import answers, cautions
    from vit.figures import described
    from vit.results import GRID_FILE, write_grid
    from vit.statistics import cell_table, column, named_tests, quantity

    cells, tests = cell_table(grid), named_tests(grid)
    pictures = _drawn(grid, at)
    write_grid(grid, out / GRID_FILE)
    for name, table in {"cells": cells, "tests": tests}.items():
        write_atomic(out / f"{name}.csv", table.to_csv(index=False).encode())
    for name, picture in pictures.items():
        write_atomic(out / f"{name}.png", picture)
    word, shown = quantity(grid, at), ", ".join(described(grid, at))
    figures = {name: _figure(CAPTIONS[name], word, picture) for name, picture in pictures.items()}
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        light=css_variables("light"),
        dark=css_variables("dark"),
        title=html.escape(f"Coupling and accuracy: {grid.attrs['data']}"),
        grid=html.escape(f"{_grid(grid)} Figures show {shown}."),
        coupling=html.escape(COUPLING_IS[word]),
        answers=_items(cautions(grid) + answers(tests)),
        fewest=FEWEST_POINTS,
        outcomes=figures["accuracy"] + figures["loss"],
        rates=figures["rates"],
        cells=_table(cells, OF_CELLS | {column(grid, at): shown}),
        unfinished=_items(grid.attrs["unfinished"] or ["none"]),
    )
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _drawn(grid: "xr.Dataset", at: dict[str, Any]) -> dict[str, bytes]:
    """Draw the figures as PNG, by name."""
    from matplotlib import rc_context

    from tracker.figures.drawing import STYLE
    from vit.figures import coupling_against_rate, outcome_against_coupling

    pictures = {}
    with rc_context(STYLE):
        drawings = {
            "accuracy": outcome_against_coupling(grid, at, "accuracy"),
            "loss": outcome_against_coupling(grid, at, "loss"),
            "rates": coupling_against_rate(grid, at),
        }
        for name, figure in drawings.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=200, format="png")
            pictures[name] = buffer.getvalue()
    return pictures


def _grid(grid: "xr.Dataset") -> str:
    from vit.recipe import SETTINGS

    decays, rates, seeds = (len(set(grid[name].values)) for name in SETTINGS)
    accuracy = grid["accuracy"]
    return (
        f"{counted(grid.sizes['cell'], 'vision transformer')} on {grid.attrs['data']}: {counted(decays, 'weight decay')}, "
        f"{counted(rates, 'stochastic depth rate')}, {counted(seeds, 'seed')}. Accuracy on {grid.attrs['images']:,} test images "
        f"from {float(accuracy.min()):.4f} to {float(accuracy.max()):.4f}."
    )


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _table(table: "pd.DataFrame", headings: dict[str, str]) -> str:
    """Return columns under their headings as HTML."""
    shown = table.rename(columns=headings)[[*headings.values()]]
    return shown.to_html(
        index=False,
        border=0,
        na_rep="",
        float_format=lambda value: f"{value:.4g}".replace("-", "−"),
    )


def _figure(caption: str, coupling: str, picture: bytes) -> str:
    caption = html.escape(capitalised(caption.format(coupling=coupling)))
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return (
        f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'
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
        "--out",
        type=Path,
        help="directory for tables, figures and page; default: analysis, in the first directory",
    )
    for name, values in SHOWN.items():
        parser.add_argument(
            f"--{name}", help=f"what figures show: {values}; default: as in the primary test"
        )
    parsed = parser.parse_args(arguments)
    from vit.results import POSITIONS, read_grid
    from vit.statistics import primary

    first = parsed.grid[0]
    grid = read_grid(*parsed.grid)
    at = primary(grid)
    words = {token: word for word, token in POSITIONS.items()}
    for name in SHOWN:
        measured = {words.get(value, str(value)): value for value in grid[name].values.tolist()}
        given = parsed[name]
        word = words.get(POSITIONS.get(given) or given, given)
        if word in measured:
            at[name] = measured[word]
        elif given is not None:
            raise UsageError(
                f"--{name} {given} was not measured; choose from {', '.join(measured)}"
            )
    out = parsed.out or (first.parent if first.is_file() else first) / "analysis"
    print(write_analysis(grid, at, out))
    return OK


if __name__ == "__main__":
    sys.exit(main())
