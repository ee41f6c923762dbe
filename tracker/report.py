"""The page: one self-contained HTML file from a store, interactive and with no network when opened.

`python -m tracker.report RESULTS --out page.html`. Python prepares the numbers, `page/page.js` draws them with Plotly.
"""

import base64
import html
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import xarray as xr

from checkpoints.files import write_whole
from checkpoints.integrity import explained
from tracker.coupling import MEASURES
from tracker.results import Store, open_results
from tracker.statistics import PAIRS, TRAJECTORY, by_distance, curves, quartiles, suspect

PAGE = Path(__file__).parent / "page"
CAPTIONS = {
    "miscoupling": "Mis-coupling m_K = |A − S|_F / |s|₂ (the project page's definition).",
    "miscoupling_release": "Mis-coupling as the authors' release has it: | |A| − S |_F / |s|₂.",
    "offdiag": "|A − Diag A|_F (paper, eq. 13), in units of the singular values.",
    "offdiag_normalized": "|A − Diag A|_F / |A|_F (paper, eq. 14), the paper's “normalized”.",
}
PAIR_NAMES = {"mean": "all pairs", "mean_offdiag": "off the diagonal", "mean_adjacent": "adjacent"}
FINAL_NORM = {"include": "final norm included", "exclude": "without it", "drop": "without the last block"}
RANKS = (1, 2, 5, 10, 20, 30, 50)


def write_report(results: str | Path, out: str | Path) -> Path:
    """Write the page of a store and return its path.

    Raises:
        FileNotFoundError: if there are no results.
        ValueError: if a unit is damaged.
    """
    dataset = open_results(results)
    from plotly.offline import get_plotlyjs

    name = dataset.attrs.get("suite") or dataset.attrs["model_class"].rpartition(".")[2]
    steps = dataset["step"].values
    summary = (
        f"{dataset.sizes['layer']} blocks, {len(steps)} checkpoints from step {steps[0]:,} to {steps[-1]:,}, "
        f"{dataset.sizes['prompt']} prompts."
    )
    doubts = "".join(f"<li>{html.escape(line)}</li>" for line in _doubts(dataset))
    page = Template((PAGE / "template.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Block coupling of {name} over training"),
        summary=html.escape(summary),
        doubts=f"<ul class=doubts>{doubts}</ul>" if doubts else "",
        css=(PAGE / "page.css").read_text(encoding="utf-8"),
        script=(PAGE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        data=json.dumps(page_data(dataset), allow_nan=False).replace("</", "<\\/"),
        provenance="".join(
            f"<tr><th scope=row>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>"
            for key, value in _provenance(dataset, Store(results))
        ),
    )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page.encode())
    return out


def page_data(dataset: xr.Dataset) -> dict[str, Any]:
    """The numbers that the page draws, JSON-able; undefined ones are null."""
    points = curves(dataset)
    measures = [name for name in MEASURES if name in dataset]
    ks = [int(k) for k in dataset["k"].values] if measures else []
    matrices = {name: dataset[name].mean(("prompt", "token")) for name in measures}
    data: dict[str, Any] = {
        "steps": [int(step) for step in dataset["step"].values],
        "suspect": [reason != "" for reason in suspect(dataset)],
        "layers": dataset.sizes["layer"],
        "ks": ks,
        "pairs": list(PAIRS),
        "pair_names": PAIR_NAMES,
        "captions": CAPTIONS,
        "final_norm": FINAL_NORM[dataset.attrs["final_norm"]],
        "window": int(dataset.attrs["window"]),
        "curves": {
            name: {k: {pairs: _curve(points.sel(k=k, pairs=pairs), name) for pairs in PAIRS} for k in ks}
            for name in measures
        },
        "matrices": {name: {k: _packed(matrices[name].sel(k=k)) for k in ks} for name in measures},
        "ranges": {name: {k: _range(matrices[name].sel(k=k)) for k in ks} for name in measures},
        "distance": {
            name: {k: _numbers(by_distance(matrices[name].sel(k=k)).transpose("step", "distance")) for k in ks}
            for name in measures
            if dataset.sizes["layer"] > 1
        },
        "trajectory": {
            name: {str(s): _numbers(points[name].sel(statistic=s)) for s in points["statistic"].values}
            for name in TRAJECTORY
            if name in points
        },
        "windows": {
            name: _spread(dataset[name]) for name in ("lss_window", "expodistance_raw_window") if name in dataset
        },
        "score": {},
    }
    if measures:
        ranks = [rank for rank in RANKS if rank <= dataset.sizes["rank"]]
        values = dataset["singular_value"].sel(rank=ranks).median(("prompt", "token"))
        data["singular"] = {"ranks": ranks, "values": _numbers(values.transpose("step", "rank", "layer"))}
    if "score" in points:
        data["score"] = {str(task): _numbers(points["score"].sel(task=task)) for task in points["task"].values}
    return data


def _doubts(dataset: xr.Dataset) -> list[str]:
    """What a reader should know about the weights behind the points."""
    steps = [int(step) for step in dataset["step"].values]
    lines = [f"Step {step:,} is suspect: {why}." for step, why in zip(steps, suspect(dataset), strict=True) if why]
    repeated = dataset["repeats"].values if "repeats" in dataset.coords else [-1] * len(steps)
    same = [explained(step, int(earlier)) for step, earlier in zip(steps, repeated, strict=True) if earlier >= 0]
    return lines + [f"{line[0].upper()}{line[1:]}." for line in same]


def _curve(points: xr.Dataset, name: str) -> dict[str, list]:
    return {
        "value": _numbers(points[name]),
        **{part: _numbers(points[f"{name}_{part}"]) for part in ("q25", "q75", "null")},
    }


def _spread(values: xr.DataArray) -> dict[str, list]:
    """Quartiles over prompts and positions, by step and layer."""
    spread = quartiles(values, ("prompt", "position")).transpose("statistic", "step", "layer")
    return {str(name): _numbers(spread.sel(statistic=name)) for name in spread["statistic"].values}


def _numbers(values: xr.DataArray) -> list:
    """Nested lists with null where a value is undefined."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return value if math.isfinite(value) else None

    return plain(values.values.tolist())


def _range(matrix: xr.DataArray) -> list[float]:
    """Smallest and largest value off the trivial diagonal, over all steps."""
    off_diagonal = matrix.where(matrix["layer"] != matrix["layer_other"])
    low, high = float(off_diagonal.min()), float(off_diagonal.max())
    return [low, high] if math.isfinite(low) else [0.0, 1.0]


def _packed(matrix: xr.DataArray) -> str:
    ordered = matrix.transpose("step", "layer", "layer_other").values
    return base64.b64encode(np.ascontiguousarray(ordered, dtype="<f4").tobytes()).decode()


def _provenance(dataset: xr.Dataset, store: Store) -> list[tuple[str, str]]:
    rows = [("results", store.path.name)]
    settings = store.path / "settings.json"
    if settings.is_file():
        rows += [(f"asked for: {name}", str(value)) for name, value in json.loads(settings.read_text()).items()]
    rows += [(name.replace("_", " "), str(value)) for name, value in dataset.attrs.items() if name != "blocks"]
    if "complete" in dataset:
        residual, complete = dataset["residual"], dataset["complete"] == 1
        sliced = dataset["sliced"] == 1
        there = residual.notnull()
        count = int(there.sum())
        rows += [
            (
                "block Jacobians",
                f"{count:,}, of which {int(sliced.where(there).sum()):,} from single rows, the rest over the full sequence",
            ),
            ("largest residual of a triplet / s₁", f"{float(residual.max()):.1e}"),
            ("complete top-K sets", f"{int(complete.where(there).sum()):,} of {count:,} (certified by Cholesky)"),
            ("largest value-proof error", f"{float(dataset['value_error'].max()):.1e}"),
            ("largest derivative-proof error", f"{float(dataset['derivative_error'].max()):.1e}"),
        ]
    undefined = dataset["undefined"]
    totals = {str(q): int(undefined.sel(quantity=q).sum()) for q in undefined["quantity"].values}
    rows.append(("undefined values", ", ".join(f"{q}: {n:,}" for q, n in totals.items() if n) or "none"))
    if "commit" in dataset.coords:
        commits = zip(
            dataset["step"].values, np.broadcast_to(dataset["commit"].values, dataset.sizes["step"]), strict=True
        )
        rows.append(("commits", ", ".join(f"step {step}: {str(commit)[:8]}" for step, commit in commits)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.report", description="Write the page of a walk's or a run's results."
    )
    parser.add_argument("results", type=Path, help="the directory that a walk wrote (--out)")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the results")
    parsed = parser.parse_args(arguments)
    try:
        print(write_report(parsed.results, parsed.out or parsed.results / "report.html"))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
