"""Timed runs of `tracker.measure` and of the published algorithm: seconds by stage, medians, peak memory."""

import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import xarray as xr
from torch import nn

import tracker
from benchmarks import machine, published, shapes
from benchmarks.machine import Clock
from tracker.measures.settings import MEMORY_BUDGET

if TYPE_CHECKING:
    from benchmarks.coupling import Benchmark

Run = Callable[[nn.Module, "Benchmark", Clock], Any]

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
    model: nn.Module, settings: "Benchmark", clock: Clock, keep: tuple[str, ...] = ()
) -> xr.Dataset:
    """Run `tracker.measure` and time its stages."""

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with clock(stage):
                return function(*arguments, **keywords)

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
            keep=keep,
        )


RUNS: dict[str, Run] = {
    "ours": ours,
    "published": partial(published.couplings, jacobian=published.whole_sequence),
    "by_hand": partial(published.couplings, jacobian=published.by_hand),
}


def timed(run: Run, model: nn.Module, settings: "Benchmark") -> dict[str, float]:
    """Return the seconds of a run, in all ("whole") and by stage."""
    clock, started = Clock(settings.device), machine.now(settings.device)
    run(model, settings, clock)
    return {"whole": machine.now(settings.device) - started, **clock.seconds}


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median seconds of runs, in all and by stage, and the runs themselves."""
    stages = {name: median(run[name] for run in runs) for name in runs[0]}
    return {"seconds": stages.pop("whole"), "stages": stages, "runs": runs}


def peak(run: Run, settings: "Benchmark") -> int:
    """Return the peak of this fresh process's memory above model and libraries, in bytes."""
    small = replace(settings, shape="14m", tokens=8, k=2, blocks=2, prompts=1)
    # Loads libraries
    timed(run, shapes.model("14m", 2, settings.device), small)
    model = shapes.model(settings.shape, settings.blocks, settings.device, weights=settings.weights)
    return machine.peak(partial(timed, run, model, settings))
