"""Dry runs against measurements: `python -m benchmarks.dry_run --shape 70m --tokens 64 --prompts 2 --k 10`.

Times `tracker.measure(..., dry_run=True)` and `tracker.measure` in turn, in one process, and prints medians: the seconds that a
dry run takes and predicts, and those that measuring takes.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass
class DryRun:
    """Compare the estimates of dry runs with measurements of a random model.

    Args:
        shape: a Pythia size, deit-ti or deit-ti-224.
        blocks: number of blocks. Default: the shape's.
        tokens: length of the prompts.
        prompts: number of prompts or images.
        k: number of singular vectors.
        svd: as in `tracker.measure`.
        repeats: number of runs of each.
    """

    shape: str
    blocks: int | None = None
    tokens: int = 64
    prompts: int = 1
    k: int = 10
    svd: str = "auto"
    repeats: int = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import Parser

    parser = Parser(prog="python -m benchmarks.dry_run", description=(DryRun.__doc__ or "").split("Args:")[0])
    parser.add_class_arguments(DryRun, as_group=False)
    settings = DryRun(**parser.parse_args(arguments).as_dict())

    import os

    import tracker
    from benchmarks import shapes

    model = shapes.model(settings.shape, settings.blocks, "cpu")
    x = shapes.inputs(settings.shape, settings.tokens, settings.prompts)
    options = {"k": settings.k, "svd": settings.svd}
    tracker.measure(shapes.model("14m", 2, "cpu"), shapes.inputs("14m", 16, 1), progress=False)  # starts the libraries
    runs = []
    for _ in range(settings.repeats):
        started = time.perf_counter()
        cost = tracker.measure(model, x, dry_run=True, **options)
        between = time.perf_counter()
        tracker.measure(model, x, progress=False, **options)
        runs.append((between - started, cost.seconds, time.perf_counter() - between))
    own, predicted, actual = map(median, zip(*runs, strict=True))
    print(
        f"{settings.shape}: a dry run takes {own:.2f} s and predicts {predicted:.2f} s; measuring takes {actual:.2f} s; "
        f"predicted / actual {predicted / actual:.2f}; load average {os.getloadavg()[0]:.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
