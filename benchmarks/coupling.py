"""Cost of a coupling measurement: `python -m benchmarks.coupling --shape 410m --tokens 128 --blocks 4`.

Times three things in turn, in one process, with the same weights and prompt: `tracker.measure`, the published algorithm, and
plain matrix products with the shapes of a block's linear layers. Reported are medians and their ratios. With fewer blocks than
the shape has, ratios hold for those blocks: the cost of a block does not depend on the others, and the cost of the pairs grows
with the square of their number.

`--what scaling` times `tracker.measure` alone, over prompt lengths and over numbers of prompts.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.settings import Benchmark

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
PROMPTS = (1, 2, 4, 8, 16, 32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import Parser

    description = (Benchmark.__doc__ or "").split("Args:")[0]
    parser = Parser(prog="python -m benchmarks.coupling", description=description)
    parser.add_class_arguments(Benchmark, as_group=False)
    settings = Benchmark(**parser.parse_args(arguments).as_dict())
    for name in ("tokens", "k", "blocks", "prompts", "repeats", "chunk", "memory_budget"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            print(f"error: --{name} {value}; give at least 1", file=sys.stderr)
            return 2
    if settings.weights != "float32" and settings.published:
        print(
            f"error: --weights {settings.weights}: the published algorithm needs float32; add --published false",
            file=sys.stderr,
        )
        return 2

    from benchmarks import tables
    from benchmarks.machine import keep
    from tracker.common.errors import UsageError
    from tracker.provenance import usable_device

    try:
        usable_device(settings.device, f"--device {settings.device}")
        result = coupling(settings) if settings.what == "coupling" else scaling(settings)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(tables.coupling(result) if settings.what == "coupling" else tables.scaling(result))
    if settings.out:
        keep(result, settings.out)
    return 0


def coupling(settings: Benchmark) -> dict[str, Any]:
    """Time `tracker.measure`, the published algorithm and matrix products in turn, and compare times and values."""
    from benchmarks import agreement, machine, shapes, timing

    environment = machine.environment(settings.device)  # first: the load average is to exclude this benchmark
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    linear = machine.linear_shapes(shapes.blocks(model)[0])
    L, d = len(shapes.blocks(model)), linear[0][1]
    flops = sum(2 * d * outputs * inputs for outputs, inputs in linear)  # of d cotangents in a block
    jacobians: list[Tensor] = []
    with machine.saved_products() as saved:  # an untimed run of each, to warm up
        kept = jacobians if settings.published else None  # a large model's would fill the memory
        dataset = timing.ours(model, settings, machine.Clock(settings.device), kept)
    reference = timing.published(model, settings, machine.Clock(settings.device)) if settings.published else None
    other = replace(settings, svd=settings.beside) if settings.beside else None
    other_dataset = timing.ours(model, other, machine.Clock(settings.device)) if other else None
    result: dict[str, Any] = {
        **_header(settings, environment, L, d),
        "tokens": shapes.length(settings.shape, settings.tokens),
        "certificate": agreement.certificate(dataset),
    }
    if reference is not None:
        result["errors"] = agreement.errors(dataset, jacobians[:L], *reference)
    jacobians.clear()
    saved_share = sum(saved) / (flops * L * settings.prompts)
    our_runs, other_runs, published_runs, products = [], [], [], []
    for repeat in range(settings.repeats):
        print(f"run {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
        our_runs.append(timing.timed(timing.ours, model, settings))
        if other:
            other_runs.append(timing.timed(timing.ours, model, other))
        if reference is not None:
            published_runs.append(timing.timed(timing.published, model, settings))
        products.append(machine.gemm_seconds(linear, d, settings.device, settings.precision))
        result["gemm"] = {
            "layers": linear,
            "seconds_per_block": median(products),
            "flops_per_second": flops / median(products),
        }
        ours = result["ours"] = timing.medians(our_runs)
        ours |= _rates(ours, settings, L, d, result["gemm"], saved_share)
        if other_dataset is not None:
            beside = result["beside"] = timing.medians(other_runs)
            beside["differences"] = agreement.differences(dataset, other_dataset)
            beside["ratio"] = ours["seconds"] / beside["seconds"]
        if reference is not None:
            theirs = result["published"] = timing.medians(published_runs)
            result["ratio"] = _ratios(ours, theirs, settings.prompts)
        if settings.out:  # what is measured so far outlives a run that is stopped
            machine.save(result, settings.out)
    if settings.memory:
        result["ours"]["peak_bytes"] = timing.peak(timing.ours, model, settings)
        if reference is not None:
            result["published"]["peak_bytes"] = timing.peak(timing.published, model, settings)
            result["ratio"]["memory"] = result["published"]["peak_bytes"] / result["ours"]["peak_bytes"]
    return result


def _ratios(ours: dict[str, Any], theirs: dict[str, Any], prompts: int) -> dict[str, float]:
    """Return the published algorithm's time in multiples of that of `tracker.measure`, per prompt: in all and by stage."""
    stages = {
        name: theirs["stages"][name] * prompts / seconds
        for name, seconds in ours["stages"].items()
        if name in theirs["stages"]
    }
    return {"whole": theirs["seconds"] / ours["seconds_per_prompt"], **stages}


def _rates(
    ours: dict[str, Any], settings: Benchmark, L: int, d: int, gemm: dict[str, Any], saved: float
) -> dict[str, Any]:
    """Compare the stages of `tracker.measure` with the machine's matrix products.

    Args:
        saved: fraction of the operations of the d cotangents that were not needed.
    """
    stages = ours["stages"]
    jacobian = stages.get("jacobian", float("nan"))  # absent where the Jacobian is only used in products
    speedup = gemm["seconds_per_block"] * L * settings.prompts / jacobian
    pair_flops = 2 * L * L * d * settings.k * (d + settings.k) * settings.prompts
    return {
        "seconds_per_prompt": ours["seconds"] / settings.prompts,
        "svd_over_jacobian": stages["svd"] / jacobian,
        "products_saved": saved,
        "speedup_over_gemm": speedup,
        "fraction_of_gemm_rate": {
            "jacobian": (1 - saved) * speedup,
            "pairs": pair_flops / gemm["flops_per_second"] / stages["pairs"],
        },
    }


def scaling(settings: Benchmark) -> dict[str, Any]:
    """Time `tracker.measure` over prompt lengths, for one prompt, and over numbers of prompts of the given length."""
    from benchmarks import machine, shapes, timing

    environment = machine.environment(settings.device)
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    lengths = () if settings.shape in shapes.IMAGES else LENGTHS
    sizes = dict.fromkeys([*((n, 1) for n in lengths), *((settings.tokens, p) for p in PROMPTS)])
    results = []
    for n, p in sizes:
        print(f"{n} tokens, {p} prompt(s)", file=sys.stderr, flush=True)
        point = replace(settings, tokens=n, prompts=p)
        timing.ours(model, point, machine.Clock(settings.device))
        medians = timing.medians([timing.timed(timing.ours, model, point) for _ in range(settings.repeats)])
        results.append({"tokens": shapes.length(settings.shape, n), "prompts": p, **medians})
    blocks = shapes.blocks(model)
    return {**_header(settings, environment, len(blocks), machine.linear_shapes(blocks[0])[0][1]), "points": results}


def _header(settings: Benchmark, environment: dict[str, Any], L: int, d: int) -> dict[str, Any]:
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("what", "out")}
    return {"what": settings.what, "settings": chosen, "environment": environment, "blocks": L, "width": d}


if __name__ == "__main__":
    sys.exit(main())
