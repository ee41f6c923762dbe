"""Stores of many units: `python -m benchmarks.stores --units 11,154,1000`.

Writes generated stores, and prints the CPU time and the peak memory of what reads them, each in a process of its own, imports
excluded, and the exponent with which the time grows between the last two sizes.
"""

import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What is timed, by name: imports, then the work on the directory `path`.
WORK = {
    "open": ("import tracker, tracker.store", "tracker.open_results(path)"),
    "resume": (
        "from tracker.store import Store; from tracker.walk.units import Units",
        "Units(Store(path)).read(Store(path).steps())",
    ),
    "summary": ("import tracker, tracker.analysis.summary", "tracker.summary(path)"),
    "page": (
        "from tracker.report.write import write_report; import plotly.io",
        "write_report(path, f'{path}.html')",
    ),
    "replay": (
        "from pathlib import Path; from tracker.replay import replay; from tracker.loggers import protocol",
        "replay(Path(path), 'p', 'n', [], 'workspace')",
    ),
}


@dataclass
class Stores:
    """Time what reads stores of generated units.

    Args:
        units: numbers of units, with commas between them.
        layers: blocks of the model.
        prompts: prompts of each unit.
        work: which of open, resume, summary, page and replay, with commas between them.
    """

    units: str = "11,154,1000"
    layers: int = 6
    prompts: int = 16
    work: str = ",".join(WORK)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import parsed

    settings = parsed(Stores, "benchmarks.stores", arguments)
    from tests.support.stores import generated

    sizes = [int(count) for count in settings.units.split(",")]
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in settings.work.split(",")}
    with tempfile.TemporaryDirectory() as directory:
        for count in sizes:
            path = Path(directory, str(count))
            steps = [1000 * i for i in range(count)]
            shape = {"layers": settings.layers, "ks": (10, 30, 50), "prompts": settings.prompts}
            generated(path, steps, **shape, model_name="generated", device="cpu")
            for name, results in costs.items():
                results.append(_timed(name, path))
    print("|" + "|".join(["", *(f"{count:,} units" for count in sizes), "exponent"]) + "|")
    print("|---" * (len(sizes) + 2) + "|")
    for name, results in costs.items():
        cells = [f"{seconds:.2f} s, {peak / 1e6:,.0f} MB" for seconds, peak in results]
        growth = math.nan
        if len(sizes) > 1:
            growth = math.log(results[-1][0] / results[-2][0]) / math.log(sizes[-1] / sizes[-2])
        print("|" + "|".join([name, *cells, f"{growth:.2f}"]) + "|")
    return 0


def _timed(name: str, path: Path) -> tuple[float, float]:
    """Return the CPU seconds of the work, and the bytes by which the process grew."""
    code = "import sys; from benchmarks.stores import run; run(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, name, path], capture_output=True, text=True, check=True
    )
    seconds, peak = done.stdout.splitlines()[-1].split()
    return float(seconds), float(peak)


def run(name: str, path: str) -> None:
    """Do the work in this process, and print its CPU seconds and the bytes by which the process grew."""
    imports, work = WORK[name]
    variables = {"path": path}
    exec(imports, variables)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    exec(work, variables)
    seconds = time.process_time() - started
    print(seconds, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


if __name__ == "__main__":
    sys.exit(main())
