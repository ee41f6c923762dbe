"""The command line of figures: `python -m tracker.figures 1b results/nano --out figures` writes PDF, PNG and CSV.

`python -m tracker.figures list RESULTS` lists all figures, and what the results lack for them. Heavy imports come after the
arguments are parsed, so that --help is quick.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracker.common.command_line import OK, reports_errors
from tracker.common.errors import UsageError
from tracker.common.values import INTEGERS
from tracker.figures.choices import Axis, Convention

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tracker.analysis.across_models import Results


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import CLUSTERS_HELP, Parser

    parser = Parser(
        prog="python -m tracker.figures",
        description="Draw the paper's figures, and others, from the results of walks or training runs.",
    )
    parser.add_argument(
        "name",
        type=str,
        help="a figure of the paper (1a to 36, table1, table4); curves or heatmap; all; or list, which lists "
        "them, and those of the paper that are not drawn",
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        help="directories written by walks (--out) or training runs (save_dir)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("."), help="directory for NAME.pdf, NAME.png and NAME.csv"
    )
    parser.add_argument(
        "--k",
        type=int,
        help="number of singular vectors K; default: the smallest that all results have",
    )
    parser.add_argument(
        "--measure", type=str, help="of curves, heatmap and 1b: the measure of pairs of blocks"
    )
    parser.add_argument(
        "--step", type=int, help="the training step of heatmap, or the one that curves and 1b mark"
    )
    parser.add_argument(
        "--layers",
        type=INTEGERS,
        help="blocks that 3, 28 and 29 show, such as 9-16, or the one of 4, 18, 19",
    )
    parser.add_argument(
        "--axis",
        type=Axis,
        default="auto",
        help="scale of training steps; auto: linear if evenly spaced",
    )
    parser.add_argument(
        "--convention",
        type=Convention,
        default="package",
        help="paper: minus mis-coupling, mean over all pairs, and variables that count the final norm, where there are such; "
        "results without them are refused",
    )
    parser.add_argument("--clusters", type=str, help=CLUSTERS_HELP)
    parsed = parser.parse_args(arguments)
    # Before the results are opened, which takes long
    names = _named(parsed.name, bool(parsed.results))
    from tracker.analysis.across_models import assign_clusters
    from tracker.store import distinct_names, open_results

    named = zip(distinct_names(parsed.results), parsed.results, strict=True)
    results = {name: open_results(directory) for name, directory in named}
    _run(parsed, names, assign_clusters(results, parsed.clusters))
    return OK


def _named(name: str, has_results: bool) -> list[str]:
    """Return the figures that a name stands for; none for the list of figures."""
    from tracker.figures.registry import FIGURES
    from tracker.figures.selection import resolve

    if name == "list":
        return []
    names = list(FIGURES) if name == "all" else [resolve(name)]
    if not has_results:
        raise UsageError(f"figure {name} needs results; give a directory of results")
    return names


def _run(parsed: Namespace, wanted: Sequence[str], results: "Results") -> None:
    from tracker.figures.registry import FIGURES
    from tracker.figures.selection import CHOSEN, availability, draw

    every = parsed.name == "all"
    if parsed.name == "list":
        print("\n".join(availability(results)))
    lacking: dict[str, list[str]] = {}  # figures by what the results lack for them
    for figure in wanted:
        # Recipes are given in Python alone.
        options = [
            option
            for option in CHOSEN
            if option in parsed and (not every or option in FIGURES[figure].takes)
        ]
        chosen = {option: getattr(parsed, option) for option in (*options, "convention")}
        try:
            _save(figure, *draw(figure, results, parsed.k, **chosen), parsed.out)
        except UsageError as error:
            if not every:
                raise
            lacking.setdefault(
                str(error).removeprefix(f"figure {figure} can't be drawn: "), []
            ).append(figure)
    for reason, figures in lacking.items():
        print(f"not drawn: {', '.join(figures)}: {reason}")


def _save(name: str, figure: "Figure", table: "pd.DataFrame", out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.pdf")
    figure.savefig(out / f"{name}.png", dpi=150)
    table.to_csv(out / f"{name}.csv", index=False)
    print(out / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
