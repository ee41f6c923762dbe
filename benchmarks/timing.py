"""Timed runs of `tracker.measure` and of the published algorithm: seconds by stage, medians, peak memory."""

import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

    from benchmarks.coupling import Benchmark
    from benchmarks.machine import Clock

    Run = Callable[[nn.Module, Benchmark, Clock], Any]

STAGES = (  # of `tracker.measure`, and the functions that are timed as such
    ("forward", "tracker.measures.calls", "record"),
    ("jacobian", "tracker.jacobians.rows:Jacobians", "__call__"),
    # Called within the stage before, like the next ones
    ("checks", "tracker.jacobians.rows", "derivative_error"),
    ("checks", "tracker.jacobians.rows", "differ_from_values"),
    ("checks", "tracker.jacobians.rows", "settle"),
    ("svd", "tracker.measures.layers", "triplets_of_each"),
    ("pairs", "tracker.measures.depthwise", "pairs"),
)


def ours(
    model: "nn.Module",
    settings: "Benchmark",
    clock: "Clock",
    jacobians: "list[Tensor] | None" = None,
) -> "xr.Dataset":
    """Run `tracker.measure` and time its stages; append the first prompt's Jacobians to `jacobians` if it is given."""
    import tracker
    from benchmarks import shapes
    from tracker.measures.settings import MEMORY_BUDGET

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with clock(stage):
                result = function(*arguments, **keywords)
            if jacobians is not None and stage == "jacobian":
                jacobians.append(result[0][0][0])  # the first row of the first selection
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
            memory_budget=settings.memory_budget or MEMORY_BUDGET,
        )


def _published(
    jacobian: str, model: "nn.Module", settings: "Benchmark", clock: "Clock"
) -> "tuple[Tensor, Tensor, dict[str, Tensor]]":
    """Run the published algorithm on the first prompt, with Jacobians by a function of `benchmarks.published`."""
    from benchmarks import published, shapes

    inputs = shapes.inputs(settings.shape, settings.tokens, settings.prompts)[:1].to(
        settings.device
    )
    position = shapes.position(settings.shape)
    form = getattr(published, jacobian)
    return published.couplings(
        model, shapes.blocks(model), inputs, position, settings.k, clock, form
    )


published = partial(_published, "whole_sequence")
by_hand = partial(_published, "by_hand")


def timed(run: "Run", model: "nn.Module", settings: "Benchmark") -> dict[str, float]:
    """Return the seconds of a run, in all ("whole") and by stage."""
    from benchmarks.machine import Clock

    clock = Clock(settings.device)
    started = clock.now()
    run(model, settings, clock)
    return {"whole": clock.now() - started, **clock.seconds}


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median seconds of runs, in all and by stage, and the runs themselves."""
    stages = {name: median(run[name] for run in runs) for name in runs[0] if name != "whole"}
    return {"seconds": median(run["whole"] for run in runs), "stages": stages, "runs": runs}


def peak(run: "Run", model: "nn.Module", settings: "Benchmark") -> int:
    """Return the peak of memory above model and libraries, in bytes; on the CPU, in a fresh process."""
    from benchmarks import machine

    if settings.device.startswith("cuda"):
        return _peak_above_model(run, model, settings)
    return machine.alone(_peak_in_process, run, settings)


def _peak_in_process(run: "Run", settings: "Benchmark") -> int:
    from benchmarks import machine, shapes

    small = replace(settings, shape="14m", tokens=8, k=2, blocks=2, prompts=1)
    # Loads libraries
    run(shapes.model("14m", 2, settings.device), small, machine.Clock(settings.device))
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    return _peak_above_model(run, model, settings)


def _peak_above_model(run: "Run", model: "nn.Module", settings: "Benchmark") -> int:
    from benchmarks import machine

    before = machine.reset_peak(settings.device)
    run(model, settings, machine.Clock(settings.device))
    return machine.peak(settings.device) - before
