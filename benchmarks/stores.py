"""Stores of many units: `python -m benchmarks.stores --units 11,154,1000`.

Writes generated stores, and prints the CPU time of what reads them, and by how much the process grows: each in a process of
its own, imports excluded.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
        work: which of open, resume, summary, page and replay, with commas between them.
    """

    units: str = "11,154,1000"
    work: str = ",".join(WORK)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import parsed

    settings = parsed(Stores, "benchmarks.stores", arguments)
    from benchmarks import machine
    from tests.support.stores import generated

    with tempfile.TemporaryDirectory() as directory:
        for count in map(int, settings.units.split(",")):
            path = Path(directory, str(count))
            steps = [1000 * i for i in range(count)]
            shape = {"layers": 6, "ks": (10, 30, 50), "prompts": 16}
            generated(path, steps, **shape, model_name="generated", device="cpu")
            for name in settings.work.split(","):
                seconds, grown = machine.alone(run, name, str(path))
                print(
                    f"{count:,} units, {name}: {seconds:.2f} s, {grown / 1e6:,.0f} MB", flush=True
                )
    return 0


def run(name: str, path: str) -> tuple[float, int]:
    """Do the work in this process; return its CPU seconds and the bytes by which the process grew."""
    from benchmarks import machine

    imports, work = WORK[name]
    variables = {"path": path}
    exec(imports, variables)
    started = time.process_time()
    grown = machine.peak(partial(exec, work, variables))
    return time.process_time() - started, grown


if __name__ == "__main__":
    sys.exit(main())
