"""Cost of a coupling measurement: `python -m benchmarks.coupling --shape 410m --tokens 128 --blocks 4`.

Times three things in turn, in one process, with the same weights and prompt: `tracker.measure`, the published algorithm, and
plain matrix products with the shapes of a block's linear layers. Reported are medians and their ratios. With fewer blocks than
the shape has, ratios hold for those blocks: the cost of a block does not depend on the others, and the cost of the pairs grows
with the square of their number.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tracker.common.command_line import OK, reports_errors
from tracker.common.errors import UsageError
from tracker.common.values import Method, Precision

OTHERS = "published", "by_hand"  # algorithms


@dataclass
class Benchmark:
    """Time a coupling measurement, the published algorithm and plain matrix products.

    Args:
        shape: a Pythia size, deit-ti (32 x 32 images of 65 tokens) or deit-ti-224 (224 x 224, 197 tokens); random weights.
        tokens: length of the prompts.
        k: number of top singular vectors.
        blocks: number of blocks, the first ones. Default: all, for which the published algorithm takes hours on large shapes.
        prompts: number of prompts or images in a call of tracker.measure; the published algorithm takes one.
        svd: the method of tracker.measure for singular vectors.
        precision: of the matrix products in the Jacobians of tracker.measure, and of the plain products they are compared with.
        weights: dtype of the model's weights; the published Pythias have float16, which the published algorithm cannot take.
        memory_budget: bytes in addition to the weights; half of them hold Jacobians. Default: that of tracker.measure.
        device: cpu, cuda, cuda:1 and so on.
        repeats: number of timed runs of each; medians are reported.
        published: whether to run the published algorithm at all.
        by_hand: whether to time torch.func.jacrev of one row too, written by hand for Pythia.
        memory: whether to measure the peak of memory on a CPU, in a fresh process for each algorithm.
        out: a JSON file for the result, written after every repeat.
    """

    shape: Literal[
        "14m",
        "31m",
        "70m",
        "160m",
        "410m",
        "1b",
        "1.4b",
        "2.8b",
        "6.9b",
        "12b",
        "deit-ti",
        "deit-ti-224",
    ]
    tokens: int = 128
    k: int = 50
    blocks: int | None = None
    prompts: int = 1
    svd: Method = "auto"
    precision: Precision = "float32"
    weights: Literal["float32", "float16", "bfloat16"] = "float32"
    memory_budget: int | None = None
    device: str = "cpu"
    repeats: int = 5
    published: bool = True
    by_hand: bool = False
    memory: bool = True
    out: Path | None = None


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import parsed

    settings = parsed(Benchmark, "benchmarks.coupling", arguments)
    for name in ("tokens", "k", "blocks", "prompts", "repeats", "memory_budget"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}; give at least 1")
    if settings.weights != "float32" and settings.published:
        raise UsageError(
            f"--weights {settings.weights}: the published algorithm needs float32; add --published false"
        )
    if settings.by_hand and (settings.weights != "float32" or settings.shape.startswith("deit")):
        raise UsageError("--by_hand needs a Pythia size with --weights float32")

    from tracker.provenance import usable_device

    usable_device(settings.device, f"--device {settings.device}")
    print(table(coupling(settings)))
    return OK


def coupling(settings: Benchmark) -> dict[str, Any]:
    """Time `tracker.measure`, the published algorithm and matrix products in turn, and compare times and values."""
    from benchmarks import machine, published, shapes, timing

    # First: the load average is to exclude this benchmark
    environment = machine.environment(settings.device)
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    linear = machine.linear_shapes(shapes.blocks(model)[0])
    L, d = len(shapes.blocks(model)), linear[0][1]
    # Of d cotangents in a block
    flops = sum(2 * d * outputs * inputs for outputs, inputs in linear)
    others = [name for name in OTHERS if getattr(settings, name)]
    kept = ("jacobian",) if others else ()  # a large model's would fill the memory
    clock = machine.Clock(settings.device)
    with machine.counted_products() as counted:  # an untimed run of each, to warm up
        dataset = timing.ours(model, settings, clock, kept)
    errors = {
        name: published.errors(dataset, *timing.RUNS[name](model, settings, clock))
        for name in others
    }
    result: dict[str, Any] = {
        "settings": machine.settings_of(settings),
        "environment": environment,
        "blocks": L,
        "width": d,
        "tokens": shapes.length(settings.shape, settings.tokens),
        "certificate": certificate(dataset),
    }
    saved_share = 1 - sum(counted) / (flops * L * settings.prompts)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", *others)}
    products = []
    for repeat in range(settings.repeats):
        print(f"run {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
        for name, made in runs.items():
            made.append(timing.timed(timing.RUNS[name], model, settings))
            result[name] = timing.medians(made)
        products.append(machine.gemm_seconds(linear, d, settings.device, settings.precision))
        result["gemm"] = {"layers": linear, "flops_per_second": flops / median(products)}
        ours = result["ours"]
        ours |= _rates(ours, settings, median(products) * L, saved_share)
        for name in others:
            ratio = result[name]["seconds"] / ours["seconds_per_prompt"]
            result[name] |= {"errors": errors[name], "ratio": {"whole": ratio}}
        machine.save(result, settings.out)  # what is measured so far outlives a run that is stopped
    if settings.memory and settings.device == "cpu":
        for name in runs:
            peak = machine.alone(timing.peak, timing.RUNS[name], settings)
            result[name]["peak_bytes"] = peak
        machine.save(result, settings.out)
    return result


def certificate(dataset: Any) -> dict[str, Any]:
    """Summarise the certificates of the singular vectors and the ways in which the Jacobians were computed."""
    shares = ("complete", "full_svd", "sliced")
    return {
        "residual": float(dataset["diagnostics_residual"].max()),
        "smallest_gap": float(dataset["diagnostics_singular_gap"].min()),
        **{name: float(dataset[f"diagnostics_{name}"].mean()) for name in shares},
    }


def _rates(
    ours: dict[str, Any], settings: Benchmark, gemm_seconds: float, saved: float
) -> dict[str, Any]:
    """Compare the stages of `tracker.measure` with the machine's matrix products.

    Args:
        gemm_seconds: of the products of d cotangents in all blocks.
        saved: fraction of the operations of the d cotangents that were not needed.
    """
    needed = (1 - saved) * gemm_seconds * settings.prompts
    return {
        "seconds_per_prompt": ours["seconds"] / settings.prompts,
        "products_saved": saved,
        "fraction_of_gemm_rate": {"jacobian": needed / ours["stages"]["jacobian"]},
    }


def table(result: dict[str, Any]) -> str:
    """Format a result for a terminal: what was measured, then a column for each algorithm."""
    import pandas as pd

    gemm = result["gemm"]["flops_per_second"] / 1e9
    names = [name for name in ("ours", *OTHERS) if name in result]
    columns = pd.json_normalize([result[name] for name in names]).drop(columns="runs")
    columns.index = names
    return (
        f"d = {result['width']}, {result['blocks']} blocks, n = {result['tokens']}, {result['environment']['threads']} threads, "
        f"GEMM {gemm:.0f} GFLOP/s\n{columns.T.to_string(float_format='{:.4g}'.format)}\n{result['certificate']}"
    )


if __name__ == "__main__":
    sys.exit(main())
