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

    from tracker.figures.drawing import Theme

TEMPLATE = Path(__file__).parent / "page.html"
SHOWN = {"token": str, "measure": str, "k": int, "pairs": str}  # of the mis-coupling in the figures
POINTS = (
    "Each panel is a stochastic depth rate, each large point a setting (the mean over its seeds), each small point a cell; "
    "colours show the weight decay."
)
CAPTIONS = {
    "accuracy": f"Test accuracy against {{coupling}} (paper, Fig. 6a). {POINTS} r with its 95 % interval (Fisher's z), over "
    "weight decays; below it the reliabilities of {coupling} and of accuracy. Grey bars are one standard error of an accuracy on "
    "so many test images.",
    "loss": f"Test loss against {{coupling}}. {POINTS}",
    "rates": "{coupling} against stochastic depth for every weight decay (paper, Figs. 6b and 10). Points are seeds, the line is "
    "their mean.",
    "training": "{coupling} over training for each stochastic depth rate, over steps and, where it was recorded, over the "
    "loss on plain training images. Lines are means over weight decays and seeds, bands their range.",
    "reliability": "Reliability within stochastic depth rates, with 95 % interval, at one K: the share of the variance of the "
    "decays' means that is not noise of their seeds. Beyond the line at 0.5 decays vary more than that noise.",
    "which": "Correlation r with accuracy, by definition, K and layer pairs, within stochastic depth rates. A star "
    "marks p below 0.05 after Holm's correction for all definitions.",
}
COUPLING_IS = {
    "coupling": "Coupling is the null level, the mis-coupling of unrelated blocks, minus mis-coupling: 0 (dotted) for unrelated "
    "blocks, and higher the more the blocks share one basis.",
    "minus mis-coupling": "This grid holds no exact null level of this definition, so that minus mis-coupling stands for "
    "coupling: it has no zero, and is higher the more the blocks share one basis.",
}
OF_TESTS = {  # columns of the page, and their headings
    "question": "question",
    "token": "position",
    "role": "test",
    "units": "units",
    "r": "r [95 % interval]",
    "p": "p",
    "p_holm": "p, corrected",
    "coupling": "reliability of {coupling}",
    "outcome": "reliability of the outcome",
    "detectable": "r found with 80 % power",
    "attainable": "largest r to expect",
    "detectable_true": "true r found with 80 % power",
    "why": "not answered, because",
}
OF_FITS = {
    "outcome": "outcome",
    "rates": "stochastic depth",
    "units": "weight decays",
    "r": "r [95 % interval]",
    "coupling": "reliability of {coupling}",
    "of_outcome": "reliability of the outcome",
    "slope": "slope",
    "p": "p",
    "p_holm": "p, corrected",
    "why": "no r, because",
}
NOTE_ON_FITS = (
    "“Within all rates” is the fit to the means of weight decays over all rates and seeds, “rate” that to the means of one rate "
    "over seeds. p is corrected (Holm) over all rows of correlations.csv: both outcomes, all rates, positions, measures, K and "
    "layer pairs."
)
OF_CELLS = {
    "weight_decay": "weight decay",
    "drop_path": "stochastic depth",
    "seed": "seed",
    "accuracy": "test accuracy",
    "loss": "test loss",
    "training_loss": "training loss",
}


def write_analysis(grid: "xr.Dataset", at: dict[str, Any], out: Path) -> Path:
    """Write grid.nc, cells.csv, tests.csv, reliability.csv, correlations.csv, the figures and report.html.

    Args:
        at: the token, measure, k and pairs that the figures show.

    Returns:
        The path of the page.
    """
    from tracker.analysis.regression import FEWEST_POINTS
    from tracker.common.text import capitalised
    from tracker.figures.drawing import css_variables
    from vit.answers import answers, cautions, either, exploratory, reliable_measures
    from vit.figures import described
    from vit.results import GRID_FILE, write_grid
    from vit.statistics import (
        cell_table,
        column,
        correlations,
        named_tests,
        primary,
        quantities,
        quantity,
        reliabilities,
    )

    cells, tests, reliable = cell_table(grid), named_tests(grid), reliabilities(grid)
    table = correlations(grid)
    pictures = {theme: _drawn(grid, at, table, reliable, theme) for theme in ("light", "dark")}
    out.mkdir(parents=True, exist_ok=True)
    write_grid(grid, out / GRID_FILE)
    for file, content in (
        ("cells", cells),
        ("tests", tests),
        ("reliability", reliable),
        ("correlations", table),
    ):
        write_atomic(out / f"{file}.csv", content.to_csv(index=False).encode())
    for key, picture in pictures["light"].items():
        write_atomic(out / f"{key}.png", picture)
    word = quantity(grid, at)
    shown = {
        key: _figure(
            capitalised(CAPTIONS[key].format(coupling=word)), picture, pictures["dark"][key]
        )
        for key, picture in pictures["light"].items()
    }
    fits = table.loc[(table[list(at)] == list(at.values())).all(axis=1)]
    headings = OF_CELLS | {column(quantities(grid), at): described(grid, at)}
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        light=css_variables("light"),
        dark=css_variables("dark"),
        title=html.escape(f"Coupling and accuracy: {grid.attrs['data']}"),
        grid=html.escape(_grid(grid, at)),
        coupling=html.escape(COUPLING_IS[word]),
        answers=_items(cautions(grid) + answers(tests)),
        limits=_limits(grid),
        fewest=FEWEST_POINTS,
        tests=_table(_worded_tests(tests), _headings(OF_TESTS, quantity(grid, primary(grid))), 2),
        outcomes=shown["accuracy"] + shown["loss"],
        rates=shown["rates"],
        training=shown["training"],
        reliable=_items(reliable_measures(reliable)),
        reliability=shown.get("reliability", ""),
        exploratory=html.escape(exploratory(table, either(quantities(grid).values()))),
        which=shown.get("which", ""),
        correlations=_fits(fits, word),
        cells=_table(cells, headings, 4),
        unfinished=_items(grid.attrs["unfinished"] or ["none"]),
    )
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _drawn(
    grid: "xr.Dataset",
    at: dict[str, Any],
    table: "pd.DataFrame",
    reliable: "pd.DataFrame",
    theme: "Theme",
) -> dict[str, bytes]:
    """Draw the figures that the grid has numbers for, as PNG, by name."""
    from matplotlib import rc_context

    from vit import figures

    pictures = {}
    with rc_context(figures.style(theme)):
        drawings = {
            "accuracy": figures.outcome_against_coupling(grid, at, "accuracy", theme),
            "loss": figures.outcome_against_coupling(grid, at, "loss", theme),
            "rates": figures.coupling_against_rate(grid, at),
            "training": figures.coupling_over_training(grid, at, theme),
        }
        if table["r"].notna().to_numpy().any():
            drawings["which"] = figures.correlations_with_accuracy(grid, table, at["token"])
        if reliable["reliability"].notna().to_numpy().any():
            drawings["reliability"] = figures.reliability_of_measures(reliable, at["k"])
        for key, figure in drawings.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=200, format="png")
            pictures[key] = buffer.getvalue()
    return pictures


def _grid(grid: "xr.Dataset", at: dict[str, Any]) -> str:
    from tracker.common.text import counted
    from vit.figures import described

    decays, rates, seeds = (
        len(set(grid[name].values)) for name in ("weight_decay", "drop_path", "seed")
    )
    accuracy = grid["accuracy"]
    return (
        f"{counted(grid.sizes['cell'], 'vision transformer')} on {grid.attrs['data']}: {counted(decays, 'weight decay')}, "
        f"{counted(rates, 'stochastic depth rate')}, {counted(seeds, 'seed')}. Accuracy on {grid.attrs['images']:,} test images "
        f"from {float(accuracy.min()):.4f} to {float(accuracy.max()):.4f}. Figures show {described(grid, at)}."
    )


def _limits(grid: "xr.Dataset") -> str:
    """Return what a grid of one seed can't answer, and how many trainings two more take, as HTML; "" for other grids."""
    from vit.answers import more_seeds
    from vit.statistics import FEWEST_SEEDS

    decays, rates, seeds = (
        sorted(set(grid[name].values.tolist())) for name in ("weight_decay", "drop_path", "seed")
    )
    if len(seeds) >= FEWEST_SEEDS:
        return ""
    return (
        "<p>One seed answers no question across rates, and shows no reliability. "
        f"--seeds {more_seeds(seeds[0])} adds {2 * len(decays) * len(rates)} trainings; vit.grid --dry_run states their time.</p>"
    )


def _worded_tests(tests: "pd.DataFrame") -> "pd.DataFrame":
    """Return the columns of `OF_TESTS`."""
    from tracker.common.text import counted
    from vit.answers import interval

    rows = tests.to_dict("records")
    set_by_us = [row["x"] == "drop_path" for row in rows]
    words = {
        "units": [counted(row["n"], row["unit"]) for row in rows],
        "r": [interval(row, "r") for row in rows],
        "coupling": [
            interval(row, f"reliability_{'y' if rate else 'x'}")
            for row, rate in zip(rows, set_by_us, strict=True)
        ],
        "outcome": [
            "" if rate else interval(row, "reliability_y")
            for row, rate in zip(rows, set_by_us, strict=True)
        ],
    }
    return tests.assign(**words)


def _worded_fits(fits: "pd.DataFrame") -> "pd.DataFrame":
    """Return the columns of `OF_FITS`."""
    from vit.answers import LABELS, interval

    rows = fits.to_dict("records")
    words = {
        "outcome": [LABELS[row["outcome"]] for row in rows],
        "rates": [
            "within all rates" if row["drop_path"] == "fixed" else f"rate {row['drop_path']}"
            for row in rows
        ],
        "units": fits["n"],
        "r": [interval(row, "r") for row in rows],
        "coupling": [interval(row, "reliability_x") for row in rows],
        "of_outcome": [interval(row, "reliability_y") for row in rows],
    }
    return fits.assign(**words)


def _fits(fits: "pd.DataFrame", coupling: str) -> str:
    """Return the table of fits and its note as HTML; "" where no fit has an r."""
    if not fits["r"].notna().to_numpy().any():
        return ""
    shown = _table(_worded_fits(fits), _headings(OF_FITS, coupling), 3)
    return f'<div class="scroll">{shown}</div><p class="note">{NOTE_ON_FITS}</p>'


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _headings(columns: dict[str, str], coupling: str) -> dict[str, str]:
    return {name: heading.format(coupling=coupling) for name, heading in columns.items()}


def _table(table: "pd.DataFrame", headings: dict[str, str], digits: int) -> str:
    """Return the columns that hold anything, under their headings, as HTML."""
    held = [
        name
        for name in headings
        if any(value not in ("", None) and value == value for value in table[name])
    ]
    shown = table[held].set_axis([headings[name] for name in held], axis=1)
    return shown.to_html(
        index=False,
        border=0,
        na_rep="",
        float_format=lambda value: f"{value:.{digits}g}".replace("-", "−"),
        classes=["reasons"] if "why" in held else [],
    )


def _figure(caption: str, light: bytes, dark: bytes) -> str:
    caption = html.escape(caption)
    source, dark_source = (
        f"data:image/png;base64,{base64.b64encode(of).decode()}" for of in (light, dark)
    )
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark_source}">'
        f'<img alt="{caption}" src="{source}"></picture><figcaption>{caption}</figcaption></figure>'
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
    for name, kind in SHOWN.items():
        parser.add_argument(
            f"--{name}", type=kind, help="shown in figures; default: that of the primary test"
        )
    parsed = parser.parse_args(arguments)
    from tracker.common.errors import UsageError
    from vit.results import read_grid
    from vit.statistics import primary

    first = parsed.grid[0]
    grid = read_grid(*parsed.grid)
    at = primary(grid) | {name: parsed[name] for name in SHOWN if parsed[name] is not None}
    for name, value in at.items():
        if value not in grid[name].values:
            raise UsageError(
                f"--{name} {value} was not measured; choose from {', '.join(map(str, grid[name].values))}"
            )
    out = parsed.out or (first.parent if first.is_file() else first) / "analysis"
    print(write_analysis(grid, at, out))
    return OK


if __name__ == "__main__":
    sys.exit(main())
