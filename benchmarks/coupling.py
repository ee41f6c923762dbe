"""What a coupling measurement costs: `python -m benchmarks.coupling --shape 410m --tokens 128 --blocks 4`.

In one process, alternating, on the same weights and prompt: `tracker.measure`, the published algorithm, and the
machine's own matrix products on the shapes of a block's linear layers. Medians; ratios are what counts. With fewer
blocks than the shape has, ratios hold for those blocks: what a block costs does not depend on the others, and the pairs
go with the square of their number.

`--what scaling` times `tracker.measure` alone, over prompt lengths and over numbers of prompts.
"""

import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

from tracker.values import Method, Precision

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

    from benchmarks.machine import Clock

    Run = Callable[[nn.Module, "Benchmark", Clock], Any]

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
PROMPTS = (1, 2, 4, 8, 16, 32)
STAGES = (  # of `tracker.measure`, and the functions whose time they are
    ("forward", "tracker.measurement", "record"),
    ("jacobian", "tracker.jacobians.rows:Jacobians", "__call__"),
    ("proofs", "tracker.jacobians.check_cache", "derivative_error"),  # within the stage before, as the next
    ("proofs", "tracker.jacobians.check_cache", "find_mixing"),
    ("svd", "tracker.measures.depthwise", "triplets_of_each"),
    ("svd", "tracker.measures.depthwise", "triplets_by_products"),
    ("pairs", "tracker.measures.depthwise", "pairs"),
)


@dataclass
class Benchmark:
    """Time a coupling measurement against the published algorithm and against the machine's matrix products.

    Args:
        shape: a Pythia size, or deit-ti (32 x 32 images of 65 tokens); random weights.
        tokens: length of the prompts.
        k: how many top singular vectors.
        blocks: the first so many blocks alone. Default: all; the published algorithm then takes hours on large shapes.
        prompts: how many prompts or images ours measures at once; the published algorithm takes one.
        what: coupling, against the published algorithm; or scaling, of ours over lengths and numbers of prompts.
        svd: how ours finds singular vectors.
        beside: another way to find them, timed in turn with it.
        precision: of the products that our Jacobians are made of.
        device: cpu, cuda, cuda:1 and so on.
        repeats: how often each is timed; the median counts.
        chunk: cotangents at once in the published algorithm.
        published: whether to run the published algorithm at all.
        memory: whether to watch the peak of memory, on the CPU in a fresh process for each algorithm.
        out: a JSON file for the result.
    """

    shape: Literal["14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b", "deit-ti"]
    tokens: int = 128
    k: int = 50
    blocks: int | None = None
    prompts: int = 1
    what: Literal["coupling", "scaling"] = "coupling"
    svd: Method = "auto"
    beside: Method | None = None
    precision: Precision = "float32"
    device: str = "cpu"
    repeats: int = 5
    chunk: int = 32
    published: bool = True
    memory: bool = True
    out: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    description = (Benchmark.__doc__ or "").split("Args:")[0]
    parser = ArgumentParser(prog="python -m benchmarks.coupling", description=description)
    parser.add_class_arguments(Benchmark, as_group=False)
    settings = Benchmark(**parser.parse_args(arguments).as_dict())
    for name in ("tokens", "k", "blocks", "prompts", "repeats", "chunk"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            print(f"error: --{name} {value}; give at least 1", file=sys.stderr)
            return 2

    from benchmarks import tables
    from benchmarks.machine import keep
    from tracker.errors import UsageError
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
    """Ours, the published algorithm and matrix products in turn."""
    from benchmarks import machine, shapes

    environment = machine.environment(settings.device)  # before the machine is busy with this
    model = shapes.model(settings.shape, settings.blocks, settings.device)
    linear = machine.linear_shapes(shapes.blocks(model)[0])
    L, d = len(shapes.blocks(model)), linear[0][1]
    jacobians: list[Tensor] = []
    with machine.saved_products() as saved:
        dataset = ours(model, settings, machine.Clock(settings.device), jacobians)  # once untimed: libraries warm up
    reference = published(model, settings, machine.Clock(settings.device)) if settings.published else None
    other = replace(settings, svd=settings.beside) if settings.beside else None
    other_dataset = ours(model, other, machine.Clock(settings.device)) if other else None
    our_runs, other_runs, published_runs, products = [], [], [], []
    for repeat in range(settings.repeats):
        print(f"run {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
        our_runs.append(_timed(ours, model, settings))
        if other:
            other_runs.append(_timed(ours, model, other))
        if reference is not None:
            published_runs.append(_timed(published, model, settings))
        products.append(machine.gemm_seconds(linear, d, settings.device))
    result: dict[str, Any] = {
        **_header(settings, environment, L, d),
        "tokens": shapes.length(settings.shape, settings.tokens),
        "gemm": {"layers": linear, "seconds_per_block": median(products)},
        "ours": _medians(our_runs),
        "certificate": _certificate(dataset),
    }
    flops = sum(2 * d * outputs * inputs for outputs, inputs in linear)  # of d cotangents through every layer
    rate = flops / median(products)
    result["gemm"]["flops_per_second"] = rate
    mine, stages = result["ours"], result["ours"]["stages"]
    pair_flops = 2 * L * L * d * settings.k * (d + settings.k) * settings.prompts
    mine["seconds_per_prompt"] = mine["seconds"] / settings.prompts
    jacobian = stages.get("jacobian", float("nan"))
    mine["svd_over_jacobian"] = stages["svd"] / jacobian
    mine["products_saved"] = sum(saved) / (flops * L * settings.prompts)
    mine["speedup_over_gemm"] = median(products) * L * settings.prompts / jacobian
    mine["fraction_of_gemm_rate"] = {
        "jacobian": (1 - mine["products_saved"]) * mine["speedup_over_gemm"],
        "pairs": pair_flops / rate / stages["pairs"],
    }
    if other_dataset is not None:
        result["beside"] = _medians(other_runs) | {"differences": _differences(dataset, other_dataset)}
        result["beside"]["ratio"] = mine["seconds"] / result["beside"]["seconds"]
    if settings.memory:
        mine["peak_bytes"] = _peak(ours, model, settings)
    if reference is not None:
        theirs = result["published"] = _medians(published_runs)
        result["ratio"] = {"whole": theirs["seconds"] / mine["seconds_per_prompt"]}
        result["ratio"] |= {
            name: theirs["stages"][name] * settings.prompts / seconds
            for name, seconds in stages.items()
            if name in theirs["stages"]
        }
        result["errors"] = _errors(dataset, jacobians[:L], *reference)
        if settings.memory:
            theirs["peak_bytes"] = _peak(published, model, settings)
            result["ratio"]["memory"] = theirs["peak_bytes"] / mine["peak_bytes"]
    return result


def scaling(settings: Benchmark) -> dict[str, Any]:
    """Ours over prompt lengths, one prompt at a time; and over numbers of prompts of the length given."""
    from benchmarks import machine, shapes

    environment = machine.environment(settings.device)
    model = shapes.model(settings.shape, settings.blocks, settings.device)
    lengths = () if settings.shape == "deit-ti" else LENGTHS
    sizes = dict.fromkeys([*((n, 1) for n in lengths), *((settings.tokens, p) for p in PROMPTS)])
    results = []
    for n, p in sizes:
        print(f"{n} tokens, {p} prompt(s)", file=sys.stderr, flush=True)
        point = replace(settings, tokens=n, prompts=p)
        ours(model, point, machine.Clock(settings.device))
        timed = _medians([_timed(ours, model, point) for _ in range(settings.repeats)])
        results.append({"tokens": shapes.length(settings.shape, n), "prompts": p, **timed})
    blocks = shapes.blocks(model)
    return {**_header(settings, environment, len(blocks), machine.linear_shapes(blocks[0])[0][1]), "points": results}


def ours(
    model: "nn.Module", settings: Benchmark, clock: "Clock", jacobians: "list[Tensor] | None" = None
) -> "xr.Dataset":
    """`tracker.measure`, its stages clocked; where a list is given, the first prompt's Jacobians go there."""
    import tracker
    from benchmarks import shapes

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with clock(stage):
                result = function(*arguments, **keywords)
            if jacobians is not None and stage == "jacobian":
                jacobians.append(result[0][0][0])  # of the first selection, its Jacobians, the first row's
            return result

        return run

    with ExitStack() as stack:
        for stage, owner, name in STAGES:
            part = pkgutil.resolve_name(owner)
            stack.enter_context(patch.object(part, name, clocked(stage, getattr(part, name))))
        return tracker.measure(
            model,
            shapes.inputs(settings.shape, settings.tokens, settings.prompts),
            k=settings.k,
            blocks=shapes.blocks(model),
            tokens=[shapes.position(settings.shape)],
            final_norm="exclude",
            svd=settings.svd,
            precision=settings.precision,
            device=settings.device,
            measures="coupling",
        )


def published(model: "nn.Module", settings: Benchmark, clock: "Clock") -> "tuple[Tensor, Tensor, dict[str, Tensor]]":
    """The published algorithm, of the first prompt."""
    from benchmarks import shapes
    from benchmarks.published import couplings

    inputs = shapes.inputs(settings.shape, settings.tokens, settings.prompts)[:1].to(settings.device)
    position = shapes.position(settings.shape)
    return couplings(model, shapes.blocks(model), inputs, position, settings.k, settings.chunk, clock)


def _timed(run: "Run", model: "nn.Module", settings: Benchmark) -> dict[str, float]:
    from benchmarks.machine import Clock

    clock = Clock(settings.device)
    started = clock.now()
    run(model, settings, clock)
    return {"whole": clock.now() - started, **clock.seconds}


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    stages = {name: median(run[name] for run in runs) for name in runs[0] if name != "whole"}
    return {"seconds": median(run["whole"] for run in runs), "stages": stages, "runs": runs}


def _peak(run: "Run", model: "nn.Module", settings: Benchmark) -> int:
    """Bytes above model and libraries; on the CPU in a process of its own, where nothing was freed before."""
    if settings.device.startswith("cuda"):
        return _peak_of(run, model, settings)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_peak_alone, run, settings).result()


def _peak_alone(run: "Run", settings: Benchmark) -> int:
    from benchmarks import machine, shapes

    small = replace(settings, shape="14m", tokens=8, k=2, blocks=2, prompts=1)
    run(shapes.model("14m", 2, settings.device), small, machine.Clock(settings.device))  # loads what is loaded once
    return _peak_of(run, shapes.model(settings.shape, settings.blocks, settings.device), settings)


def _peak_of(run: "Run", model: "nn.Module", settings: Benchmark) -> int:
    from benchmarks import machine

    before = machine.reset_peak(settings.device)
    run(model, settings, machine.Clock(settings.device))
    return machine.peak(settings.device) - before


def _certificate(dataset: "xr.Dataset") -> dict[str, Any]:
    return {
        "residual": float(dataset["residual"].max()),
        "complete": bool(dataset["complete"].all()),
        "full_svd": float(dataset["full_svd"].mean()),
        "sliced": float(dataset["sliced"].mean()),
        "smallest_gap": float(dataset["singular_gap"].min()),
    }


def _differences(dataset: "xr.Dataset", other: "xr.Dataset") -> dict[str, float]:
    """Largest difference of the measures and, relative to s_1, of the singular values."""
    from tracker.measures.registry import MISCOUPLINGS

    found = {name: float(abs(dataset[name] - other[name]).max()) for name in MISCOUPLINGS}
    s, t = dataset["singular_value"], other["singular_value"]
    return found | {"singular_value": float((abs(s - t) / s.isel(rank=0)).max())}


def _errors(
    dataset: "xr.Dataset", J: "list[Tensor]", expected: "Tensor", s: "Tensor", by_name: dict
) -> dict[str, float]:
    """Ours against published, of the first prompt: both are in float32, so neither is the truth."""
    import torch

    first = dataset.isel(prompt=0, token=0, k=0)
    measured = torch.from_numpy(first["singular_value"].values).to(s)
    norm = torch.linalg.matrix_norm
    errors = {"singular_value": float(((measured - s).abs() / s[:, :1]).max())}
    if J:
        errors["jacobian"] = float((norm(torch.stack(J) - expected) / norm(expected)).max())
    for name, values in by_name.items():
        errors[name] = float((torch.from_numpy(first[name].values) - values).abs().max())
    return errors


def _header(settings: Benchmark, environment: dict[str, Any], L: int, d: int) -> dict[str, Any]:
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("what", "out")}
    return {"what": settings.what, "settings": chosen, "environment": environment, "blocks": L, "width": d}


if __name__ == "__main__":
    sys.exit(main())
