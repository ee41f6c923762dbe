"""Figures from results: `python -m tracker.figures 1b results/nano --out figures`, each as PDF, PNG and CSV.

`python -m tracker.figures list RESULTS` says what each figure shows and needs, and which the given results can make.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import xarray as xr

from tracker.analysis.across_models import shared_ks
from tracker.analysis.clusters import CLUSTERS_HELP, assign_clusters
from tracker.results import distinct_names, open_results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LETTERS = 13  # of a title, to the inch
OWN = {
    "curves": "mis-coupling, line-shape score and expodistance over training, with null level and quartiles",
    "heatmap": "the matrix of layer pairs after the last step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.figures",
        description="Draw the paper's figures, and others, from a walk's or a run's results.",
    )
    parser.add_argument(
        "name",
        type=str,
        help="a figure of the paper (1a to 36, table1, table4), definitions, curves, heatmap, all, or list",
    )
    parser.add_argument("results", type=Path, nargs="*", help="directories that walks or runs wrote (--out, save_dir)")
    parser.add_argument("--out", type=Path, default=Path("."), help="directory for NAME.pdf, NAME.png and NAME.csv")
    parser.add_argument("--k", type=int, help="number of singular vectors; default: the smallest measured")
    parser.add_argument("--clusters", type=str, help=CLUSTERS_HELP)
    parsed = parser.parse_args(arguments)
    try:
        results = assign_clusters(_open(parsed.results), parsed.clusters)
        return _run(parsed.name, results, parsed.k, parsed.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _open(directories: Sequence[Path]) -> dict[str, xr.Dataset]:
    names = distinct_names(directories)
    return {name: open_results(directory) for name, directory in zip(names, directories, strict=True)}


def _run(name: str, results: dict[str, xr.Dataset], k: int | None, out: Path) -> int:
    from tracker.figures.paper import FIGURES

    if name == "list":
        _list(results)
        return 0
    wanted = name if name == "all" else known(name)
    if not results:
        raise ValueError(f"figure {name} of what? give a directory of results")
    if name != "all":
        _save(wanted, *draw(wanted, results, k), out)
        return 0
    for one in (*OWN, *FIGURES):
        try:
            _save(one, *draw(one, results, k), out)
        except ValueError as error:
            print(f"{one}: {error}")
    return 0


def known(name: str) -> str:
    """The name under which a figure is drawn: some of the paper's show the same.

    Raises:
        ValueError: for a figure that is not there, or that another command draws.
    """
    from tracker.figures.paper import ELSEWHERE, FIGURES, SAME

    if name in ELSEWHERE:
        raise ValueError(f"figure {name} is of a grid of vision transformers: {ELSEWHERE[name]}")
    if SAME.get(name, name) not in {*FIGURES, *OWN}:
        raise ValueError(
            f"{name!r} is no figure; choose from all, list, {', '.join([*OWN, *FIGURES, *SAME, *ELSEWHERE])}"
        )
    return SAME.get(name, name)


def draw(name: str, results: Mapping[str, xr.Dataset], k: int | None) -> "tuple[Figure, pd.DataFrame]":
    """One figure, by a `known` name, and its numbers.

    Raises:
        ValueError: if the results can't make it; says what to run.
    """
    from tracker.figures.paper import FIGURES, lacks

    if name not in OWN and (why := lacks(FIGURES[name], results)):
        raise ValueError(f"figure {name} can't be drawn: {why}")
    ks = shared_ks(results)
    if (k is not None and k not in ks) or (not ks and any("k" in ds.coords for ds in results.values())):
        raise ValueError(f"--k {k} was not measured in all results; they share {', '.join(map(str, ks)) or 'none'}")
    k = k if k is not None else ks[0] if ks else 0
    if name in OWN:
        return _own(name, results, k)
    figure, table = FIGURES[name].draw(results, k)
    figure.suptitle(fill(FIGURES[name].title, int(LETTERS * figure.get_figwidth())), fontsize=10)
    return figure, table


def _own(name: str, results: Mapping[str, xr.Dataset], k: int) -> "tuple[Figure, pd.DataFrame]":
    from tracker.analysis.statistics import curves
    from tracker.figures.drawing import coupling_heatmap, training_curves

    ds = next(iter(results.values()))
    if len(results) > 1 or "miscoupling" not in ds or (name == "curves" and "lss" not in ds):
        raise ValueError(f"figure {name} is drawn of one directory of results, with the usual measures in it")
    if name == "heatmap":
        last = ds.isel(step=-1)
        return coupling_heatmap(last, k), last["miscoupling"].sel(k=k).mean(("prompt", "token")).to_dataframe()
    points = curves(ds)
    return training_curves(points, k, ds.attrs.get("suite", "")), points.sel(k=k, pairs="mean_offdiag").to_dataframe()


def _save(name: str, figure: "Figure", table: "pd.DataFrame", out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.pdf")
    figure.savefig(out / f"{name}.png", dpi=150)
    table.to_csv(out / f"{name}.csv")
    print(out / f"{name}.png")


def _list(results: dict[str, xr.Dataset]) -> None:
    """Every figure: its number, what it shows, and what is still needed for it."""
    from tracker.figures.paper import ELSEWHERE, FIGURES, SAME, lacks

    for name, what in OWN.items():
        print(f"{name:8} {what}")
    for name, figure in FIGURES.items():
        again = "".join(f", {other}" for other, same in SAME.items() if same == name)
        needs = ", ".join(figure.needs)
        said = (lacks(figure, results) or "can be made") if results else f"needs {needs}"
        print(f"{name + again:8} {figure.title}; {said}")
    for name, command in ELSEWHERE.items():
        print(f"{name:8} of a grid of vision transformers: {command}")
