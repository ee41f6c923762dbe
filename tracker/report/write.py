"""The page: one self-contained HTML file from one store or several, interactive and with no network when opened.

`python -m tracker.report RESULTS... --out page.html`. Python takes the numbers from the stores (`summary`, `contents`),
`assets/*.js` draw them with Plotly.
"""

import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from string import Template
from typing import TYPE_CHECKING, Any

from tracker.common.command_line import OK, reports_errors
from tracker.common.errors import UsageError, require
from tracker.common.files import write_atomic
from tracker.common.text import capitalised, counted

if TYPE_CHECKING:
    import xarray as xr

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "numbers",
    "state",
    "chart",
    "training",
    "pair",
    "depth",
    "prompts",
    "tokens",
    "across",
    "page",
)  # in this order


def write_report(
    results: str | Path | Sequence[str | Path], out: str | Path, clusters: str | None = None
) -> Path:
    """Write the page of one store or several and return its path.

    Args:
        results: a directory that a walk (`--out`) or a training run (`save_dir`) wrote, or several, each shown by itself.
        clusters: which of them are not independent, as `--clusters` says it.

    Raises:
        FileNotFoundError: if a directory holds no results.
        ValueError: if a directory is given twice, a unit is damaged, or the units of one store make no curve, and for a mapping,
            as `tracker.summary` takes the runs of recipes.
        ImportError: without the extra `report`.
    """
    require("plotly", "tracker.report")
    from tracker.analysis.reduction import read_reduced
    from tracker.store import distinct_names

    if isinstance(results, Mapping):
        raise UsageError(
            "a page shows each run by itself: give a list of directories, and tracker.summary the runs of recipes"
        )
    directories = [
        Path(directory)
        for directory in ([results] if isinstance(results, (str, Path)) else results)
    ]
    if not directories:
        raise ValueError("a page of what? give a directory of results, or several")
    distinct_names(directories)  # before the units are read, which takes long
    return write_page(
        {directory: read_reduced(directory) for directory in directories}, Path(out), clusters
    )


def write_page(curves: "Mapping[Path, xr.Dataset]", out: Path, clusters: str | None = None) -> Path:
    """Write the page of stores, given their results, `reduced`, by directory."""
    from tracker.analysis.across_models import assign_clusters
    from tracker.store import distinct_names

    directories = dict(zip(distinct_names(list(curves)), curves, strict=True))
    summaries = assign_clusters(
        {name: curves[directory] for name, directory in directories.items()}, clusters
    )
    write_atomic(out, _page(summaries, directories).encode())
    return out


def _page(summaries: Mapping[str, "xr.Dataset"], directories: Mapping[str, Path]) -> str:
    from plotly.offline import get_plotlyjs

    from tracker.analysis.doubts import describe_differences, doubts
    from tracker.analysis.summary import kind_of_inputs
    from tracker.report.contents import carried, contents
    from tracker.report.texts import (
        lacking,
        onset_sentence,
        picture,
        precision_of_arrays,
        provenance,
        texts,
    )
    from tracker.store import Store, short_name

    models = {name: contents(ds) for name, ds in summaries.items()}
    several = len(models) > 1
    kinds = sorted({kind_of_inputs(ds) for ds in summaries.values()})
    inputs, differences = " or ".join(f"{kind}s" for kind in kinds), describe_differences(summaries)
    between, reason = _across(summaries)
    data = {
        "models": [
            {"name": name if several else short_name(ds), **models[name]}
            for name, ds in summaries.items()
        ],
        "texts": texts() | {"inputs": inputs},
        "differences": differences,
        "across": between,
    }
    # Apart from the rest, so that a browser reads the curves at once and a large array when it is drawn
    arrays = []
    for array in carried(data):
        arrays.append(array["codes"])
        array["codes"] = len(arrays) - 1
    said = {name: [_summary(ds), onset_sentence(models[name])] for name, ds in summaries.items()}
    stores = {name: Store(directory) for name, directory in directories.items()}
    tables = [
        f"<details{'' if several else ' open'}><summary>{_text(name)}</summary>"
        f"<div class=scroll {_region(f'How {name} was measured')}><table><tbody>"
        f"{_rows(provenance(ds, stores[name]))}</tbody></table></div></details>"
        for name, ds in summaries.items()
    ]
    first = _of_each({name: doubts(ds, stores[name].skipped()) for name, ds in summaries.items()})
    missing = _of_each({name: lacking(ds) for name, ds in summaries.items()})
    missing += [f"Fits between results: {reason}"] if reason else []
    title = (
        f"Block coupling of {', '.join(model['name'] for model in data['models'])} over training"
    )
    return Template((ASSETS / "template.html").read_text(encoding="utf-8")).substitute(
        title=_text(title),
        inputs=inputs,
        input=" or ".join(kinds),
        Inputs=capitalised(inputs),
        picture=picture(),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        summary=_items(_of_each(said)),
        numbers=_numbers(summaries),
        doubts=f"<div {_region('What to know first')} class=doubts><ul>{_items(first)}</ul></div>"
        if first
        else "",
        lacking=f"<ul>{_items(missing)}</ul>"
        if missing
        else "<p>Nothing that the page has a place for.</p>",
        carried=_text(precision_of_arrays(models)),
        css=_css(),
        script="\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        plotly=get_plotlyjs(),
        data=_json(data),
        arrays=_json(arrays),
        provenance="".join(tables),
    )


def _across(summaries: Mapping[str, "xr.Dataset"]) -> tuple[dict[str, Any] | None, str]:
    """Return the fits between results, or why there are none."""
    from tracker.analysis.across_models import compare_models
    from tracker.analysis.regression import MIN_POINTS

    if len(summaries) < MIN_POINTS:
        return None, ""
    try:
        return compare_models(summaries), ""
    except ValueError as why:
        return None, str(why)


def _css() -> str:
    from tracker.figures.drawing import css_variables

    themes = f":root {{ {css_variables('light')} }}\n:root[data-theme='dark'] {{ {css_variables('dark')} }}\n"
    return themes + (ASSETS / "page.css").read_text(encoding="utf-8")


def _json(value: Any) -> str:
    # After "<!--<script" in a name a browser would not see the end of the data.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _summary(ds: "xr.Dataset") -> str:
    from tracker.analysis.summary import kind_of_inputs
    from tracker.report.contents import layers

    steps, count = ds["step"].values, len(ds["step"])
    span = f"from step {steps[0]:,} to {steps[-1]:,}" if count > 1 else f"at step {steps[0]:,}"
    inputs = counted(ds.sizes["prompt"], kind_of_inputs(ds))
    return f"{counted(layers(ds), 'block')}, {counted(count, 'checkpoint')} {span}, {inputs}."


def _numbers(summaries: Mapping[str, "xr.Dataset"]) -> str:
    """Return the summary as a table that opens; "" for results without mis-couplings and without paths."""
    from tracker.analysis.summary import summary_of_reduced

    try:
        table = summary_of_reduced(summaries)
    except UsageError:
        return ""
    notes = _items(table.attrs["notes"])
    finding = table.attrs["finding"] and f"<p>{_text(table.attrs['finding'])}</p>"
    return (
        f"{finding}<details><summary>In numbers</summary><p>{_text(table.attrs['title'])}</p>"
        f"<div class='scroll numbers' {_region('Summary in numbers')}>{table.html_table()}</div><ul>{notes}</ul></details>"
    )


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f"<tr><th scope=row>{_text(key)}</th><td>{_text(value)}</td></tr>" for key, value in rows
    )


def _region(label: str) -> str:
    """Return the attributes that let a keyboard reach an area that scrolls."""
    return f'tabindex=0 role=region aria-label="{_text(label)}"'


def _of_each(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of all results that are not empty, after the name of each if there are several."""
    return [
        f"{name}: {line}" if len(lines) > 1 else line
        for name, of_result in lines.items()
        for line in filter(None, of_result)
    ]


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{_text(line)}</li>" for line in lines)


def _text(value: Any) -> str:
    return html.escape(str(value))


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from tracker.common.parser import CLUSTERS_HELP, Parser

    parser = Parser(
        prog="python -m tracker.report",
        description="Write the page of walks' and training runs' results.",
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        help="directories that walks or runs wrote (--out, save_dir): one page of all",
    )
    parser.add_argument(
        "--out", type=Path, help="the page; default, of one directory: report.html in it"
    )
    parser.add_argument("--clusters", type=str, help=CLUSTERS_HELP)
    parsed = parser.parse_args(arguments)
    if parsed.out is None and len(parsed.results) > 1:
        raise ValueError(
            f"{len(parsed.results)} directories of results make one page; say where it goes: --out page.html"
        )
    out = parsed.out or parsed.results[0] / "report.html"
    if out.is_dir():
        raise ValueError(
            f"--out {out} is a directory; name the file: --out {quote(str(out / 'page.html'))}"
        )
    print(write_report(parsed.results, out, parsed.clusters))
    return OK
