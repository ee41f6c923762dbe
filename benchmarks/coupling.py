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
from typing import TYPE_CHECKING, Any, Literal

from tracker.common.command_line import OK, reports_errors
from tracker.common.errors import UsageError
from tracker.common.values import Method, Precision

if TYPE_CHECKING:
    from torch import Tensor

ALGORITHMS = {
    "ours": "tracker.measure",
    "published": "the published algorithm",
    "by_hand": "torch.func.jacrev by hand",
}


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
        memory: whether to measure the peak of memory, on the CPU in a fresh process for each algorithm.
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

    from benchmarks.machine import keep
    from tracker.provenance import usable_device

    usable_device(settings.device, f"--device {settings.device}")
    result = coupling(settings)
    print(table(result))
    keep(result, settings.out)
    return OK


def coupling(settings: Benchmark) -> dict[str, Any]:
    """Time `tracker.measure`, the published algorithm and matrix products in turn, and compare times and values."""
    from benchmarks import agreement, machine, shapes, timing

    # First: the load average is to exclude this benchmark
    environment = machine.environment(settings.device)
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    linear = machine.linear_shapes(shapes.blocks(model)[0])
    L, d = len(shapes.blocks(model)), linear[0][1]
    # Of d cotangents in a block
    flops = sum(2 * d * outputs * inputs for outputs, inputs in linear)
    jacobians: list[Tensor] = []
    with machine.counted_products() as counted:  # an untimed run of each, to warm up
        kept = jacobians if settings.published else None  # a large model's would fill the memory
        dataset = timing.ours(model, settings, machine.Clock(settings.device), kept)
    others: dict[str, Any] = {"published": timing.published} if settings.published else {}
    others |= {"by_hand": timing.by_hand} if settings.by_hand else {}
    errors = {
        name: agreement.errors(
            dataset, jacobians[:L], *run(model, settings, machine.Clock(settings.device))
        )
        for name, run in others.items()
    }
    jacobians.clear()
    result: dict[str, Any] = {
        "settings": machine.settings_of(settings),
        "environment": environment,
        "blocks": L,
        "width": d,
        "tokens": shapes.length(settings.shape, settings.tokens),
        "certificate": agreement.certificate(dataset),
    }
    saved_share = 1 - sum(counted) / (flops * L * settings.prompts)
    ways = {"ours": timing.ours, **others}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    products = []
    for repeat in range(settings.repeats):
        print(f"run {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
        for name, run in ways.items():
            runs[name].append(timing.timed(run, model, settings))
            result[name] = timing.medians(runs[name])
        products.append(machine.gemm_seconds(linear, d, settings.device, settings.precision))
        result["gemm"] = {
            "layers": linear,
            "seconds_per_block": median(products),
            "flops_per_second": flops / median(products),
        }
        ours = result["ours"]
        ours |= _rates(ours, settings, L, result["gemm"]["seconds_per_block"], saved_share)
        for name in others:
            result[name] |= {
                "errors": errors[name],
                "ratio": _ratios(ours, result[name], settings.prompts),
            }
        if settings.out:  # what is measured so far outlives a run that is stopped
            machine.save(result, settings.out)
    if settings.memory:
        for name, run in ways.items():
            result[name]["peak_bytes"] = timing.peak(run, model, settings)
    return result


def _ratios(ours: dict[str, Any], theirs: dict[str, Any], prompts: int) -> dict[str, float]:
    """Return another algorithm's time in multiples of that of `tracker.measure`, per prompt: in all and by stage."""
    stages = {
        name: theirs["stages"][name] * prompts / seconds
        for name, seconds in ours["stages"].items()
        if name in theirs["stages"]
    }
    return {"whole": theirs["seconds"] / ours["seconds_per_prompt"], **stages}


def _rates(
    ours: dict[str, Any], settings: Benchmark, L: int, gemm_seconds: float, saved: float
) -> dict[str, Any]:
    """Compare the stages of `tracker.measure` with the machine's matrix products.

    Args:
        gemm_seconds: of the products of d cotangents in a block.
        saved: fraction of the operations of the d cotangents that were not needed.
    """
    stages = ours["stages"]
    speedup = gemm_seconds * L * settings.prompts / stages["jacobian"]
    return {
        "seconds_per_prompt": ours["seconds"] / settings.prompts,
        "svd_over_jacobian": stages["svd"] / stages["jacobian"],
        "products_saved": saved,
        "speedup_over_gemm": speedup,
        "fraction_of_gemm_rate": {"jacobian": (1 - saved) * speedup},
    }


def table(result: dict[str, Any]) -> str:
    """Format a result for a terminal: a line for each algorithm, and what its times are compared with."""
    settings, ours, certificate = result["settings"], result["ours"], result["certificate"]
    lines = [
        f"{settings['shape']}: d = {result['width']}, {result['blocks']} blocks, n = {result['tokens']}, K = {settings['k']}, "
        f"{settings['prompts']} prompt(s), {settings['device']}, {result['environment']['threads']} threads"
    ]
    for name, text in ALGORITHMS.items():
        if name not in result:
            continue
        algorithm = result[name]
        parts = [f"{stage} {seconds:.3f} s" for stage, seconds in algorithm["stages"].items()]
        if "peak_bytes" in algorithm:
            parts.append(f"peak {algorithm['peak_bytes'] / 1e6:.1f} MB")
        lines.append(f"{text}: {algorithm['seconds']:.3f} s ({', '.join(parts)})")
        if name != "ours":
            ratios = [f"{stage} {ratio:.2f}" for stage, ratio in algorithm["ratio"].items()]
            errors = [f"{measure} {error:.1e}" for measure, error in algorithm["errors"].items()]
            lines.append(f"    ratio per prompt: {', '.join(ratios)}; errors: {', '.join(errors)}")
    rate, saved = ours["fraction_of_gemm_rate"]["jacobian"], ours["products_saved"]
    lines += [
        f"GEMM {result['gemm']['flops_per_second'] / 1e9:.0f} GFLOP/s; Jacobians at {rate:.1%} of GEMM rate, "
        f"{ours['speedup_over_gemm']:.2f} times as fast as all products of d cotangents, of whose operations {saved:.0%} are "
        "skipped",
        f"SVD stage {ours['svd_over_jacobian']:.0%} of the Jacobian stage; residual {certificate['residual']:.1e}, complete "
        f"{certificate['complete']}, full SVD {certificate['full_svd']:.0%}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
