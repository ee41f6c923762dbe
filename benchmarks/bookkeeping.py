"""Time what is done with a measured unit: `python -m benchmarks.bookkeeping --out results/nano`.

The store is walked with `python -m tracker.pythia --model nano --measures all --out results/nano --wandb offline` before. CPU
time of one thread, medians of repeated calls: curve points, the summary for the page, the row of a logger and its pictures; the
first two also of all steps together, repeated to as many as `steps` names.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tracker.common.command_line import OK, reports_errors


def cpu_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Return the median CPU time of calls, after one to warm up."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return median(seconds)


def measure_bookkeeping(out: Path, steps: Sequence[int] = (11, 154), repeats: int = 9) -> dict[str, float]:
    """Return the CPU seconds of each part, by its name and the number of steps.

    Args:
        out: a store, or its directory.
        steps: how many steps the Datasets along `step` have.
        repeats: of each call.
    """
    import numpy as np
    import torch

    from tracker.analysis.curves import CURVES, curves
    from tracker.analysis.reduction import reduced
    from tracker.loggers.protocol import Row
    from tracker.store import open_results

    torch.set_num_threads(1)
    along = open_results(out).load()
    unit = along.isel(step=-1)
    row = Row.from_unit(unit)
    seconds = {
        "curves, 1 unit": cpu_seconds(lambda: curves(unit), repeats),
        "curves of all measures, 1 unit": cpu_seconds(lambda: curves(unit, CURVES), repeats),
        "summary, 1 unit": cpu_seconds(lambda: reduced(unit), repeats),
        "row, 1 unit": cpu_seconds(lambda: Row.from_unit(unit), repeats),
        "pictures, 1 unit": cpu_seconds(row.heatmaps, repeats),
    }
    for count in steps:
        many = along.isel(step=np.arange(count) % along.sizes["step"])
        seconds[f"curves of all measures, {count} steps"] = cpu_seconds(lambda: curves(many, CURVES), 3)  # noqa: B023
        seconds[f"summary, {count} steps"] = cpu_seconds(lambda: reduced(many), 3)  # noqa: B023
    return seconds


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser

    parser = Parser(prog="python -m benchmarks.bookkeeping", description=__doc__ and __doc__.split(":")[0])
    parser.add_function_arguments(measure_bookkeeping, as_group=False)
    for name, seconds in measure_bookkeeping(**parser.parse_args(arguments).as_dict()).items():
        print(f"{name}: {1000 * seconds:.0f} ms")
    return OK


if __name__ == "__main__":
    sys.exit(main())
