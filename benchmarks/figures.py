"""Figure of the cost against prompt length and width, from results: `python -m benchmarks.figures --out docs`."""

import json
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracker.figures.drawing import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"ours": BLUE, "published": ORANGE, "products of d cotangents": GREY}


def cost(results: Sequence[dict[str, Any]]) -> "Figure":
    """Draw the seconds per block and prompt, without the forward pass: against n for each d, and against d for each n."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    compared = [result for result in results if result["what"] == "coupling"]
    for axes, x, fixed, drawn in zip(panels, ("n", "d"), ("d", "n"), (results, compared), strict=True):
        points = [point for result in drawn for point in _points(result)]
        x_of: dict[int, set[int]] = {}
        for point in points:
            x_of.setdefault(point[fixed], set()).add(point[x])
        if any(len(at) > 1 for at in x_of.values()):  # leave out points that form no line
            points = [point for point in points if len(x_of[point[fixed]]) > 1]
        for name, colour in COLOURS.items():
            here = [point for point in points if point["name"] == name]
            for style, value in zip(
                cycle(("-", "--", ":", "-.")), sorted({point[fixed] for point in here}), strict=False
            ):
                line = sorted({point[x]: point["seconds"] for point in here if point[fixed] == value}.items())
                axes.plot(
                    *zip(*line, strict=True),
                    color=colour,
                    ls=style,
                    marker="o",
                    ms=3,
                    label=f"{name}, {fixed} = {value}",
                )
        ticks = sorted({point[x] for point in points})
        axes.set(xscale="log", yscale="log", ylabel="seconds per block and prompt")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    panels[0].set(xlabel="tokens n", title="Cost against prompt length")
    panels[1].set(xlabel="width d", title="Cost against width")
    return figure


def _points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the costs in a result, each at an n and a d."""
    d, L = result["width"], result["blocks"]

    def point(name: str, n: int, timed: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "n": n, "d": d, "seconds": (timed["seconds"] - timed["stages"]["forward"]) / L}

    if result["what"] == "scaling":
        return [point("ours", timed["tokens"], timed) for timed in result["points"] if timed["prompts"] == 1]
    n = result["tokens"]
    products = {"name": "products of d cotangents", "n": n, "d": d, "seconds": result["gemm"]["seconds_per_block"]}
    return [products, *(point(name, n, result[name]) for name in ("ours", "published") if name in result)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import Parser

    parser = Parser(prog="python -m benchmarks.figures", description="Draw the cost of a measurement.")
    results = Path(__file__).parent / "results"
    parser.add_argument(
        "results", type=Path, nargs="?", default=results, help="directory with JSON files of benchmarks"
    )
    parser.add_argument("--k", type=int, default=50, help="number of singular vectors of the results to draw")
    parser.add_argument("--device", default="cpu", help="device of the results to draw")
    parser.add_argument("--out", type=Path, default=Path("."), help="directory for cost.png")
    parsed = parser.parse_args(arguments)
    everything = [json.loads(file.read_text()) for file in sorted(parsed.results.glob("*.json"))]
    measurements = [result for result in everything if result.get("what") in ("coupling", "scaling")]
    wanted = {"k": parsed.k, "device": parsed.device, "precision": "float32"}
    chosen = [result for result in measurements if result["settings"] | wanted == result["settings"]]
    if not chosen:
        have = sorted({(r["settings"]["k"], r["settings"]["device"]) for r in measurements})
        settings = f"--k {parsed.k} --device {parsed.device}"
        print(f"error: no results in {parsed.results} for {settings}; there are (k, device): {have}", file=sys.stderr)
        return 2
    parsed.out.mkdir(parents=True, exist_ok=True)
    file = parsed.out / "cost.png"
    cost(chosen).savefig(file, dpi=150)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
